"""A schedule continues exactly after a resume, and along its own curve after a change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CyclicLR, ExponentialLR, LRScheduler, OneCycleLR

from schedules_by_hand import (
    BY_HAND,
    FILES,
    PER_EPOCH,
    TOTAL,
    node,
    optimizers,
    through_a_file,
    walk,
)
from trainer.errors import CheckpointError
from trainer.lr_schedulers.build import build_lr_schedule
from trainer.lr_schedulers.schedule import LRSchedule
from trainer.optimizers.optimizers import Optimizers, build_optimizers


@pytest.mark.parametrize("warm", [pytest.param(False, id="plain"), pytest.param(True, id="warm")])
@pytest.mark.parametrize("cut", [pytest.param(3, id="early"), pytest.param(20, id="mid-epoch")])
@pytest.mark.parametrize("name", FILES)
def test_a_schedule_goes_on_exactly_after_a_resume(name: str, cut: int, warm: bool) -> None:
    chosen = node(name) | ({"warmup": {"steps": 5, "start_factor": 0.1}} if warm else {})
    whole = optimizers()
    schedule = build_lr_schedule(chosen, whole, TOTAL, PER_EPOCH)
    walk(whole, schedule, 0, cut)
    states = through_a_file(whole.state_dict(), schedule.state_dict())
    resumed = optimizers()
    again = build_lr_schedule(chosen, resumed, TOTAL, PER_EPOCH)
    resumed.load_state_dict(states[0])
    again.load_state_dict(states[1])
    assert walk(resumed, again, cut) == walk(whole, schedule, cut)
    assert again.state_dict() == schedule.state_dict()


@pytest.mark.parametrize("warm", [pytest.param(0, id="plain"), pytest.param(6, id="warm")])
@pytest.mark.parametrize("name", [name for name in BY_HAND if name != "plateau"])
def test_a_changed_configuration_goes_on_along_its_own_curve(name: str, warm: int) -> None:
    """A longer run, another learning rate: as if they had been so from the start."""
    old = optimizers()
    chosen = node(name) | ({"warmup": {"steps": warm}} if warm else {})
    schedule = build_lr_schedule(chosen, old, TOTAL, PER_EPOCH)
    walk(old, schedule, 0, 20)
    states = through_a_file(old.state_dict(), schedule.state_dict())
    whole, resumed = optimizers([0.7, 0.3]), optimizers([0.7, 0.3])
    by_whole = build_lr_schedule(chosen, whole, 2 * TOTAL, PER_EPOCH)
    walk(whole, by_whole, 0, 20)
    by_resumed = build_lr_schedule(chosen, resumed, 2 * TOTAL, PER_EPOCH)
    resumed.load_state_dict(states[0], hyper_parameters=False)
    by_resumed.load_state_dict(states[1], hyper_parameters=False)
    assert walk(resumed, by_resumed, 20, 96) == walk(whole, by_whole, 20, 96)


def test_a_longer_run_takes_over_the_optimizers_hyper_parameters_first() -> None:
    old = optimizers()
    schedule = build_lr_schedule(node("one_cycle"), old, TOTAL, PER_EPOCH)
    walk(old, schedule, 0, 20)
    states = through_a_file(old.state_dict(), schedule.state_dict())
    resumed, whole = optimizers(), optimizers()
    longer = build_lr_schedule(node("one_cycle"), resumed, 2 * TOTAL, PER_EPOCH)
    resumed.load_state_dict(states[0])
    longer.load_state_dict(states[1], hyper_parameters=False)
    by_whole = build_lr_schedule(node("one_cycle"), whole, 2 * TOTAL, PER_EPOCH)
    walk(whole, by_whole, 0, 20)
    assert walk(resumed, longer, 20, 96) == walk(whole, by_whole, 20, 96)


def test_a_plateau_schedule_keeps_what_it_has_seen_and_how_far_it_came_down() -> None:
    old = optimizers()
    quick = node("plateau", "lr_scheduler.patience=1")
    schedule = build_lr_schedule(quick, old, TOTAL, PER_EPOCH)
    walk(old, schedule, 0, 30)
    assert old.learning_rates()["first"] == pytest.approx(0.04)
    states = through_a_file(old.state_dict(), schedule.state_dict())
    resumed = optimizers([0.4, 0.3])  # the second group's learning rate is new, the first's not
    patient = node("plateau", "lr_scheduler.patience=5")
    again = build_lr_schedule(patient, resumed, TOTAL, PER_EPOCH)
    resumed.load_state_dict(states[0], hyper_parameters=False)
    again.load_state_dict(states[1], hyper_parameters=False)
    assert resumed.learning_rates() == pytest.approx({"first": 0.04, "default": 0.3})
    scheduler = again.tracks["optimizer"].scheduler
    assert (scheduler.patience, scheduler.best) == (5, 0.9)
    assert scheduler.num_bad_epochs == schedule.tracks["optimizer"].scheduler.num_bad_epochs


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        pytest.param(["cosine"], r"CosineAnnealingLR, it was .*StepLR", id="type"),
        pytest.param(
            ["step", "lr_scheduler.gamma=0.5"], "lr_scheduler.gamma is 0.5, it was 0.1", id="gamma"
        ),
        pytest.param(["step", "lr_scheduler.step_size=3"], "step_size is 3, it was 2", id="size"),
        pytest.param(
            ["step", "lr_scheduler.interval=step"],
            r"step_size is 14, it was 2 \(\+1",
            id="interval",
        ),
        pytest.param(
            ["step", "lr_scheduler.warmup.steps=3"], r"warmup.ticks is 3, it was None", id="warmup"
        ),
    ],
)
def test_another_schedule_is_refused(chosen: list[str], message: str) -> None:
    old = build_lr_schedule(node("step"), optimizers(), TOTAL, PER_EPOCH)
    new = build_lr_schedule(node(*chosen), optimizers(), TOTAL, PER_EPOCH)
    with pytest.raises(CheckpointError, match=message):
        new.load_state_dict(through_a_file(old.state_dict())[0])


def test_a_state_without_its_parts_is_refused() -> None:
    schedule = build_lr_schedule(node("step"), optimizers(), TOTAL, PER_EPOCH)
    for broken in ({}, {"updates": 0, "epochs": 0, "tracks": {"optimizer": {"type": 3}}}):
        with pytest.raises(CheckpointError):
            schedule.load_state_dict(broken)


@pytest.mark.parametrize("name", ["one_cycle", "step", "plateau", "lambda", "chained"])
def test_reordered_groups_keep_their_schedules(name: str) -> None:
    rules = {"a": {"match": "^0", "lr": 0.4}, "b": {"match": "^1", "lr": 0.1}}

    def over(names: str) -> Optimizers:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        groups = {name: rules[name] for name in names}
        sgd = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}
        return build_optimizers(model, {**sgd, "param_groups": groups})

    first, second = over("ab"), over("ba")
    before = build_lr_schedule(node(name), first, TOTAL, PER_EPOCH)
    after = build_lr_schedule(node(name), second, TOTAL, PER_EPOCH)
    walk(first, before, 0, 20)
    states = through_a_file(first.state_dict(), before.state_dict())
    second.load_state_dict(states[0])
    after.load_state_dict(states[1])
    turned = [[*values[2:], *values[:2]] for values in walk(second, after, 20)]
    assert turned == walk(first, before, 20)


class DecayToo(LRScheduler):
    """A scheduler of one's own, which moves the weight decay as well."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 / (1 + self.last_epoch // 3)
        return [base * 0.999**self.last_epoch for base in self.base_lrs]


@pytest.mark.parametrize("tensor", [pytest.param(False, id="float"), pytest.param(True, id="lr")])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda o: CyclicLR(o, 0.01, [0.4, 0.1], 7, mode="exp_range", gamma=0.9), id="cyclic"
        ),
        pytest.param(lambda o: OneCycleLR(o, [0.4, 0.1], 40), id="one_cycle"),
        pytest.param(DecayToo, id="own"),
    ],
)
def test_a_scheduler_moves_other_hyper_parameters_and_goes_on(
    make: Callable[[Optimizer], Any], tensor: bool
) -> None:
    def plain() -> Optimizer:
        rates = [torch.tensor(lr) if tensor else lr for lr in (0.4, 0.1)]
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in rates]
        return AdamW(groups) if tensor else SGD(groups, momentum=0.9)

    def begun() -> tuple[Optimizers, LRSchedule]:
        optimizer = plain()
        model = nn.ParameterList([p for g in optimizer.param_groups for p in g["params"]])
        return Optimizers.wrap(optimizer, model), LRSchedule.wrap(make(optimizer))

    def values(optimizer: Optimizer) -> list[Any]:
        names = ("momentum", "betas", "weight_decay")
        return [[float(g["lr"]), *(g.get(name) for name in names)] for g in optimizer.param_groups]

    by_hand = plain()
    scheduler = make(by_hand)
    over, schedule = begun()
    for step in range(30):
        if step == 12:
            states = through_a_file(over.state_dict(), schedule.state_dict())
            over, schedule = begun()
            over.load_state_dict(states[0])
            schedule.load_state_dict(states[1])
        for optimizer in (by_hand, over.optimizers["optimizer"]):
            optimizer.step()
        scheduler.step()
        schedule.after_update()
        assert values(over.optimizers["optimizer"]) == values(by_hand)


def test_a_long_run_can_begin_far_on_with_the_rates_of_another_schedule() -> None:
    chosen = {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.999}
    over = optimizers()
    schedule = build_lr_schedule(chosen, over, 10**6, 1000)
    state = {**schedule.state_dict(), "updates": 20_000, "epochs": 20}
    over.groups()[0].options["lr"] = 7.0  # of the optimizer that was loaded
    schedule.load_state_dict(state, hyper_parameters=False)
    plain = SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    by_hand = ExponentialLR(plain, 0.999)
    plain.step()
    for _ in range(20_001):
        by_hand.step()
    schedule.after_update()
    assert over.learning_rates()["first"] == plain.param_groups[0]["lr"]
