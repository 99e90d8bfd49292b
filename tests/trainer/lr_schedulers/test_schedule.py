"""Schedules against torch's own, walked by hand; warm-ups, curves, resumes."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as by_torch

import toys
from regimen.trainer.callback import Callback
from regimen.trainer.errors import CheckpointError
from regimen.trainer.lr_schedulers.build import build_lr_schedule
from regimen.trainer.lr_schedulers.schedule import LRSchedule, curve
from regimen.trainer.optimizers.optimizers import Optimizers, build_optimizers
from regimen.trainer.options import TrainerOptions
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.trainer import Trainer
from schedules_by_hand import (
    BY_HAND,
    CONF,
    FILES,
    PER_EPOCH,
    TORCH,
    TOTAL,
    assert_close,
    carry_over,
    node,
    optimizers,
    scheduled,
    walk,
    walk_by_hand,
    walked,
)
from toys import through_a_file


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_a_shipped_schedule_is_torchs_own(name: str) -> None:
    ours = walked(node(name))
    assert_close(ours, walk_by_hand(name))
    assert (len({tuple(values) for values in ours}) == 1) == (name == "constant")


@pytest.mark.parametrize("name", FILES)
def test_a_warm_up_stands_in_front_of_any_schedule(name: str) -> None:
    """It rises to the schedule's first value; the rest is the schedule over what remains."""
    chosen = node(name) | {"interval": "step", "warmup": None}
    after = walked(chosen, TOTAL - 6, TOTAL - 6)
    ours = walked(chosen | {"warmup": {"epochs": 1, "start_factor": 0.25, "shape": "exponential"}})
    first = [0.25 ** (1 - t / 6) for t in range(6)]
    assert_close([v[::2] for v in ours[:6]], [[f * lr for lr in after[0][::2]] for f in first])
    if name != "plateau":  # which waits for validations, and by then others have gone by
        assert_close(ours[6:], after)


@pytest.mark.parametrize(
    ("monitor", "modes", "mode", "wanted"),
    [
        pytest.param("val/loss", {}, "auto", "min", id="falls"),
        pytest.param("val/dice_loss", {}, "auto", "min", id="its last word"),
        pytest.param("val/accuracy", {}, "auto", "max", id="rises"),
        pytest.param("val/loss/accuracy", {}, "auto", "max", id="not the set's name"),
        pytest.param("val/accuracy", {}, None, "max", id="not given"),
        pytest.param("val/accuracy", {}, "min", "min", id="given"),
        pytest.param("val/fid", {"fid": "min"}, "auto", "min", id="the task says it"),
    ],
)
def test_a_plateau_follows_its_metric_in_the_direction_that_is_better(
    monitor: str, modes: dict[str, str], mode: str | None, wanted: str
) -> None:
    given = node("plateau") | {"monitor": monitor, "mode": mode}
    if mode is None:
        del given["mode"]
    schedule = build_lr_schedule(given, optimizers(), TOTAL, PER_EPOCH, modes=modes)
    assert schedule.schedules["optimizer"].scheduler.mode == wanted


def test_a_plateau_schedule_does_not_count_validations_of_the_warm_up() -> None:
    rates = walked(node("plateau", "lr_scheduler.patience=0") | {"warmup": {"epochs": 3}})
    by_epoch = [rates[step][0] for step in range(17, TOTAL, PER_EPOCH)]
    # Losses from the third epoch's on: 0.95 is the best so far, then 0.93, 0.92, 0.91, 0.8, 0.85.
    assert by_epoch == pytest.approx([0.4 * (0.01 + 0.99 * 17 / 18)] + [0.4] * 5)


def test_a_warm_up_in_updates_goes_before_a_schedule_of_epochs() -> None:
    chosen = {"_target_": f"{TORCH}.ExponentialLR", "gamma": 0.5, "interval": "epoch"}
    rates = [v[0] for v in walked(chosen | {"warmup": {"steps": 6, "start_factor": 0.5}}, 24)]
    assert rates[:6] == pytest.approx([0.4 * (0.5 + 0.5 * t / 6) for t in range(6)])
    assert rates[6:] == pytest.approx([0.4] * 6 + [0.2] * 6 + [0.1] * 6)
    rates = [v[0] for v in walked(chosen | {"warmup": {"epochs": 2, "start_factor": 0.5}}, 24)]
    assert rates == pytest.approx([0.2] * 6 + [0.3] * 6 + [0.4] * 6 + [0.2] * 6)


def test_horizons_are_those_of_the_schedule_itself() -> None:
    """In epochs where it moves once an epoch, and what remains after a warm-up."""
    over = optimizers()
    chosen = node("cosine", "lr_scheduler.interval=epoch", "lr_scheduler.warmup.epochs=2")
    schedule = build_lr_schedule(chosen, over, TOTAL, PER_EPOCH)
    assert schedule.schedules["optimizer"].scheduler.T_max == 6
    walk(over, schedule)
    assert over.learning_rates()["first"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("warmup", [None, {"epochs": 2}, {"steps": 9}, {"steps": 50}])
@pytest.mark.parametrize("name", FILES)
def test_the_curve_is_what_a_run_does(name: str, warmup: dict[str, int] | None) -> None:
    chosen = node(name) | {"warmup": warmup}
    over, generator = optimizers(), torch.get_rng_state()
    schedule = build_lr_schedule(chosen, over, TOTAL, PER_EPOCH)
    rates = over.learning_rates()
    drawn = curve(schedule, over, TOTAL, points=TOTAL)
    assert torch.equal(torch.get_rng_state(), generator)
    assert over.learning_rates() == rates
    if name == "plateau":
        schedule.schedules["optimizer"].metric = "never measured"
    seen = walk(over, schedule)
    assert [step for step, _ in drawn["first"]] == list(range(TOTAL))
    pairs = zip(drawn["first"], drawn["default"], strict=True)
    assert_close([[a, b] for (_, a), (_, b) in pairs], [values[::2] for values in seen])


def test_a_curve_has_few_points_and_a_last_one() -> None:
    over = optimizers()
    drawn = curve(build_lr_schedule(node("cosine"), over, 100_000, 1000), over, 100_000, points=50)
    assert [step for step, _ in drawn["default"]] == [*range(0, 100_000, 2000), 99_999]
    assert drawn["default"][0][1] == 0.1
    nothing = build_lr_schedule(None, optimizers(), 1, None)
    assert curve(nothing, optimizers(), 1) == {"first": [(0, 0.4)], "default": [(0, 0.1)]}


@pytest.mark.parametrize("warm", [pytest.param(False, id="plain"), pytest.param(True, id="warm")])
@pytest.mark.parametrize("cut", [pytest.param(3, id="early"), pytest.param(20, id="mid-epoch")])
@pytest.mark.parametrize("name", FILES)
def test_a_schedule_goes_on_exactly_after_a_resume(name: str, cut: int, warm: bool) -> None:
    chosen = node(name) | ({"warmup": {"steps": 5, "start_factor": 0.1}} if warm else {})
    whole, schedule = scheduled(chosen)
    walk(whole, schedule, 0, cut)
    resumed, again = scheduled(chosen)
    carry_over((whole, schedule), (resumed, again))
    assert walk(resumed, again, cut) == walk(whole, schedule, cut)
    assert again.state_dict() == schedule.state_dict()


@pytest.mark.parametrize("warm", [0, 6])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", [name for name in BY_HAND if name != "plateau"])
def test_a_changed_configuration_goes_on_along_its_own_curve(
    name: str, warm: int, keeps: bool
) -> None:
    """A longer run, another learning rate: as if they had been so from the start."""
    chosen = node(name) | ({"warmup": {"steps": warm}} if warm else {})
    old = scheduled(chosen)
    walk(*old, 0, 20)
    rates = None if keeps else [0.7, 0.3]
    whole, resumed = (scheduled(chosen, rates, 2 * TOTAL) for _ in "ab")
    walk(*whole, 0, 20)
    carry_over(old, resumed, keeps, False)
    assert walk(*resumed, 20, 96) == walk(*whole, 20, 96)


def test_a_plateau_schedule_keeps_what_it_has_seen_and_how_far_it_came_down() -> None:
    old, schedule = scheduled(node("plateau", "lr_scheduler.patience=1"))
    walk(old, schedule, 0, 30)
    assert old.learning_rates()["first"] == pytest.approx(0.04)
    # The second group's learning rate is new, the first's is not.
    resumed, again = scheduled(node("plateau", "lr_scheduler.patience=5"), [0.4, 0.3])
    carry_over((old, schedule), (resumed, again), False, False)
    assert resumed.learning_rates() == pytest.approx({"first": 0.04, "default": 0.3})
    scheduler = again.schedules["optimizer"].scheduler
    assert (scheduler.patience, scheduler.best) == (5, 0.9)
    assert scheduler.num_bad_epochs == schedule.schedules["optimizer"].scheduler.num_bad_epochs


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (["cosine"], r"CosineAnnealingLR', it was .*StepLR"),
        (["step", "lr_scheduler.gamma=0.5"], "lr_scheduler.gamma is 0.5, it was 0.1"),
        (["step", "lr_scheduler.step_size=3"], "step_size is 3, it was 2"),
        (["step", "lr_scheduler.interval=step"], r"step_size is 14, it was 2 \(\+1"),
        (["step", "lr_scheduler.warmup.steps=3"], r"warmup.ticks is 3, it was None"),
    ],
)
def test_another_schedule_is_refused(chosen: list[str], message: str) -> None:
    (_, old), (_, new) = scheduled(node("step")), scheduled(node(*chosen))
    with pytest.raises(CheckpointError, match=message):
        new.load_state_dict(through_a_file(old.state_dict()))
    for broken in ({}, {"updates": 0, "epochs": 0, "tracks": {"optimizer": {"type": 3}}}):
        with pytest.raises(CheckpointError, match="malformed"):
            old.load_state_dict(broken)


CYCLIC = {"_target_": f"{TORCH}.CyclicLR", "base_lr": 0.01, "max_lr": None, "step_size_up": 7}


@pytest.mark.parametrize("name", ["one_cycle", "step", "plateau", "lambda", "chained", "cyclic"])
def test_reordered_groups_keep_their_schedules(name: str) -> None:
    rules = {"a": {"match": "^0", "lr": 0.4}, "b": {"match": "^1", "lr": 0.1}}

    def over(names: str) -> Optimizers:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        groups = {name: rules[name] for name in names}
        sgd = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}
        return build_optimizers(model, {**sgd, "param_groups": groups})

    chosen = CYCLIC if name == "cyclic" else node(name)
    both = [(o, build_lr_schedule(chosen, o, TOTAL, PER_EPOCH)) for o in (over("ab"), over("ba"))]
    walk(*both[0], 0, 20)
    carry_over(*both)
    turned = [[*values[2:], *values[:2]] for values in walk(*both[1], 20)]
    assert turned == walk(*both[0], 20)


class DecayToo(by_torch.LRScheduler):
    """A scheduler of one's own, which moves the weight decay as well."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 / (1 + self.last_epoch // 3)
        return [base * 0.999**self.last_epoch for base in self.base_lrs]


def cyclic(optimizer: Optimizer) -> Any:
    return by_torch.CyclicLR(optimizer, 0.01, [0.4, 0.1], 7, mode="exp_range", gamma=0.9)


def one_cycle(optimizer: Optimizer) -> Any:
    return by_torch.OneCycleLR(optimizer, [0.4, 0.1], 40)


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("make", [cyclic, one_cycle, DecayToo])
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
            before = over, schedule
            over, schedule = begun()
            carry_over(before, (over, schedule))
        for optimizer in (by_hand, over.optimizers["optimizer"]):
            optimizer.step()
        scheduler.step()
        schedule.after_update()
        assert values(over.optimizers["optimizer"]) == values(by_hand)


EPOCHS, UPDATES = 3, 10  # of a Trainer that a person builds


def rates_of(make: Callable[[Any], Any], interval: Any = None, **options: Any) -> list[float]:
    """Return the rate of each update under a Trainer, with a plain scheduler."""
    rates = []

    class Rates(Callback):
        def on_update_start(self, trainer: Any, micro_batches: Any) -> None:
            rates.append(trainer.optimizers.optimizers["optimizer"].param_groups[0]["lr"])

    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=1.0)
    Trainer(
        model,
        Classification(3),
        optimizer,
        toys.batches(UPDATES),
        lr_scheduler=make(optimizer),
        lr_interval=interval,
        callbacks={"rates": Rates()},
        options=TrainerOptions(**{"max_epochs": EPOCHS, **options}),
    ).fit()
    return rates


def rates_by_hand(make: Callable[[Any], Any], by_step: bool) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(EPOCHS):
        for _ in range(UPDATES):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if by_step:
                scheduler.step()
        if not by_step:
            scheduler.step()
    return rates


PLAIN: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "step": (lambda o: by_torch.StepLR(o, 1, 0.1), False),
    "cosine": (lambda o: by_torch.CosineAnnealingLR(o, T_max=EPOCHS), False),
    "lambda": (lambda o: by_torch.LambdaLR(o, lambda n: 1 / (1 + n)), False),
    "warmed": (
        lambda o: by_torch.SequentialLR(
            o,
            [by_torch.LinearLR(o, 0.1, total_iters=1), by_torch.CosineAnnealingLR(o, 2)],
            [1],
        ),
        False,
    ),
    "one_cycle": (lambda o: by_torch.OneCycleLR(o, 1.0, total_steps=EPOCHS * UPDATES), True),
    "cyclic": (lambda o: by_torch.CyclicLR(o, 0.1, 1.0, 5), True),
    "one_cycle_in_a_chain": (
        lambda o: by_torch.ChainedScheduler(
            [by_torch.OneCycleLR(o, 1.0, total_steps=EPOCHS * UPDATES)]
        ),
        True,
    ),
}


@pytest.mark.parametrize(
    ("make", "by_step"), [pytest.param(*case, id=name) for name, case in PLAIN.items()]
)
def test_a_plain_scheduler_is_stepped_as_in_torchs_examples(
    make: Callable[[Any], Any], by_step: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert rates_of(make) == rates_by_hand(make, by_step)
    assert "does not fit" not in caplog.text


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_the_caller_says_otherwise(interval: str) -> None:
    def make(optimizer: Any) -> Any:
        return by_torch.ExponentialLR(optimizer, 0.9)

    assert rates_of(make, interval) == rates_by_hand(make, interval == "step")


@pytest.mark.parametrize(
    ("make", "interval", "options", "told"),
    [
        pytest.param(
            lambda o: by_torch.CosineAnnealingLR(o, 30),
            None,
            {},
            "T_max=30, .* 3 steps",
            id="cosine",
        ),
        pytest.param(
            lambda o: by_torch.CosineAnnealingLR(o, 3), "step", {}, "T_max=3, .* 30 st", id="short"
        ),
        pytest.param(
            lambda o: by_torch.OneCycleLR(o, 1.0, total_steps=40), None, {}, "=40,", id="one_cycle"
        ),
        pytest.param(
            lambda o: by_torch.PolynomialLR(o, 9),
            None,
            {"max_epochs": None, "max_steps": 15},
            "total_iters=9, .* 2 steps",
            id="by_steps",
        ),
        pytest.param(lambda o: by_torch.StepLR(o, 30), None, {}, "step_size=30", id="step"),
        pytest.param(
            lambda o: by_torch.SequentialLR(
                o, [by_torch.LinearLR(o), by_torch.CosineAnnealingLR(o, EPOCHS)], [1]
            ),
            None,
            {},
            "T_max=3, from step 1 on",
            id="sequence",
        ),
    ],
)
def test_a_length_that_does_not_fit_the_run_is_told(
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Any], Any],
    interval: Any,
    options: Any,
    told: str,
) -> None:
    rates_of(make, interval, **options)
    assert re.search(f"lr_scheduler: .*{told}.*lr_interval=", caplog.text)


def test_an_interval_or_a_scheduler_that_cannot_be_is_refused() -> None:
    def make(optimizer: Any) -> Any:
        return by_torch.StepLR(optimizer, 1)

    with pytest.raises(ValueError, match="lr_interval='batch': choose 'step' or 'epoch'"):
        rates_of(make, "batch")
    with pytest.raises(ValueError, match=r"has no effect: .* lr_scheduler is None"):
        rates_of(lambda o: None, "step")
    with pytest.raises(ValueError, match=r"has no effect: .* lr_scheduler is LRSchedule"):
        rates_of(lambda o: LRSchedule.wrap(make(o)), "step")
    with pytest.raises(TypeError, match="lr_scheduler is StepLR: give an object"):
        rates_of(lambda o: by_torch.StepLR)
    with pytest.raises(TypeError, match="lr_scheduler is str: give"):
        rates_of(lambda o: "cosine")
