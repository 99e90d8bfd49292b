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


def first_group(values: list[list[float]]) -> list[float]:
    """Return the rate of the first group at each update."""
    return [at_update[0] for at_update in values]


def rates_only(values: list[list[float]]) -> list[list[float]]:
    """Leave out the momentum, which stands behind the rate of each group."""
    return [at_update[::2] for at_update in values]


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_a_shipped_schedule_is_torchs_own(name: str) -> None:
    ours = walked(node(name))
    assert_close(ours, walk_by_hand(name))
    is_constant = all(values == ours[0] for values in ours)
    assert is_constant == (name == "constant")


@pytest.mark.parametrize("name", FILES)
def test_a_warm_up_stands_in_front_of_any_schedule(name: str) -> None:
    """It rises to the schedule's first value; the rest is the schedule over what remains."""
    chosen = node(name) | {"interval": "step", "warmup": None}
    warmup = {"epochs": 1, "start_factor": 0.25, "shape": "exponential"}
    after = walked(chosen, TOTAL - 6, TOTAL - 6)
    ours = walked(chosen | {"warmup": warmup})

    first_rates, *_ = rates_only(after)
    rising = []
    for update in range(6):
        factor = 0.25 ** (1 - update / 6)
        rising.append([factor * rate for rate in first_rates])

    assert_close(rates_only(ours[:6]), rising)

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
    rates = first_group(
        walked(node("plateau", "lr_scheduler.patience=0") | {"warmup": {"epochs": 3}})
    )
    by_epoch = rates[17::PER_EPOCH]
    # Losses from the third epoch's on: 0.95 is the best so far, then 0.93, 0.92, 0.91, 0.8, 0.85.
    end_of_warm_up = 0.4 * (0.01 + 0.99 * 17 / 18)
    assert by_epoch == pytest.approx([end_of_warm_up] + [0.4] * 5)


HALVED = {"_target_": f"{TORCH}.ExponentialLR", "gamma": 0.5, "interval": "epoch"}


def test_a_warm_up_in_updates_goes_before_a_schedule_of_epochs() -> None:
    warmup = {"steps": 6, "start_factor": 0.5}
    rates = first_group(walked(HALVED | {"warmup": warmup}, 24))
    rising = [0.4 * (0.5 + 0.5 * update / 6) for update in range(6)]

    assert rates[:6] == pytest.approx(rising)
    assert rates[6:12] == pytest.approx([0.4] * 6)
    assert rates[12:18] == pytest.approx([0.2] * 6)
    assert rates[18:] == pytest.approx([0.1] * 6)


def test_a_warm_up_in_epochs_rises_once_an_epoch() -> None:
    warmup = {"epochs": 2, "start_factor": 0.5}
    rates = first_group(walked(HALVED | {"warmup": warmup}, 24))

    assert rates[:6] == pytest.approx([0.2] * 6)
    assert rates[6:12] == pytest.approx([0.3] * 6)
    assert rates[12:18] == pytest.approx([0.4] * 6)
    assert rates[18:] == pytest.approx([0.2] * 6)


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
    over = optimizers()
    schedule = build_lr_schedule(chosen, over, TOTAL, PER_EPOCH)
    rates = over.learning_rates()
    generator = torch.get_rng_state()
    drawn = curve(schedule, over, TOTAL, points=TOTAL)

    assert torch.equal(torch.get_rng_state(), generator)
    assert over.learning_rates() == rates

    if name == "plateau":
        schedule.schedules["optimizer"].metric = "never measured"
    seen = rates_only(walk(over, schedule))
    assert [step for step, _ in drawn["first"]] == list(range(TOTAL))

    of_first = [rate for _, rate in drawn["first"]]
    of_default = [rate for _, rate in drawn["default"]]
    assert_close([list(pair) for pair in zip(of_first, of_default, strict=True)], seen)


def test_a_curve_has_few_points_and_a_last_one() -> None:
    over = optimizers()
    schedule = build_lr_schedule(node("cosine"), over, 100_000, 1000)
    drawn = curve(schedule, over, 100_000, points=50)
    steps = [step for step, _ in drawn["default"]]

    assert steps == [*range(0, 100_000, 2000), 99_999]
    assert drawn["default"][0] == (0, 0.1)


def test_the_curve_without_a_schedule_is_a_point() -> None:
    schedule = build_lr_schedule(None, optimizers(), 1, None)
    drawn = curve(schedule, optimizers(), 1)
    assert drawn == {"first": [(0, 0.4)], "default": [(0, 0.1)]}


@pytest.mark.parametrize("warm", [pytest.param(False, id="plain"), pytest.param(True, id="warm")])
@pytest.mark.parametrize("cut", [pytest.param(3, id="early"), pytest.param(20, id="mid-epoch")])
@pytest.mark.parametrize("name", FILES)
def test_a_schedule_goes_on_exactly_after_a_resume(name: str, cut: int, warm: bool) -> None:
    chosen = node(name)
    if warm:
        chosen |= {"warmup": {"steps": 5, "start_factor": 0.1}}
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
    chosen = node(name)
    if warm:
        chosen |= {"warmup": {"steps": warm}}
    rates = None if keeps else [0.7, 0.3]
    old = scheduled(chosen)
    whole = scheduled(chosen, rates, 2 * TOTAL)
    resumed = scheduled(chosen, rates, 2 * TOTAL)
    walk(*old, 0, 20)
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

    before = schedule.schedules["optimizer"].scheduler
    scheduler = again.schedules["optimizer"].scheduler
    assert scheduler.patience == 5
    assert scheduler.best == 0.9
    assert scheduler.num_bad_epochs == before.num_bad_epochs


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
    _, old = scheduled(node("step"))
    _, new = scheduled(node(*chosen))
    state = through_a_file(old.state_dict())
    with pytest.raises(CheckpointError, match=message):
        new.load_state_dict(state)


def test_a_malformed_state_is_refused() -> None:
    _, schedule = scheduled(node("step"))
    half = {
        "updates": 0,
        "epochs": 0,
        "tracks": {"optimizer": {"type": 3}},
    }
    for broken in ({}, half):
        with pytest.raises(CheckpointError, match="malformed"):
            schedule.load_state_dict(broken)


CYCLIC = {
    "_target_": f"{TORCH}.CyclicLR",
    "base_lr": 0.01,
    "max_lr": None,
    "step_size_up": 7,
}


@pytest.mark.parametrize("name", ["one_cycle", "step", "plateau", "lambda", "chained", "cyclic"])
def test_reordered_groups_keep_their_schedules(name: str) -> None:
    chosen = CYCLIC if name == "cyclic" else node(name)
    rules = {"a": {"match": "^0", "lr": 0.4}, "b": {"match": "^1", "lr": 0.1}}

    def over(names: str) -> tuple[Optimizers, LRSchedule]:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        sgd = {
            "_target_": "torch.optim.SGD",
            "lr": 0.1,
            "momentum": 0.9,
            "param_groups": {name: rules[name] for name in names},
        }
        made = build_optimizers(model, sgd)
        return made, build_lr_schedule(chosen, made, TOTAL, PER_EPOCH)

    one = over("ab")
    other = over("ba")
    walk(*one, 0, 20)
    carry_over(one, other)

    # Each update has two values for each of the groups.
    turned = [[*values[2:], *values[:2]] for values in walk(*other, 20)]

    assert turned == walk(*one, 20)


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


def hyper_parameters(optimizer: Optimizer) -> list[Any]:
    """Return what a scheduler may move, for each group."""
    found = []
    for group in optimizer.param_groups:
        others = [group.get(name) for name in ("momentum", "betas", "weight_decay")]
        found.append([float(group["lr"]), *others])
    return found


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("make", [cyclic, one_cycle, DecayToo])
def test_a_scheduler_moves_other_hyper_parameters_and_goes_on(
    make: Callable[[Optimizer], Any], tensor: bool
) -> None:
    def plain() -> Optimizer:
        groups = []
        for lr in (0.4, 0.1):
            parameter = nn.Parameter(torch.zeros(1))
            groups.append({"params": [parameter], "lr": torch.tensor(lr) if tensor else lr})
        return AdamW(groups) if tensor else SGD(groups, momentum=0.9)

    def begun() -> tuple[Optimizers, LRSchedule]:
        optimizer = plain()
        first, second = optimizer.param_groups
        model = nn.ParameterList([*first["params"], *second["params"]])
        return Optimizers.wrap(optimizer, model), LRSchedule.wrap(make(optimizer))

    by_hand = plain()
    scheduler = make(by_hand)
    over, schedule = begun()
    for step in range(30):
        if step == 12:
            before = over, schedule
            over, schedule = begun()
            carry_over(before, (over, schedule))
        ours = over.optimizers["optimizer"]
        by_hand.step()
        ours.step()
        scheduler.step()
        schedule.after_update()
        assert hyper_parameters(ours) == hyper_parameters(by_hand)


# Of a Trainer that a person builds.
EPOCHS = 3
UPDATES = 10


def rates_of(make: Callable[[Any], Any], interval: Any = None, **options: Any) -> list[float]:
    """Return the rate of each update under a Trainer, with a plain scheduler."""
    rates = []
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=1.0)

    class Rates(Callback):
        def on_update_start(self, trainer: Any, micro_batches: Any) -> None:
            (group,) = optimizer.param_groups
            rates.append(group["lr"])

    trainer = Trainer(
        model,
        Classification(3),
        optimizer,
        toys.batches(UPDATES),
        lr_scheduler=make(optimizer),
        lr_interval=interval,
        callbacks={"rates": Rates()},
        options=TrainerOptions(**{"max_epochs": EPOCHS, **options}),
    )
    trainer.fit()
    return rates


def rates_by_hand(make: Callable[[Any], Any], by_step: bool) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    (group,) = optimizer.param_groups
    scheduler = make(optimizer)
    rates = []
    for _ in range(EPOCHS):
        for _ in range(UPDATES):
            rates.append(group["lr"])
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
