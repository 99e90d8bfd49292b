"""Modules of a task: their parameters are trained, their state is saved, however it is kept."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import toys
from regimen.callbacks.ema import EMA
from regimen.conf.errors import ConfigError
from regimen.trainer import snapshot
from regimen.trainer.errors import ModelError
from regimen.trainer.optimizers.optimizers import build_optimizers
from regimen.trainer.strategies.fsdp import FSDP
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.task import named_modules
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.trainer import Trainer
from toys import CLASSES, in_group, points, whole_batches

SAMPLES = points(24)
SGD = {"_target_": "torch.optim.SGD", "lr": 0.5, "momentum": 0.9}


class Scaled(nn.Module):
    """Cross entropy of logits that it scales and, by what it has seen, shifts."""

    reduction = "mean"

    def __init__(self, centred=False):
        super().__init__()
        self.scale = nn.Parameter(torch.full((CLASSES,), 0.5, dtype=torch.float64))
        self.centred = centred
        self.register_buffer("centre", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, logits, labels):
        loss = F.cross_entropy((logits - self.centre) * self.scale, labels)
        if self.training and self.centred:
            self.centre = 0.9 * self.centre + 0.1 * logits.detach().mean(0)
        return loss


class Restless(nn.Module):
    """A network with a buffer that no state dict has, one that is assigned, and a constant."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, CLASSES)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("mask", torch.ones(5), persistent=False)
        self.calls: int | None = None

    def forward(self, x):
        if self.calls is not None:  # a plain attribute that moves
            self.calls += 1
        if self.training:
            self.seen += 1
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        scale = self.mask / (1 + 0.1 * self.seen)
        logits: Tensor = self.layer((x - self.mean) * scale)
        return logits


def linear():
    return nn.Linear(5, CLASSES)


def trainer_of(
    network=linear, centred=False, steps=1, strategy=None, node=SGD, max_steps=6, **callbacks
):
    torch.manual_seed(3)
    model = network().double()
    task = Classification(CLASSES, Scaled(centred))

    def make(parameters):
        return build_optimizers(model, node, others=named_modules(task))

    return toys.trainer_of(
        task,
        SAMPLES,
        steps,
        model=model,
        make=make,
        strategy=strategy or Strategy("cpu"),
        callbacks=callbacks,
        max_epochs=None,
        max_steps=max_steps,
        log_every_n_steps=1,
    )


def loss_of(trainer):
    return trainer.task.own_modules()["loss"]


def weights(trainer):
    """Return the values of model and loss, with the buffers that no state dict has."""
    named = {
        **trainer.model.state_dict(),
        **loss_of(trainer).state_dict(),
        **dict(trainer.model.named_buffers()),
    }
    return {name: value.detach().clone() for name, value in named.items()}


def assert_same(got, wanted, tolerance=0.0):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("steps", [1, 3])
def test_parameters_of_a_loss_are_trained_by_any_number_of_processes(ranks, steps):
    def train(strategy):
        trainer = trainer_of(steps=steps, strategy=strategy)
        trainer.fit()
        *_, last = trainer.optimizers.parameters()
        assert trainer.optimizers.names[last] == "task.loss.scale"
        return weights(trainer)

    torch.manual_seed(3)
    model = nn.Linear(5, CLASSES).double()
    loss = Scaled()
    parameters = [*model.parameters(), *loss.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    for x, y in whole_batches(SAMPLES):
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()

    expected = {**model.state_dict(), **loss.state_dict()}
    first, second = ranks(2, in_group(train))

    assert_same(train(None), expected, 1e-12)
    assert_same(first, expected, 1e-12)
    assert_same(second, expected, 1e-12)


def test_rules_know_them():
    def optimizers_with(rule):
        node = {
            "_target_": "torch.optim.SGD",
            "lr": 0.5,
            "param_groups": {"task": rule},
        }
        return trainer_of(node=node).optimizers

    faster = optimizers_with({"match": r"^task\.loss", "lr": 0.01})
    assert faster.learning_rates() == {"task": 0.01, "default": 0.5}

    frozen = optimizers_with({"match": r"^task\.", "frozen": True})
    assert list(frozen.frozen) == ["task.loss.scale"]


def test_an_optimizer_without_them_is_refused():
    model = nn.Linear(5, CLASSES).double()
    task = Classification(CLASSES, Scaled())
    data = [SAMPLES[0]]
    plain = torch.optim.SGD(model.parameters())
    built = build_optimizers(model, {"_target_": "torch.optim.SGD", "lr": 0.5})

    for optimizer in (plain, built):
        with pytest.raises(ConfigError, match=r"no optimizer has task\.loss\.scale"):
            Trainer(model, task, optimizer, data)


def test_shards_beside_them_are_refused():
    task = Classification(CLASSES, Scaled())
    strategy = FSDP(accelerator="cpu")
    with pytest.raises(ModelError, match=r"trains task\.loss\.scale; use strategy=ddp"):
        strategy.check(named_modules(task))


@pytest.mark.parametrize("network", [Restless, linear])
def test_a_resume_is_exact_and_weights_alone_bring_the_task_along(network):
    whole = trainer_of(network, centred=True)
    begun = trainer_of(network, centred=True, max_steps=4)
    whole.fit()
    begun.fit()
    payload = copy.deepcopy(begun.state_dict())

    assert "mask" not in str(payload["state"]["unsaved"])  # a constant

    resumed = trainer_of(network, centred=True)
    remarks = resumed.load_state_dict(payload)
    resumed.fit()

    assert remarks == []
    assert_same(weights(resumed), weights(whole))

    fresh = trainer_of(network, centred=True)
    snapshot.load_weights(fresh.components, copy.deepcopy(whole.state_dict()))
    assert_same(weights(fresh), weights(whole))


def test_an_evaluation_moves_no_centre():
    trainer = trainer_of(centred=True)
    trainer.evaluate(trainer.train_loader, "val")
    loss = loss_of(trainer)

    assert loss.training
    assert not loss.centre.any()


def test_assigned_buffers_are_put_back_and_averaged():
    ema = EMA(decay=0.5, warmup=False)
    trainer = trainer_of(Restless, centred=True, ema=ema)
    first = trainer.model.mean
    trainer.fit()

    assert trainer.model.mean is first

    average = torch.zeros(5).double()
    mean = torch.zeros(5).double()
    for x, _ in whole_batches(SAMPLES):
        mean = 0.9 * mean + 0.1 * x.mean(0)
        average = 0.5 * average + 0.5 * mean
    averaged = ema.state_dict()["model"]["mean"]

    torch.testing.assert_close(averaged, average, rtol=0, atol=1e-12)


def test_a_refused_update_moves_no_assigned_buffer():
    trainer = trainer_of(Restless, centred=True)
    trainer.options.on_nonfinite = "skip"
    before = weights(trainer)
    bad, *_ = trainer.train_loader.epoch(0)
    inputs, _ = bad.batch
    inputs[0] = torch.nan
    trainer.update([bad])

    assert trainer.state.skipped_updates == 1
    assert_same(weights(trainer), before)


def test_what_cannot_be_saved_is_named_once(caplog):
    trainer = trainer_of(Restless)
    trainer.model.calls = 0
    trainer.fit()
    with caplog.at_level(logging.WARNING):
        trainer.state_dict()
        trainer.model.calls += 1
        trainer.state_dict()
    told = [r.message for r in caplog.records if "checkpoints lack it" in r.message]

    assert len(told) == 1
    assert told[0].startswith("calls changes in training")
