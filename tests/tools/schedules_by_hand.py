"""Each shipped schedule written out in plain PyTorch, and runs of both for comparison."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as by_torch

from regimen.trainer.lr_schedulers.build import build_lr_schedule
from regimen.trainer.lr_schedulers.schedule import LRSchedule
from regimen.trainer.optimizers.optimizers import Optimizers, build_optimizers
from toys import section, through_a_file

CONF = Path(__file__).resolve().parents[2] / "conf" / "lr_scheduler"

TOTAL = 48
PER_EPOCH = 6
LOSSES = [1.0, 0.9, 0.95, 0.93, 0.92, 0.91, 0.8, 0.85]  # of the eight epochs
LRS = [0.4, 0.1]
TORCH = "torch.optim.lr_scheduler"


def timm_cosine(epoch: int, first: float, last: float) -> float:
    """Return timm's share of the rate in an epoch of eight, five of which warm up."""
    if epoch < 5:
        return first + (1 - first) * epoch / 5
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * epoch / 8))


# What each file says for 48 updates in epochs of 6, written out by hand; "E": moves once an epoch.
BY_HAND: dict[str, tuple[str, Callable[[Optimizer], Any]]] = {
    "chained": (
        "S",
        lambda o: by_torch.ChainedScheduler(
            [by_torch.ConstantLR(o, 0.1, 20), by_torch.ExponentialLR(o, 0.9998)]
        ),
    ),
    "constant": ("S", lambda o: by_torch.ConstantLR(o, 1.0, 0)),
    "convnext_t": ("S", lambda o: by_torch.LambdaLR(o, lambda t: t / 120)),  # of 20 epochs
    "cosine": ("S", lambda o: by_torch.CosineAnnealingLR(o, 48)),
    "cosine_restarts": ("E", lambda o: by_torch.CosineAnnealingWarmRestarts(o, 2, 2)),
    "deit_s": (
        "E",
        lambda o: by_torch.LambdaLR(o, lambda e: timm_cosine(max(e - 1, 0), 0.001, 0.01)),
    ),
    "exponential": ("E", lambda o: by_torch.ExponentialLR(o, 0.9)),
    "gpt2": ("S", lambda o: by_torch.LambdaLR(o, lambda t: (t + 1) / 2001)),
    "lambda": (
        "S",
        lambda o: by_torch.LambdaLR(o, lambda t: 0.5 * (1 + math.cos(math.pi * t / 48))),
    ),
    "linear": ("S", lambda o: by_torch.LinearLR(o, 1.0, 0.0, 48)),
    "multi_step": ("E", lambda o: by_torch.MultiStepLR(o, [4, 6], 0.1)),
    "one_cycle": ("S", lambda o: by_torch.OneCycleLR(o, LRS, 48, cycle_momentum=False)),
    "plateau": ("V", lambda o: by_torch.ReduceLROnPlateau(o, "min", 0.1, 2)),
    "polynomial": ("S", lambda o: by_torch.PolynomialLR(o, 48, 1.0)),
    "resnet50_a3": (
        "E",
        lambda o: by_torch.LambdaLR(o, lambda e: timm_cosine(e, 0.0125, 0.000125)),
    ),
    "resnet50_v2": (
        "E",
        lambda o: by_torch.SequentialLR(
            o, [by_torch.LinearLR(o, 0.01, 1.0, 5), by_torch.CosineAnnealingLR(o, 3)], [5]
        ),
    ),
    "sequential": (
        "S",
        lambda o: by_torch.SequentialLR(
            o, [by_torch.ConstantLR(o, 1.0, 0), by_torch.CosineAnnealingLR(o, 34)], [14]
        ),
    ),
    "step": ("E", lambda o: by_torch.StepLR(o, 2, 0.1)),
    "vit_s16": ("S", lambda o: by_torch.LambdaLR(o, lambda t: t / 10_000)),
    "warmup_cosine": (
        "S",
        lambda o: by_torch.SequentialLR(
            o, [by_torch.LinearLR(o, 0.01, 1.0, 6), by_torch.CosineAnnealingLR(o, 42)], [6]
        ),
    ),
}


FILES = list(BY_HAND)


def optimizers(lrs: list[float] | None = None) -> Optimizers:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    first, second = lrs or LRS
    return build_optimizers(
        model,
        {
            "_target_": "torch.optim.SGD",
            "lr": second,
            "momentum": 0.9,
            "param_groups": {"first": {"match": "^0", "lr": first}},
        },
    )


def node(name: str, *overrides: str) -> dict[str, Any]:
    chosen: dict[str, Any] = section("lr_scheduler", f"lr_scheduler={name}", *overrides)
    return chosen


def walk(
    over: Optimizers, schedule: LRSchedule, begin: int = 0, end: int = TOTAL
) -> list[list[float]]:
    """Return learning rates and momenta of updates `begin` to `end`."""
    seen = []
    for step in range(begin, end):
        seen.append([float(g.options[k]) for g in over.groups() for k in ("lr", "momentum")])
        for optimizer in over.optimizers.values():
            optimizer.step()
        schedule.after_update()
        if (step + 1) % PER_EPOCH == 0:
            schedule.after_epoch()
            schedule.after_validation({"val/loss": LOSSES[step // PER_EPOCH % len(LOSSES)]})
    return seen


def scheduled(
    chosen: dict[str, Any], rates: list[float] | None = None, total: int = TOTAL
) -> tuple[Optimizers, LRSchedule]:
    """Return new optimizers and a new schedule over them."""
    over = optimizers(rates)
    return over, build_lr_schedule(chosen, over, total, PER_EPOCH)


def carry_over(before: tuple[Any, Any], after: tuple[Any, Any], *hyper_parameters: bool) -> None:
    """Load the state of optimizers and schedule into others, each with its hyper-parameters."""
    for one, other, restore in zip(before, after, hyper_parameters or (True, True), strict=True):
        other.load_state_dict(through_a_file(one.state_dict()), hyper_parameters=restore)


def walked(chosen: dict[str, Any], end: int = TOTAL, total: int = TOTAL) -> list[list[float]]:
    """Return learning rates and momenta of a new schedule over new optimizers."""
    return walk(*scheduled(chosen, total=total), 0, end)


def walk_by_hand(name: str, updates: int = TOTAL) -> list[list[float]]:
    interval, make = BY_HAND[name]
    parameters = [nn.Parameter(torch.zeros(1)) for _ in LRS]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, LRS, strict=True)]
    optimizer = SGD(groups, momentum=0.9)
    scheduler = make(optimizer)
    seen = []
    for step in range(updates):
        seen.append([float(g[k]) for g in optimizer.param_groups for k in ("lr", "momentum")])
        optimizer.step()
        if interval == "S":
            scheduler.step()
        elif (step + 1) % PER_EPOCH == 0:
            loss = LOSSES[step // PER_EPOCH]
            scheduler.step(loss) if interval == "V" else scheduler.step()
    return seen


def assert_close(ours: list[list[float]], theirs: list[list[float]]) -> None:
    assert len(ours) == len(theirs)
    torch.testing.assert_close(
        torch.tensor(ours, dtype=torch.float64),
        torch.tensor(theirs, dtype=torch.float64),
        rtol=1e-12,
        atol=1e-12,
    )
