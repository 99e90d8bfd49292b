"""Examples beside the usual: a strategy, and tasks that compare, imitate or learn to learn."""

import copy
import shutil

import pytest
import torch
from torch import nn

from examples.byol import by_hand as byol_by_hand
from examples.hogwild.strategy import SeldomAgreeing, _share
from examples.maml import by_hand as maml_by_hand
from examples.metric_learning import by_hand as metric_by_hand
from examples.metric_learning.task import RecallAt1, batch_hard_loss
from gallery import ROOT, assert_same_state, built, check_short_resume, command_of
from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.distributed import Group
from regimen.trainer.state import TrainState
from same_run import logged

TWO_EPOCHS = "trainer.max_epochs=2"


def last_values(run):
    return {key: value for line in logged(run) for key, value in line.items()}


def epochs_of(trainer, limit=None):
    """Return the batches of two epochs; one for each update, where none is split."""
    epochs = []
    for epoch in range(2):
        updates = trainer.draw(epoch, 0, limit)
        epochs.append([micro_batch.batch for update in updates for micro_batch in update])
    return epochs


@pytest.mark.slow
@pytest.mark.parametrize("example", ["byol", "maml", "metric_learning"])
def test_a_resume_from_the_middle_equals_the_whole_run(train, tmp_path, example):
    check_short_resume(train, tmp_path, example)


# examples/hogwild
HOGWILD = [*command_of("hogwild"), "trainer.max_epochs=3", "strategy.timeout=60"]


@pytest.mark.slow
def test_two_processes_train_one_model_and_a_resume_goes_on(train, tmp_path):
    whole = tmp_path / "whole"
    save = ["callbacks.checkpoint.every_n_steps=20", "callbacks.checkpoint.save_top_k=-1"]
    train([*HOGWILD, *save, f"run_dir={whole}"], folder=ROOT)
    assert last_values(whole)["val/accuracy"] > 0.6
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    middle = resumed / "checkpoints" / "step-00000020.pt"
    train([*HOGWILD, *save, f"resume={middle}"], folder=ROOT)
    # The line of the test has the step of the best checkpoint, which the race decides.
    assert max(line["step"] for line in logged(resumed)) == 60
    assert last_values(resumed)["val/accuracy"] > 0.6
    counted = torch.load(resumed / "checkpoints" / "last.pt", weights_only=True)["state"]
    assert counted["counters"]["samples"] == 3 * 1257


@pytest.mark.slow
def test_a_process_whose_gradient_is_not_finite_ends_all(train, tmp_path):
    places = [f"run_dir={tmp_path / 'run'}", "optimizer.lr=1e30"]
    done = train([*HOGWILD, *places], 5, folder=ROOT)
    assert "is not finite" in done.error


def test_steps_of_two_owners_change_the_same_weights(tmp_path):
    layers = [nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    start = layers[0].weight.detach().clone()
    for number, layer in enumerate(layers):
        _share(layer.weight, tmp_path / "weight", writes=number == 0)
    for layer in layers:
        layer.weight.sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.5).step()
    assert torch.equal(layers[0].weight, layers[1].weight)
    torch.testing.assert_close(layers[0].weight, start - 2 * 0.5)
    assert layers[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_processes_ask_each_other_at_agreed_updates_only(monkeypatch):
    asked = []
    monkeypatch.setattr(Group, "agree_on_stop", lambda self, state, at_once: asked.append(calls))
    group = SeldomAgreeing(timeout=60.0, agree_every=4)
    for calls in range(1, 11):
        group.agree_on_stop(TrainState(), at_once=calls == 6)
    assert asked == [4, 6, 8]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy.agree_every=0"], r"strategy\.agree_every: expected a number of updates >= 1"),
        (["strategy.accelerator=cuda"], r"strategy\.accelerator: .* memory of the CPU, got 'cuda'"),
        (["strategy.devices=0"], r"strategy\.devices: expected a number >= 1"),
        (
            ["callbacks=[default,ema]"],
            r"callbacks\.ema: .*the weights that all processes of .*train",
        ),
    ],
)
def test_mistakes_of_hogwild_are_found_before_processes_start(words, message):
    with pytest.raises(ConfigError, match=message):
        check_targets(parse(compose([*HOGWILD, *words]).config))


# examples/byol
def test_the_target_follows_as_by_hand(monkeypatch):
    monkeypatch.chdir(ROOT)
    moving = "+callbacks.moving_target={_target_: examples.byol.task.MovingTarget, decay: 0.99}"
    short = ["trainer.limit_train_batches=4", "trainer.limit_val_batches=0"]
    trainer = built("byol", TWO_EPOCHS, moving, *short).trainer
    by_hand = copy.deepcopy(trainer.model)
    online = nn.Sequential(by_hand.encoder, by_hand.projector)
    epochs = epochs_of(trainer, limit=4)
    by_hand.target = byol_by_hand.train_by_hand(online, by_hand.predictor, epochs, updates=8)
    trainer.fit()
    assert_same_state(trainer.model, by_hand)


@pytest.mark.slow
def test_a_probe_reads_the_encoder_of_a_run_and_leaves_it_as_it_is(train, tmp_path):
    whole = tmp_path / "byol"
    probe = tmp_path / "probe"
    short = ["trainer.max_steps=3", "trainer.limit_val_batches=1"]
    train([*command_of("byol"), *short, f"run_dir={whole}"], folder=ROOT)
    words = ["experiment=byol_probe", f"model.weights={whole}", f"run_dir={probe}"]
    train(["--config-dir", f"{ROOT}/examples/byol/conf", *words, *short], folder=ROOT)
    learnt, probed = (
        torch.load(run / "checkpoints" / "last.pt", weights_only=True)["model"]
        for run in (whole, probe)
    )
    names = [name for name in probed if name.startswith("encoder.")]
    assert len(names) == len([name for name in learnt if name.startswith("encoder.")])
    assert all(torch.equal(probed[name], learnt[name]) for name in names)


# examples/maml
@pytest.mark.parametrize("parts", [1, 4])
def test_gradients_through_the_inner_step_are_those_by_hand(monkeypatch, parts):
    monkeypatch.chdir(ROOT)
    words = ["data.train.count=50", "loader.batch_size=10", "data.val.count=20"]
    split = f"trainer.gradient_accumulation_steps={parts}"
    trainer = built("maml", TWO_EPOCHS, *words, split).trainer
    whole = built("maml", TWO_EPOCHS, *words).trainer
    by_hand = copy.deepcopy(trainer.model)
    maml_by_hand.train_by_hand(by_hand, epochs_of(whole))
    trainer.fit()
    assert_same_state(trainer.model, by_hand)


# examples/metric_learning
def test_the_hardest_triplets_are_those_that_are_found_one_by_one(monkeypatch):
    monkeypatch.chdir(ROOT)
    trainer = built("metric_learning", TWO_EPOCHS, "trainer.limit_train_batches=4").trainer
    by_hand = copy.deepcopy(trainer.model)
    metric_by_hand.train_by_hand(by_hand, epochs_of(trainer, limit=4))
    trainer.fit()
    assert_same_state(trainer.model, by_hand)


def test_an_anchor_without_a_partner_has_no_loss_and_no_gradient():
    embeddings = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for labels, counted in (([0, 0, 1], [True, True, False]), ([0, 0, 0], [False] * 3)):
        losses = batch_hard_loss(embeddings, torch.tensor(labels))
        assert (losses > 0).tolist() == counted
        (gradient,) = torch.autograd.grad(losses.sum(), embeddings)
        assert gradient.isfinite().all()


def test_recall_is_that_of_the_whole_split_in_any_batches_and_processes():
    embeddings = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(60) % 3
    values = []
    for sizes in ([[60]], [[7] * 8 + [4]], [[20, 10], [30]]):
        rest = list(zip(embeddings, labels, strict=True))
        metrics = []
        for process in sizes:
            metrics.append(RecallAt1())
            for size in process:
                part = rest[:size]
                rest = rest[size:]
                metrics[-1].update(*(torch.stack(column) for column in zip(*part, strict=True)))
        metrics[0].merge_state(metrics[1:])
        values.append(metrics[0].compute())
    assert 0 < values[0] < 1
    assert values == [values[0]] * 3
