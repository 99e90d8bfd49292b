"""Examples that generate, and a student: each trains as by hand, and a resume changes nothing."""

import copy
import shutil
from pathlib import Path

import pytest

import examples.vae.by_hand as vae
from regimen.data.batch import concat_batches
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.experiment import build
from same_run import differences, logged
from toys import assert_equal

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [  # with what makes them short, and what they log
    pytest.param(
        "vae",
        ["trainer.max_epochs=2", "loader.batch_size=128"],
        {"val/elbo", "test/elbo"},
        id="vae",
    ),
]


def command_of(name):
    """Return the arguments of the command in an example's README."""
    readme = (ROOT / "examples" / name / "README.md").read_text(encoding="utf-8")
    lines = [line.partition("#")[0].split() for line in readme.splitlines()]
    (command,) = [
        line[1:] for line in lines if line[:1] == ["train"] and f"experiment={name}" in line
    ]
    return command


def trainer_of(name, *more):
    """Build an example's training in float64, without callbacks."""
    options = ["trainer.precision=fp64", "callbacks=none", "trainer.limit_val_batches=0", *more]
    config = compose([*command_of(name), *options]).config
    return build(config).trainer


def batches_of(trainer):
    """Return the batches of the first epoch, each with all samples of an update."""
    updates = trainer.draw(0, 0, trainer.steps_per_epoch)
    return [concat_batches([m.batch for m in micro_batches]) for micro_batches in updates]


@pytest.fixture(autouse=True)
def in_the_clone(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more", "shown"), EXAMPLES)
def test_an_example_trains_and_a_resume_from_the_middle_is_the_whole_run(
    train, tmp_path, name, more, shown
):
    typed = [*command_of(name), *more, "trainer.log_every_n_steps=2"]
    typed += ["callbacks.checkpoint.every_n_steps=7", "callbacks.checkpoint.save_top_k=-1"]
    whole = tmp_path / "whole"
    train([*typed, f"run_dir={whole}"], folder=ROOT)
    assert shown <= {key for line in logged(whole) for key in line}

    resumed = shutil.copytree(whole, tmp_path / "resumed")
    middle = resumed / "checkpoints" / "step-00000007.pt"
    train([*typed, f"resume={middle}"], folder=ROOT)
    assert differences(whole, resumed, but=["config"]) == []


@pytest.mark.parametrize("parts", [1, 4])
def test_vae_by_hand(parts):
    trainer = trainer_of(
        "vae", "trainer.max_epochs=1", f"trainer.gradient_accumulation_steps={parts}"
    )
    model = copy.deepcopy(trainer.model)
    vae.train(model, batches_of(trainer))
    trainer.fit()
    assert trainer.state.global_step == 20
    assert_equal(trainer.model, model)
