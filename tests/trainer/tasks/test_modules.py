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
        logits: Tensor = self.layer((x - self.mean) * self.mask / (1 + 0.1 * self.seen))
        return logits


def linear():
    return nn.Linear(5, CLASSES)


def trainer_of(
    network=linear, centred=False, steps=1, strategy=None, node=SGD, max_steps=6, **callbacks
):
    torch.manual_seed(3)
    model, task = network().double(), Classification(CLASSES, Scaled(centred))
    more = {"max_epochs": None, "max_steps": max_steps, "log_every_n_steps": 1}
    more |= {"model": model, "strategy": strategy or Strategy("cpu"), "callbacks": callbacks}
    more["make"] = lambda _: build_optimizers(model, node, others=named_modules(task))
    return toys.trainer_of(task, SAMPLES, steps, **more)


def weights(trainer):
    loss = trainer.task.own_modules()["loss"]
    named = {**trainer.model.state_dict(), **loss.state_dict()}
    named |= dict(trainer.model.named_buffers())
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
        (*_, last) = trainer.optimizers.parameters()
        assert trainer.optimizers.names[last] == "task.loss.scale"
        return weights(trainer)

    torch.manual_seed(3)
    model, loss = nn.Linear(5, CLASSES).double(), Scaled()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.5, momentum=0.9)
    for x, y in whole_batches(SAMPLES):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    for found in (train(None), *ranks(2, in_group(train))):
        assert_same(found, {**model.state_dict(), **loss.state_dict()}, 1e-12)


def test_rules_know_them():
    groups = {"task": {"match": r"^task\.loss", "lr": 0.01}}
    node = {"_target_": "torch.optim.SGD", "lr": 0.5, "param_groups": groups}
    rates = trainer_of(node=node).optimizers.learning_rates()
    assert rates == {"task": 0.01, "default": 0.5}
    groups["task"] = {"match": r"^task\.", "frozen": True}
    assert list(trainer_of(node=node).optimizers.frozen) == ["task.loss.scale"]


def test_an_optimizer_without_them_is_refused_and_shards_beside_them():
    model, node = nn.Linear(5, CLASSES).double(), {"_target_": "torch.optim.SGD", "lr": 0.5}
    task, data = Classification(CLASSES, Scaled()), [SAMPLES[0]]
    for optimizer in (torch.optim.SGD(model.parameters()), build_optimizers(model, node)):
        with pytest.raises(ConfigError, match=r"no optimizer has task\.loss\.scale"):
            Trainer(model, task, optimizer, data)
    with pytest.raises(ModelError, match=r"trains task\.loss\.scale; use strategy=ddp"):
        FSDP(accelerator="cpu").check(named_modules(task))


@pytest.mark.parametrize("network", [Restless, linear])
def test_a_resume_is_exact_and_weights_alone_bring_the_task_along(network):
    whole, begun = trainer_of(network, True), trainer_of(network, True, max_steps=4)
    whole.fit()
    begun.fit()
    payload = copy.deepcopy(begun.state_dict())
    assert "mask" not in str(payload["state"]["unsaved"])  # a constant
    resumed, fresh = trainer_of(network, True), trainer_of(network, True)
    assert resumed.load_state_dict(payload) == []
    resumed.fit()
    assert_same(weights(resumed), weights(whole))
    snapshot.load_weights(fresh.components, copy.deepcopy(whole.state_dict()))
    assert_same(weights(fresh), weights(whole))


def test_an_evaluation_moves_no_centre():
    trainer = trainer_of(centred=True)
    trainer.evaluate(trainer.train_loader, "val")
    loss = trainer.task.own_modules()["loss"]
    assert loss.training
    assert not loss.centre.any()


def test_assigned_buffers_are_put_back_and_averaged():
    trainer = trainer_of(Restless, True, ema=EMA(decay=0.5, warmup=False))
    first = trainer.model.mean
    trainer.fit()
    assert trainer.model.mean is first
    average, mean = torch.zeros(5).double(), torch.zeros(5).double()
    for x, _ in whole_batches(SAMPLES):
        mean = 0.9 * mean + 0.1 * x.mean(0)
        average = 0.5 * average + 0.5 * mean
    averaged = trainer.callbacks["ema"].state_dict()["model"]["mean"]
    torch.testing.assert_close(averaged, average, rtol=0, atol=1e-12)


def test_a_refused_update_moves_no_assigned_buffer():
    trainer = trainer_of(Restless, True)
    trainer.options.on_nonfinite = "skip"
    before = weights(trainer)
    bad, *_ = trainer.train_loader.epoch(0)
    bad.batch[0][0] = float("nan")
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
