"""Schedules against torch's own, walked by hand; warm-ups, resumes and curves of each."""

import copy
import functools
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from scripts.composition.compose import compose
from trainer.errors import CheckpointError
from trainer.lr_schedulers.horizon import ScheduleError
from trainer.lr_schedulers.nodes import target_nodes
from trainer.lr_schedulers.schedule import (
    LRSchedule,
    build_lr_schedule,
    curve,
    warn_of_long_warmups,
)
from trainer.optimizers.optimizers import Optimizers, build_optimizers
from trainer.targets.instantiate import TargetError, bind_problems

CONF = Path(__file__).resolve().parents[3] / "conf" / "lr_scheduler"
TOTAL, PER_EPOCH = 48, 6
LOSSES = [1.0, 0.9, 0.95, 0.93, 0.92, 0.91, 0.8, 0.85]  # of the eight epochs
LRS = [0.4, 0.1]
TORCH = "torch.optim.lr_scheduler"

# What each file says for 48 updates in epochs of 6, written out by hand; "E": moves once an epoch.
BY_HAND: dict[str, tuple[str, Callable[[Optimizer], Any]]] = {
    "chained": (
        "S",
        lambda o: ChainedScheduler([ConstantLR(o, 0.1, 20), ExponentialLR(o, 0.9998)]),
    ),
    "constant": ("S", lambda o: ConstantLR(o, 1.0, 0)),
    "cosine": ("S", lambda o: CosineAnnealingLR(o, 48)),
    "cosine_restarts": ("E", lambda o: CosineAnnealingWarmRestarts(o, 2, 2)),
    "exponential": ("E", lambda o: ExponentialLR(o, 0.9)),
    "lambda": ("S", lambda o: LambdaLR(o, lambda t: 0.5 * (1 + math.cos(math.pi * t / 48)))),
    "linear": ("S", lambda o: LinearLR(o, 1.0, 0.0, 48)),
    "multi_step": ("E", lambda o: MultiStepLR(o, [4, 6], 0.1)),
    "one_cycle": ("S", lambda o: OneCycleLR(o, LRS, 48, cycle_momentum=False)),
    "plateau": ("V", lambda o: ReduceLROnPlateau(o, "min", 0.1, 2)),
    "polynomial": ("S", lambda o: PolynomialLR(o, 48, 1.0)),
    "sequential": (
        "S",
        lambda o: SequentialLR(o, [ConstantLR(o, 1.0, 0), CosineAnnealingLR(o, 34)], [14]),
    ),
    "step": ("E", lambda o: StepLR(o, 2, 0.1)),
    "warmup_cosine": (
        "S",
        lambda o: SequentialLR(o, [LinearLR(o, 0.01, 1.0, 6), CosineAnnealingLR(o, 42)], [6]),
    ),
}
FILES = [pytest.param(name, id=name) for name in BY_HAND]


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


@functools.cache
def composed(*overrides: str) -> dict[str, Any]:
    return compose(list(overrides)).config


def node(name: str, *overrides: str) -> dict[str, Any]:
    chosen: dict[str, Any] = composed(f"lr_scheduler={name}", *overrides)["lr_scheduler"]
    return copy.deepcopy(chosen)


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


def through_a_file(*states: dict[str, Any]) -> list[dict[str, Any]]:
    buffer = io.BytesIO()
    torch.save(list(states), buffer)
    buffer.seek(0)
    loaded: list[dict[str, Any]] = torch.load(buffer, weights_only=True)
    return loaded


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
        schedule.tracks["optimizer"].monitor = "never measured"
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


def test_functions_go_by_group() -> None:
    chosen = {
        "_target_": f"{TORCH}.LambdaLR",
        "functions": {"first": "1 - step / total_steps", "default": "0.5 ** epoch"},
    }
    over = optimizers()
    rates = walk(over, build_lr_schedule(chosen, over, TOTAL, PER_EPOCH))
    expected = [[0.4 * (1 - t / TOTAL), 0.1 * 0.5 ** (t // PER_EPOCH)] for t in range(TOTAL)]
    assert_close([values[::2] for values in rates], expected)


def test_functions_can_name_optimizers() -> None:
    sgd = {"_target_": "torch.optim.SGD", "lr": 1.0}
    over = build_optimizers(
        nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)),
        {"optimizers": {"a": {**sgd, "params": {"match": "^0"}}, "b": sgd}},
    )
    chosen = {"_target_": f"{TORCH}.LambdaLR", "functions": {"a": "0.1", "b": "0.2"}}
    build_lr_schedule(chosen, over, TOTAL, PER_EPOCH)
    assert over.learning_rates() == {"a": 0.1, "b": 0.2}


def test_a_function_of_a_rule_is_for_all_its_layers_and_one_of_all_for_all() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    rule = {"match": ".*", "layer_decay": 0.5, "layers": [r"^(\d)"]}
    sgd = {"_target_": "torch.optim.SGD", "lr": 1.0, "param_groups": {"body": rule}}
    over = build_optimizers(model, sgd)
    assert over.learning_rates() == {"body.0": 0.5, "body.1": 1.0}
    target = {"_target_": f"{TORCH}.LambdaLR"}
    build_lr_schedule(target | {"functions": {"body": "0.1"}}, over, TOTAL, PER_EPOCH)
    assert over.learning_rates() == pytest.approx({"body.0": 0.05, "body.1": 0.1})
    over = build_optimizers(model, sgd)
    build_lr_schedule(target | {"functions": "0.2"}, over, TOTAL, PER_EPOCH)
    assert over.learning_rates() == pytest.approx({"body.0": 0.1, "body.1": 0.2})


def test_a_function_can_be_named_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_schedules.py").write_text("def halve(step):\n    return 0.5**step\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for function in (
        "my_schedules.halve",
        {"_target_": "my_schedules.halve", "_partial_": True},
    ):
        over = optimizers()
        chosen = {"_target_": f"{TORCH}.MultiplicativeLR", "functions": function}
        schedule = build_lr_schedule(chosen, over, TOTAL, PER_EPOCH)
        through_a_file(schedule.state_dict())
        rates = walk(over, schedule, 0, 4)
        assert [v[0] for v in rates] == pytest.approx([0.4, 0.2, 0.05, 0.00625])


def test_each_optimizer_can_bring_its_own_schedule() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    own = {"_target_": f"{TORCH}.StepLR", "step_size": 2, "gamma": 0.5}
    sgd = {"_target_": "torch.optim.SGD", "lr": 1.0, "momentum": 0.9}
    over = build_optimizers(
        model,
        {"optimizers": {"a": {**sgd, "params": {"match": "^0"}, "lr_scheduler": own}, "b": sgd}},
    )
    schedule = build_lr_schedule(node("linear"), over, 4, 2)
    rates = [values[::2] for values in walk(over, schedule, 0, 4)]
    assert rates == [[1.0, 1.0], [1.0, 0.75], [0.5, 0.5], [0.5, 0.25]]
    drawn = curve(schedule, over, 4)
    assert [lr for _, lr in drawn["a"]] == [1.0, 1.0, 0.5, 0.5]


def test_a_plain_scheduler_is_wrapped_as_it_is() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = StepLR(optimizer, 1, 0.5)
    schedule = LRSchedule.wrap(scheduler, interval="epoch")
    optimizer.step()
    schedule.after_update()
    assert optimizer.param_groups[0]["lr"] == 1.0
    schedule.after_epoch()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert LRSchedule.wrap(schedule) is schedule
    again = LRSchedule.wrap(StepLR(SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 1, 0.5), "epoch")
    again.load_state_dict(through_a_file(schedule.state_dict())[0], hyper_parameters=False)
    assert again.state_dict() == schedule.state_dict() | {"tracks": again.state_dict()["tracks"]}
    assert LRSchedule.wrap(None).monitors == ()


def test_a_plain_plateau_scheduler_needs_the_name_of_its_metric() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    plateau = ReduceLROnPlateau(optimizer, patience=0)
    with pytest.raises(ScheduleError, match='monitor="val/loss"'):
        LRSchedule.wrap(plateau)
    schedule = LRSchedule.wrap(plateau, monitor="val/loss")
    for metrics in ({"val/loss": 1.0}, {"train/epoch_loss": 0.0}, {"val/loss": 2.0}):
        schedule.after_validation(metrics)
    with pytest.raises(ScheduleError, match="val/loss: no such metric; there are: val/accuracy"):
        schedule.after_validation({"val/accuracy": 0.0})
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert schedule.monitors == ("val/loss",)


def test_a_warm_up_longer_than_the_run_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    chosen = node("cosine", "lr_scheduler.warmup.steps=50")
    over = optimizers()
    schedule = build_lr_schedule(chosen, over, TOTAL, PER_EPOCH)
    warn_of_long_warmups(schedule, TOTAL, PER_EPOCH)
    assert caplog.text.count("the warm-up takes 50 updates, the run ends at 48") == 1
    assert walk(over, schedule)[-1][0] < 0.4


def broken(name: str = "StepLR", **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{TORCH}.{name}", **arguments}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        pytest.param({"gamma": 1}, "lr_scheduler: has no _target_", id="no-target"),
        pytest.param(broken(step_size=1, interval="day"), "must be step or epoch", id="interval"),
        pytest.param(broken(step_size="a"), "lr_scheduler: the schedule cannot be", id="type"),
        pytest.param(
            broken(step_size=5, gamma=-1), "learning rate of 'first' -0.4 at 5", id="sign"
        ),
        pytest.param(broken("ExponentialLR", gamma=1e300), "cannot be computed", id="overflow"),
        pytest.param(broken(stepsize=1), "stepsize", id="argument"),
        pytest.param(broken(step_size=1.5), "between 0 and 1", id="fraction"),
        pytest.param(broken("MultiStepLR", milestones=["a"]), "neither a step", id="milestone"),
        pytest.param(
            broken(step_size=1, monitor="val/loss"),
            "StepLR does not monitor a metric",
            id="no-metric",
        ),
        pytest.param(
            broken("ReduceLROnPlateau"), "lr_scheduler.monitor: must be the metric", id="monitor"
        ),
        pytest.param(
            broken(step_size=1, warmup={"step": 3}),
            "lr_scheduler.warmup.step: unknown key",
            id="ramp",
        ),
        pytest.param(
            broken(step_size=1, warmup={"steps": 3, "epochs": 1}),
            "remove one of the two",
            id="both",
        ),
        pytest.param(broken(step_size=1, warmup=3), "warmup: must be a dict", id="ramp-type"),
        pytest.param(broken(step_size=1, warmup={"steps": 1.5}), "a number of updates", id="steps"),
        pytest.param(
            broken(step_size=1, warmup={"steps": -1}), "a number of updates", id="negative"
        ),
        pytest.param(
            broken(step_size=1, warmup={"steps": 1, "shape": "cosine"}), "warmup.shape", id="shape"
        ),
        pytest.param(
            broken(step_size=1, warmup={"steps": 1, "start_factor": 2}), "start_factor", id="start"
        ),
        pytest.param(
            broken("LambdaLR", functions={"heed": "1"}),
            "there is no parameter group of this name",
            id="group",
        ),
        pytest.param(
            broken("LambdaLR", functions={"first": "1"}), "none for group|no function", id="nobody"
        ),
        pytest.param(
            broken("LambdaLR", functions="lr * 2"), "functions.default: 'lr \\* 2': 'lr'", id="name"
        ),
        pytest.param(broken("LambdaLR", functions="1 - step"), "is negative", id="negative-factor"),
        pytest.param(broken("LambdaLR", functions="1 / step"), "has no value", id="no-value"),
        pytest.param(broken("LambdaLR", functions="os.getpid"), "not allowed", id="forbidden"),
        pytest.param(broken("LambdaLR", functions={"default": [1]}), "import path", id="function"),
        pytest.param(
            broken("SequentialLR", schedulers=[3], milestones=[]), "no _target_", id="part"
        ),
        pytest.param(
            broken(
                "SequentialLR",
                schedulers=[broken(step_size=1, interval="epoch")],
                milestones=[],
            ),
            r"schedulers.0.interval: must be set in lr_scheduler",
            id="inner-interval",
        ),
        pytest.param(
            broken("SequentialLR", schedulers=[broken(step_size=1)], milestones=[3, 4]),
            "milestone",
            id="milestones",
        ),
        pytest.param(
            broken("ChainedScheduler", schedulers=[broken("ReduceLROnPlateau")]),
            "ReduceLROnPlateau",
            id="chained-plateau",
        ),
    ],
)
def test_a_schedule_that_cannot_be_built_is_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises((ScheduleError, TargetError), match=message) as caught:
        build_lr_schedule(chosen, optimizers(), TOTAL, PER_EPOCH)
    assert getattr(caught.value, "exit_code", None) == 2


def test_a_run_without_a_length_has_no_horizon() -> None:
    with pytest.raises(
        ScheduleError, match=r"lr_scheduler.T_max: depends on the length.*max_epochs"
    ):
        build_lr_schedule(node("cosine"), optimizers(), None, None)
    with pytest.raises(ScheduleError, match="milestones: depends on the length of the run"):
        build_lr_schedule(node("multi_step"), optimizers(), None, None)
    warm = broken(step_size=1, warmup={"epochs": 1})
    with pytest.raises(ScheduleError, match="the length of an epoch is not known"):
        build_lr_schedule(warm, optimizers(), None, None)
    schedule = build_lr_schedule(broken(step_size=1), optimizers(), None, None)
    assert schedule.tracks["optimizer"].scheduler.step_size == 1
