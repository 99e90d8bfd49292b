"""Examples that generate, and a student: each trains as by hand, and a resume changes nothing."""

import copy

import pytest
import torch

import examples.ddpm.by_hand as ddpm
import examples.distillation.by_hand as distillation
import examples.vae.by_hand as vae
import examples.wgan_gp.by_hand as wgan_gp
from gallery import ROOT, check_resume
from regimen.data.batch import concat_batches
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.experiment import build
from same_run import logged
from toys import assert_equal

EXAMPLES = [  # with what makes them short, and what they log
    pytest.param("vae", ["trainer.max_epochs=1"], ["val/elbo", "test/elbo"], id="vae"),
    pytest.param(
        "wgan_gp",
        ["trainer.max_epochs=3", "trainer.validate_every_n_epochs=1"],
        ["train/wasserstein", "train/loss_critic_penalty", "val/fid", "test/fid"],
        id="wgan_gp",
    ),
    pytest.param(
        "ddpm",
        ["trainer.max_epochs=1", "trainer.validate_every_n_epochs=1", "callbacks.samples.count=16"],
        ["val/loss", "samples/fid", "test/loss"],
        id="ddpm",
    ),
]


def command_of(name):
    """Return the arguments of the command in an example's README."""
    readme = (ROOT / "examples" / name / "README.md").read_text(encoding="utf-8")
    lines = [line.partition("#")[0].split() for line in readme.splitlines()]
    commands = [words[1:] for words in lines if words[:1] == ["train"]]
    return next(words for words in commands if f"experiment={name}" in words)


def trainer_of(name, *more, callbacks="none", parts=1):
    """Build an example's training of one epoch in float64, without validation."""
    options = ["trainer.precision=fp64", "trainer.max_epochs=1", "trainer.limit_val_batches=0"]
    split = f"trainer.gradient_accumulation_steps={parts}"
    config = compose([*command_of(name), *options, f"callbacks={callbacks}", split, *more]).config
    return build(config).trainer


def batches_of(trainer):
    """Return the batches of the first epoch, each with all samples of its micro-batches."""
    batches = []
    parts = []
    for micro_batches in trainer.draw(0, 0, trainer.steps_per_epoch):
        for micro_batch in micro_batches:
            parts.append(micro_batch.batch)
            place = micro_batch.batch_slice
            if place.micro_batch + 1 == place.micro_batches:
                batches.append(concat_batches(parts))
                parts = []
    return batches


@pytest.fixture(autouse=True)
def in_the_clone(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more", "shown"), EXAMPLES)
def test_an_example_trains_and_a_resume_from_the_middle_is_the_whole_run(
    train, tmp_path, name, more, shown
):
    whole = check_resume(train, tmp_path, [*command_of(name), *more], step=7)
    assert set(shown) <= {key for line in logged(whole) for key in line}


@pytest.mark.parametrize("parts", [1, 4])
def test_vae_by_hand(parts):
    trainer = trainer_of("vae", parts=parts)
    model = copy.deepcopy(trainer.model)
    vae.train(model, batches_of(trainer))
    trainer.fit()
    assert trainer.state.global_step == 20
    assert_equal(trainer.model, model)


@pytest.mark.parametrize("parts", [1, 4])
def test_wgan_gp_by_hand(parts):
    trainer = trainer_of("wgan_gp", parts=parts)
    model = copy.deepcopy(trainer.model)
    wgan_gp.train(model, iter(batches_of(trainer)), rounds=4)
    trainer.fit()
    assert trainer.state.global_step == 4
    assert_equal(trainer.model, model)


@pytest.mark.parametrize("parts", [1, 4])
def test_ddpm_by_hand(parts):
    trainer = trainer_of(
        "ddpm", "callbacks.samples.count=8", callbacks="[ema,samples]", parts=parts
    )
    model = copy.deepcopy(trainer.model)
    average = ddpm.train(model, batches_of(trainer))
    trainer.fit()
    assert trainer.state.global_step == 10
    assert_equal(trainer.model, model)
    with trainer.average_weights():
        assert_equal(trainer.model, average)
    assert_equal(trainer.model, model)
    samples = trainer.callbacks["samples"].sampled(trainer)
    generator = torch.Generator().manual_seed(0)
    expected = ddpm.sample(average.float(), len(samples), 8, generator)
    torch.testing.assert_close(samples.float(), expected, rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def teacher(train, tmp_path_factory):
    """A finished run of the teacher, of one epoch."""
    run = tmp_path_factory.mktemp("runs") / "teacher"
    typed = ["--config-dir", "examples/distillation/conf", "experiment=teacher"]
    train([*typed, "trainer.max_epochs=1", f"run_dir={run}"], folder=ROOT)
    return run


@pytest.mark.slow
def test_distillation_resumes_and_is_as_by_hand(train, teacher, tmp_path):
    given = f"task.teacher={teacher}"
    more = [given, "trainer.max_epochs=1", "loader.batch_size=128"]
    whole = check_resume(train, tmp_path, [*command_of("distillation"), *more], step=7)
    shown = {key for line in logged(whole) for key in line}
    assert {"train/loss_teacher", "test/accuracy"} <= shown

    weights = torch.load(teacher / "checkpoints" / "best.pt", weights_only=True)["model"]
    for parts in (1, 4):
        trainer = trainer_of("distillation", given, callbacks="[checkpoint]", parts=parts)
        network = trainer.task.teacher
        assert {*trainer.optimizers.parameters()} == {*trainer.model.parameters()}
        model = copy.deepcopy(trainer.model)
        distillation.train(model, batches_of(trainer), network)
        trainer.fit()
        assert_equal(trainer.model, model)
        assert not network.training
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor.float(), weights[name])
