"""Recorded schedulers against torch's own, stepped by hand: to the bit, at any step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from trainer.lr_schedulers import tape as tapes
from trainer.lr_schedulers.schedule import build_lr_schedule
from trainer.lr_schedulers.tape import BLOCK, KEPT, Tape
from trainer.optimizers.optimizers import Optimizers
from trainer.optimizers.state import hyper_parameters

LRS = (0.4, 0.1)
LONG = 3 * BLOCK + 7
TORCH = "torch.optim.lr_scheduler"


class DecayToo(LRScheduler):
    """A scheduler of one's own, which moves the weight decay as well."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 / (1 + self.last_epoch // 300)
        return [base * 0.999**self.last_epoch for base in self.base_lrs]


MAKERS: dict[str, Callable[[Optimizer], Any]] = {
    "chained": lambda o: ChainedScheduler([ConstantLR(o, 0.1, 20), ExponentialLR(o, 0.9998)]),
    "cosine": lambda o: CosineAnnealingLR(o, LONG),
    "cyclic": lambda o: CyclicLR(o, 0.01, [0.4, 0.1], 70, mode="exp_range", gamma=0.999),
    "lambda": lambda o: LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 0.9 ** (t // 100)]),
    "linear": lambda o: LinearLR(o, 1.0, 0.0, LONG),
    "multi_step": lambda o: MultiStepLR(o, [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK], 0.3),
    "one_cycle": lambda o: OneCycleLR(o, list(LRS), LONG),
    "own": DecayToo,
    "polynomial": lambda o: PolynomialLR(o, LONG, 0.9),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, 50, 2),
    "sequential": lambda o: SequentialLR(
        o, [LinearLR(o, 0.01, 1.0, 30), CosineAnnealingLR(o, LONG - 30)], [30]
    ),
    "step": lambda o: StepLR(o, 30, 0.7),
}
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: SGD(groups(), momentum=0.9),
    "adamw": lambda: AdamW(groups()),
    "tensor_lr": lambda: AdamW([g | {"lr": torch.tensor(g["lr"])} for g in groups()]),
}


def groups() -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in LRS]


def values(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    keys = ("lr", "momentum", "betas", "weight_decay")
    return [
        tuple(float(g[k]) if isinstance(g[k], torch.Tensor) else g[k] for k in keys if k in g)
        for g in optimizer.param_groups
    ]


def tape_of(optimizer: Optimizer, make: Callable[[Optimizer], Any]) -> Tape:
    return Tape(make, [hyper_parameters(g) for g in optimizer.param_groups], optimizer.defaults)


def by_hand(optimizer: Optimizer, make: Callable[[Optimizer], Any], steps: int) -> list[Any]:
    scheduler = make(optimizer)
    optimizer.step()
    seen = [values(optimizer)]
    for _ in range(steps):
        scheduler.step()
        seen.append(values(optimizer))
    return seen


@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind) for kind in OPTIMIZERS])
@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in MAKERS])
def test_a_tape_is_torch_stepped_by_hand_to_the_bit(name: str, kind: str) -> None:
    """Followed by its changes alone, over block ends, in groups that torch never touches."""
    expected = by_hand(OPTIMIZERS[kind](), MAKERS[name], LONG)
    follower = OPTIMIZERS[kind]()
    rates = [group["lr"] for group in follower.param_groups]
    tape = tape_of(follower, MAKERS[name])
    for group, key, value in tape.scheduled(0):
        tapes.put(follower.param_groups[group], key, value)
    assert values(follower) == expected[0]
    for step in range(1, LONG + 1):
        before = values(follower)
        changes = tape.changes(step)
        for group, key, value in changes:
            tapes.put(follower.param_groups[group], key, value)
        assert values(follower) == expected[step]
        assert bool(changes) == (values(follower) != before)
    if kind == "tensor_lr":  # a captured or fused step reads that very tensor
        assert all(g["lr"] is lr for g, lr in zip(follower.param_groups, rates, strict=True))
    assert next(v for _, key, v in tape.at(5) if key == "lr") == expected[5][0][0]  # back


@pytest.mark.parametrize("name", ["cosine", "chained", "one_cycle"])
def test_a_tape_goes_far_and_back_in_little_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tapes, "BLOCK", 16)
    monkeypatch.setattr(tapes, "KEPT", 3)
    expected = by_hand(OPTIMIZERS["sgd"](), MAKERS[name], 200)
    tape = tape_of(OPTIMIZERS["sgd"](), MAKERS[name])
    for step in (150, 149, 33, 32, 1, 200, 0):
        rates = [value for _, key, value in tape.at(step) if key == "lr"]
        assert rates == [group[0] for group in expected[step]]
        assert len(tape._blocks) <= 3
    assert tape.preview(150) == pytest.approx([group[0] for group in expected[150]], rel=1e-12)


def test_a_change_of_no_value_writes_nothing() -> None:
    tape = tape_of(OPTIMIZERS["adamw"](), lambda o: ConstantLR(o, 1.0, 0))
    assert [tape.changes(step) for step in (1, BLOCK, BLOCK + 1)] == [[], [], []]
    stairs = tape_of(OPTIMIZERS["adamw"](), lambda o: StepLR(o, 100, 0.5))
    moved = [step for step in range(1, LONG) if stairs.changes(step)]
    assert moved == list(range(100, LONG, 100))


def test_what_a_scheduler_raises_is_raised_at_its_step() -> None:
    tape = tape_of(OPTIMIZERS["sgd"](), lambda o: OneCycleLR(o, 0.1, 40))
    assert len(tape.changes(40)) == 4  # two rates and two momenta
    for ask in (tape.changes, tape.at, tape.preview):
        for step in (41, 10 * BLOCK):
            with pytest.raises(ValueError, match=r"Tried to step \d+ times"):
                ask(step)
    assert tape.at(3)


@pytest.mark.parametrize("name", ["cosine", "linear", "polynomial", "lambda", "sequential"])
def test_a_look_far_ahead_does_not_step_there(name: str) -> None:
    total = 10**6

    def steps_taken(o: Optimizer) -> Any:
        scheduler = {
            "cosine": lambda: CosineAnnealingLR(o, total),
            "linear": lambda: LinearLR(o, 1.0, 0.0, total),
            "polynomial": lambda: PolynomialLR(o, total),
            "lambda": lambda: LambdaLR(o, lambda t: 1 - t / total),
            "sequential": lambda: SequentialLR(
                o, [ConstantLR(o, 1.0), LinearLR(o, 1.0, 0.0, total)], [total // 2]
            ),
        }[name]()
        made.append(scheduler)
        return scheduler

    made: list[Any] = []
    tape = tape_of(OPTIMIZERS["sgd"](), steps_taken)
    half, end = tape.preview(total // 2), tape.preview(total)
    assert half == pytest.approx([0.4, 0.1] if name == "sequential" else [0.2, 0.05])
    assert end == pytest.approx([0.2, 0.05] if name == "sequential" else [0.0, 0.0])
    assert made[0].last_epoch == BLOCK  # what a run begins with is recorded, and no more
    assert total // 2 > BLOCK * KEPT


def schedule_over(node: dict[str, Any], optimizer: Optimizer) -> tuple[Optimizers, Any]:
    model = nn.ParameterList([p for g in optimizer.param_groups for p in g["params"]])
    over = Optimizers.wrap(optimizer, model)
    return over, build_lr_schedule(node, over, 10**6, 1000)


def test_a_long_run_can_begin_far_on() -> None:
    """With the rates of another schedule: it is stepped there, at some microseconds a step."""
    node = {"_target_": f"{TORCH}.ExponentialLR", "gamma": 0.999}
    optimizer = OPTIMIZERS["sgd"]()
    _, schedule = schedule_over(node, optimizer)
    state = {**schedule.state_dict(), "updates": 20_000, "epochs": 20}
    schedule.load_state_dict(state, hyper_parameters=False)
    plain = by_hand(OPTIMIZERS["sgd"](), lambda o: ExponentialLR(o, 0.999), 20_001)
    assert values(optimizer) == plain[20_000]
    assert schedule.after_update()
    assert values(optimizer) == plain[20_001]


def test_a_schedule_says_whether_anything_moved() -> None:
    node = {"_target_": f"{TORCH}.StepLR", "step_size": 2, "warmup": {"steps": 2}}
    _, schedule = schedule_over(node, OPTIMIZERS["adamw"]())
    assert [schedule.after_update() for _ in range(6)] == [True, True, False, True, False, True]
    epochs = {"_target_": f"{TORCH}.StepLR", "step_size": 1, "interval": "epoch"}
    optimizer = OPTIMIZERS["adamw"]()
    _, schedule = schedule_over(epochs, optimizer)
    assert not schedule.after_update()
    schedule.after_epoch()
    assert values(optimizer)[0][0] == 0.4 * 0.1


# What `state_dict` returned when schedulers were stepped on the optimizer itself.
STEP_LR = {
    "type": f"{TORCH}.StepLR",
    "settings": {
        "_target_": f"{TORCH}.StepLR",
        "step_size": 2,
        "gamma": 0.1,
        "warmup.ticks": 8,
        "warmup.every": "step",
        "warmup.start_factor": 0.01,
        "warmup.shape": "linear",
        "interval": "epoch",
        "monitor": None,
    },
    "groups": ["group_0", "group_1"],
    "tick": 8,
    "settled": True,
    "scheduler": {"step_size": 2, "gamma": 0.1, "base_lrs": [0.4, 0.1], "last_epoch": 2},
    "start": [0.4, 0.1],
    "lr": [0.04000000000000001, 0.010000000000000002],
}


@pytest.mark.parametrize("same", [pytest.param(True, id="same"), pytest.param(False, id="changed")])
def test_a_state_from_before_tapes_goes_on(same: bool) -> None:
    node = {
        "_target_": f"{TORCH}.StepLR",
        "step_size": 2,
        "gamma": 0.1 if same else 0.5,
        "interval": "epoch",
        "warmup": {"steps": 8},
    }
    optimizer = OPTIMIZERS["sgd"]()
    model = nn.ParameterList([p for g in optimizer.param_groups for p in g["params"]])
    over = Optimizers.wrap(optimizer, model)
    schedule = build_lr_schedule(node, over, 48, 6)
    if same:
        for group, lr in zip(optimizer.param_groups, STEP_LR["lr"], strict=True):
            group["lr"] = lr
    state = {"updates": 20, "epochs": 3, "tracks": {"optimizer": STEP_LR}}
    schedule.load_state_dict(state, hyper_parameters=same)
    rates = []
    for update in range(20, 36):
        rates.append(values(optimizer)[0][0])
        schedule.after_update()
        if (update + 1) % 6 == 0:
            schedule.after_epoch()
    gamma = node["gamma"]
    # The first epoch was the warm-up's and, of the second, two updates were: one counts from there.
    assert rates == [0.4 * gamma] * 10 + [0.4 * gamma * gamma] * 6
