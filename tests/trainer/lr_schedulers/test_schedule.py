"""Schedules against torch's own, walked by hand: warm-ups and curves."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    PolynomialLR,
    SequentialLR,
)

from schedules_by_hand import (
    BY_HAND,
    CONF,
    FILES,
    PER_EPOCH,
    TORCH,
    TOTAL,
    assert_close,
    node,
    optimizers,
    walk,
    walk_by_hand,
)
from trainer.lr_schedulers.build import build_lr_schedule, target_nodes, warn_of_long_warmups
from trainer.lr_schedulers.schedule import curve
from trainer.targets.instantiate import bind_problems


def test_every_file_is_written_out_by_hand_here() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == BY_HAND.keys()


@pytest.mark.parametrize("name", FILES)
def test_a_shipped_schedule_is_torchs_own(name: str) -> None:
    over = optimizers()
    schedule = build_lr_schedule(node(name), over, TOTAL, PER_EPOCH)
    ours = walk(over, schedule)
    assert_close(ours, walk_by_hand(name))
    assert (len({tuple(values) for values in ours}) == 1) == (name == "constant")


@pytest.mark.parametrize("name", FILES)
def test_a_shipped_schedule_passes_the_signature_check(name: str) -> None:
    nodes = target_nodes(node(name), "lr_scheduler")
    assert [p for key, n in nodes.items() for p in bind_problems(n, key, positional=1)] == []
    assert len(nodes) == {"sequential": 3, "chained": 3}.get(name, 1)


@pytest.mark.parametrize(
    "name", ["constant", "cosine", "exponential", "linear", "polynomial", "lambda", "multi_step"]
)
def test_a_warm_up_is_torchs_linear_one_in_sequence(name: str) -> None:
    after: dict[str, Callable[[Optimizer], Any]] = {
        "cosine": lambda o: CosineAnnealingLR(o, 42),
        "lambda": lambda o: LambdaLR(o, lambda t: 0.5 * (1 + math.cos(math.pi * t / 42))),
        "linear": lambda o: LinearLR(o, 1.0, 0.0, 42),
        "multi_step": lambda o: MultiStepLR(o, [21, round(31.5)], 0.1),
        "polynomial": lambda o: PolynomialLR(o, 42, 1.0),
    }
    parameter = nn.Parameter(torch.zeros(1))
    plain = SGD([parameter], lr=0.4)
    parts = [LinearLR(plain, 0.1, 1.0, 6), after.get(name, BY_HAND[name][1])(plain)]
    sequence = SequentialLR(plain, parts, [6])
    expected = []
    for _ in range(TOTAL):
        expected.append([plain.param_groups[0]["lr"]])
        plain.step()
        sequence.step()
    over = optimizers()
    chosen = node(name, "lr_scheduler.interval=step") | {
        "warmup": {"steps": 6, "start_factor": 0.1}
    }
    ours = walk(over, build_lr_schedule(chosen, over, TOTAL, PER_EPOCH))
    assert_close([values[:1] for values in ours], expected)


@pytest.mark.parametrize("name", FILES)
def test_a_warm_up_stands_in_front_of_any_schedule(name: str) -> None:
    """It rises to the schedule's first value; the rest is the schedule over what remains."""
    chosen = node(name) | {"interval": "step", "warmup": None}
    alone = optimizers()
    after = walk(alone, build_lr_schedule(chosen, alone, TOTAL - 6, PER_EPOCH), 0, TOTAL - 6)
    over = optimizers()
    ramp = {"epochs": 1, "start_factor": 0.25, "shape": "exponential"}
    schedule = build_lr_schedule(chosen | {"warmup": ramp}, over, TOTAL, PER_EPOCH)
    ours = walk(over, schedule)
    first = [0.25 ** (1 - t / 6) for t in range(6)]
    assert_close([v[::2] for v in ours[:6]], [[f * lr for lr in after[0][::2]] for f in first])
    if name == "plateau":  # which waits for validations, and by then others have gone by
        return
    assert_close(ours[6:], after)


def test_a_plateau_schedule_does_not_count_validations_of_the_warm_up() -> None:
    chosen = node("plateau", "lr_scheduler.patience=0") | {"warmup": {"epochs": 3}}
    over = optimizers()
    rates = walk(over, build_lr_schedule(chosen, over, TOTAL, PER_EPOCH))
    by_epoch = [rates[step][0] for step in range(17, TOTAL, PER_EPOCH)]
    # Losses from the third epoch's on: 0.95 is the best so far, then 0.93, 0.92, 0.91, 0.8, 0.85.
    assert by_epoch == pytest.approx([0.4 * (0.01 + 0.99 * 17 / 18)] + [0.4] * 5)


def test_a_warm_up_in_updates_goes_before_a_schedule_of_epochs() -> None:
    chosen = {"_target_": f"{TORCH}.ExponentialLR", "gamma": 0.5, "interval": "epoch"}
    over = optimizers()
    warm = chosen | {"warmup": {"steps": 6, "start_factor": 0.5}}
    rates = [v[0] for v in walk(over, build_lr_schedule(warm, over, TOTAL, PER_EPOCH), 0, 24)]
    assert rates[:6] == pytest.approx([0.4 * (0.5 + 0.5 * t / 6) for t in range(6)])
    assert rates[6:] == pytest.approx([0.4] * 6 + [0.2] * 6 + [0.1] * 6)
    over = optimizers()
    by_epoch = chosen | {"warmup": {"epochs": 2, "start_factor": 0.5}}
    rates = [v[0] for v in walk(over, build_lr_schedule(by_epoch, over, TOTAL, PER_EPOCH), 0, 24)]
    assert rates == pytest.approx([0.2] * 6 + [0.3] * 6 + [0.4] * 6 + [0.2] * 6)


def test_horizons_are_those_of_the_schedule_itself() -> None:
    """In epochs where it moves once an epoch, and what remains after a warm-up."""
    over = optimizers()
    chosen = node("cosine", "lr_scheduler.interval=epoch", "lr_scheduler.warmup.epochs=2")
    schedule = build_lr_schedule(chosen, over, TOTAL, PER_EPOCH)
    assert schedule.tracks["optimizer"].scheduler.T_max == 6
    walk(over, schedule)
    assert over.learning_rates()["first"] == pytest.approx(0.0, abs=1e-12)


def test_a_skipped_update_moves_nothing() -> None:
    over = optimizers()
    schedule = build_lr_schedule(node("cosine"), over, TOTAL, PER_EPOCH)
    before = over.learning_rates()
    schedule.after_validation({"val/loss": 1.0})
    assert over.learning_rates() == before
    assert (schedule.updates, schedule.epochs) == (0, 0)


@pytest.mark.parametrize("warmup", [None, {"steps": 4}, {"epochs": 2}, {"steps": 9}])
@pytest.mark.parametrize("name", FILES)
def test_the_curve_is_what_a_run_does(name: str, warmup: dict[str, int] | None) -> None:
    chosen = node(name) | {"warmup": warmup}
    over, drawn_over = optimizers(), optimizers()
    generator = torch.get_rng_state()
    before = build_lr_schedule(chosen, drawn_over, TOTAL, PER_EPOCH)
    rates = drawn_over.learning_rates()
    drawn = curve(before, drawn_over, TOTAL, points=TOTAL)
    assert torch.equal(torch.get_rng_state(), generator)
    assert drawn_over.learning_rates() == rates
    schedule = build_lr_schedule(chosen, over, TOTAL, PER_EPOCH)
    if name == "plateau":
        schedule.tracks["optimizer"].watched = "never measured"
    walked = walk(over, schedule)
    assert [step for step, _ in drawn["first"]] == list(range(TOTAL))
    pairs = zip(drawn["first"], drawn["default"], strict=True)
    assert_close([[a, b] for (_, a), (_, b) in pairs], [values[::2] for values in walked])


def test_a_curve_has_few_points_and_a_last_one() -> None:
    over = optimizers()
    drawn = curve(build_lr_schedule(node("cosine"), over, 100_000, 1000), over, 100_000, points=50)
    assert [step for step, _ in drawn["default"]] == [*range(0, 100_000, 2000), 99_999]
    assert drawn["default"][0][1] == 0.1
    nothing = build_lr_schedule(None, optimizers(), 1, None)
    assert curve(nothing, optimizers(), 1) == {"first": [(0, 0.4)], "default": [(0, 0.1)]}


def test_a_warm_up_longer_than_the_run_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    chosen = node("cosine", "lr_scheduler.warmup.steps=50")
    over = optimizers()
    schedule = build_lr_schedule(chosen, over, TOTAL, PER_EPOCH)
    warn_of_long_warmups(schedule, TOTAL, PER_EPOCH)
    assert caplog.text.count("the warm-up takes 50 updates, the run ends at 48") == 1
    assert walk(over, schedule)[-1][0] < 0.4
