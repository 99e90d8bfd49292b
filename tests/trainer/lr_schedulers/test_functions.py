"""Functions of the step, schedules of single optimizers, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from regimen.conf.errors import ConfigError
from regimen.trainer.lr_schedulers.build import build_lr_schedule
from regimen.trainer.lr_schedulers.functions import MAX_LENGTH, expression
from regimen.trainer.lr_schedulers.schedule import LRSchedule, curve
from regimen.trainer.optimizers.optimizers import build_optimizers
from schedules_by_hand import (
    PER_EPOCH,
    TORCH,
    TOTAL,
    node,
    optimizers,
    scheduled,
    walk,
)
from toys import through_a_file

VALUES = {"step": 7.0, "epoch": 2.0, "total_steps": 10.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1.0),
        (" 1 - step / total_steps ", 0.3),
        ("0.5 * (1 + cos(pi * step / total_steps))", 0.5 * (1 + math.cos(math.pi * 7 / 10))),
        ("-step + +epoch", -5.0),
        ("step // 2 + step % 4", 6.0),
        ("2 ** -epoch", 0.25),
        ("1 if step < 5 else 0.1", 0.1),
        ("step >= 7 and epoch != 3", 1.0),
        ("not (step == 7 or epoch > 9)", 0.0),
        ("min(step, 3, epoch) + max(1, 2) + abs(-4)", 8.0),
        ("floor(2.7) + ceil(2.2) + sqrt(4) + log(e) + log(8, 2)", 11.0),
        ("exp(0) + tanh(0) + sin(0) + pow(2, 3)", 9.0),
        ("True + 1e-3", 1.001),
        ("+".join(["1"] * 25), 25.0),
    ],
)
def test_an_expression_is_what_python_makes_of_it(text: str, expected: float) -> None:
    value = expression(text, lambda step: VALUES, "key")(7)
    assert value == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["", "1 +", "step; step", "\0"], "not a valid expression"),
        (["lr * 2"], "'lr' is not allowed.* numbers, step, epoch"),
        (["__import__('os').system('true')", "step.__class__", "(lambda: 1)()"], "not allowed"),
        (["[1][0]", "'a' * 3", "1j", "None", "[x for x in (1)]", "(y := 1)"], "not allowed"),
        (["f'{step}'", "1 < step < 9", "step @ step", "1 << 9999"], "not allowed"),
        (["max(1, *step)", "min(step, key=1)"], "not allowed"),
        (["eval(1)"], "eval.* not allowed.* cos"),
        (["cos(1, 2)", "min(1)", "max()"], "has no value .*argument|iterable"),
        (["9" * 400], "too large"),
        (["-" * 200 + "1"], "nested more than"),
        (["1" + "+1" * MAX_LENGTH], "more than 500 characters"),
        (["1 / (step - 7)", "log(0)"], "has no value at step = 7"),
        (["9 ** 9 ** 9 ** 9", "(-8) ** 0.5"], "has no value"),
        (["1e308 * 10"], "is inf"),
        (["1e308 * 10 - 1e308 * 10"], "is nan"),
    ],
)
def test_anything_else_is_refused(texts: list[str], message: str) -> None:
    for text in texts:
        with pytest.raises(ConfigError, match=f"^key: .*{message}"):
            expression(text, lambda step: VALUES, "key")(7)


@pytest.mark.parametrize(
    ("functions", "rates"),
    [
        ({"a": "0.1", "b": "0.2 ** epoch"}, {"a.body.0": 0.05, "a.body.1": 0.1, "b": 0.2}),
        (
            {"a.body": "0.1", "a.body.1": "1 - step / total_steps", "default": 1},
            {"a.body.0": 0.05, "a.body.1": 0.875, "b": 1.0},
        ),
        ("0.2", {"a.body.0": 0.1, "a.body.1": 0.2, "b": 0.2}),
    ],
)
def test_a_function_is_for_the_groups_of_the_longest_name_that_fits(
    functions: Any, rates: dict[str, float]
) -> None:
    rule = {"match": "^[01]", "layer_decay": 0.5, "layers": [r"^(0|1)"]}
    sgd = {"_target_": "torch.optim.SGD", "lr": 1.0}
    with_rule = sgd | {"param_groups": {"body": rule}}
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    over = build_optimizers(model, {"optimizers": {"a": with_rule, "b": sgd}})
    chosen = {"_target_": f"{TORCH}.LambdaLR", "functions": functions}
    schedule = build_lr_schedule(chosen, over, TOTAL, PER_EPOCH)
    walk(over, schedule, 0, PER_EPOCH)

    assert over.learning_rates() == pytest.approx(rates)


def test_a_function_can_be_named_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_schedules.py").write_text("def halve(step):\n    return 0.5**step\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    chosen = {"_target_": f"{TORCH}.MultiplicativeLR", "functions": "my_schedules.halve"}
    over, schedule = scheduled(chosen)
    through_a_file(schedule.state_dict())
    rates = walk(over, schedule, 0, 4)

    assert [v[0] for v in rates] == pytest.approx([0.4, 0.2, 0.05, 0.00625])


def test_each_optimizer_can_bring_its_own_schedule() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    sgd = {"_target_": "torch.optim.SGD", "lr": 1.0, "momentum": 0.9}
    with_own = {
        **sgd,
        "params": {"match": "^0"},
        "lr_scheduler": {"_target_": f"{TORCH}.StepLR", "step_size": 2, "gamma": 0.5},
    }
    over = build_optimizers(model, {"optimizers": {"a": with_own, "b": sgd}})
    schedule = build_lr_schedule(node("linear"), over, 4, 2)
    drawn = curve(schedule, over, 4)
    rates = [values[::2] for values in walk(over, schedule, 0, 4)]  # without the momentum

    assert rates == [[1.0, 1.0], [1.0, 0.75], [0.5, 0.5], [0.5, 0.25]]
    assert [lr for _, lr in drawn["a"]] == [1.0, 1.0, 0.5, 0.5]


def halved() -> tuple[SGD, StepLR]:
    """Return a plain optimizer, and a scheduler that halves its rate."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, StepLR(optimizer, 1, 0.5)


def test_a_plain_scheduler_is_wrapped_as_it_is() -> None:
    optimizer, scheduler = halved()
    (group,) = optimizer.param_groups
    schedule = LRSchedule.wrap(scheduler, interval="epoch")
    optimizer.step()
    schedule.after_update()

    assert group["lr"] == 1.0

    schedule.after_epoch()
    assert group["lr"] == 0.5
    assert LRSchedule.wrap(schedule) is schedule


def test_the_place_of_a_plain_scheduler_is_saved_without_its_hyper_parameters() -> None:
    _, scheduler = halved()
    schedule = LRSchedule.wrap(scheduler, interval="epoch")
    schedule.after_update()
    schedule.after_epoch()
    saved = schedule.state_dict()

    _, other = halved()
    again = LRSchedule.wrap(other, "epoch")
    again.load_state_dict(through_a_file(saved), hyper_parameters=False)

    state = again.state_dict()
    del saved["tracks"]
    del state["tracks"]

    assert state == saved


def test_a_plain_plateau_scheduler_needs_the_name_of_its_metric() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    (group,) = optimizer.param_groups
    plateau = ReduceLROnPlateau(optimizer, patience=0)

    with pytest.raises(ConfigError, match='monitor="val/loss"'):
        LRSchedule.wrap(plateau)

    schedule = LRSchedule.wrap(plateau, monitor="val/loss")
    schedule.after_validation({"val/loss": 1.0})
    schedule.after_validation({"train/epoch_loss": 0.0})
    schedule.after_validation({"val/loss": 2.0})

    with pytest.raises(ConfigError, match="val/loss: no such metric; there are: val/accuracy"):
        schedule.after_validation({"val/accuracy": 0.0})
    assert group["lr"] == 0.1


def broken(name: str = "StepLR", **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{TORCH}.{name}", **arguments}


def sequence(*schedulers: Any, milestones: Any = ()) -> dict[str, Any]:
    return broken("SequentialLR", schedulers=[*schedulers], milestones=[*milestones])


STEP = broken(step_size=1)
PLATEAU = broken("ReduceLROnPlateau")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"gamma": 1}, "lr_scheduler: has no _target_"),
        (STEP | {"interval": "day"}, "must be step or epoch"),
        (broken(step_size="a"), "lr_scheduler.step_size: expected int"),
        (broken(step_size=5, gamma=-1), "learning rate of 'first' -0.4 at 5"),
        (broken("ExponentialLR", gamma=1e300), "learning rate of 'first' inf at 2"),
        (broken(stepsize=1), "stepsize"),
        (broken(step_size=1.5), "between 0 and 1"),
        (broken("MultiStepLR", milestones=["a"]), "neither a step"),
        (STEP | {"monitor": "val/loss"}, "StepLR does not monitor a metric"),
        (PLATEAU, "lr_scheduler.monitor: must be the metric"),
        (STEP | {"warmup": {"step": 3}}, "lr_scheduler.warmup.step: unknown key"),
        (STEP | {"warmup": {"steps": 3, "epochs": 1}}, "remove one of the two"),
        (STEP | {"warmup": 3}, "warmup: must be a dict"),
        (STEP | {"warmup": {"steps": 1.5}}, "a number of updates"),
        (STEP | {"warmup": {"steps": -1}}, "a number of updates"),
        (STEP | {"warmup": {"epochs": -1}}, "a number of epochs"),
        (STEP | {"warmup": {"steps": 1, "shape": "cosine"}}, "warmup.shape"),
        (STEP | {"warmup": {"steps": 1, "start_factor": 2}}, "start_factor"),
        (STEP | {"warmup": {"start_factor": 0, "shape": "exponential"}}, "above 0"),
        (
            broken("LambdaLR", functions={"heed": "1"}),
            "there is no parameter group of this name",
        ),
        (broken("LambdaLR", functions={"first": "1"}), "no function for group 'default'"),
        (broken("LambdaLR", functions="lr * 2"), "functions.default: 'lr \\* 2'.*'lr'"),
        (broken("LambdaLR", functions="1 - step"), "learning rate of 'first' -0.4 at 2"),
        (broken("LambdaLR", functions="1 / step"), "has no value"),
        (broken("LambdaLR", functions="os.getpid"), "not allowed"),
        (broken("LambdaLR", functions={"default": [1]}), "import path"),
        (sequence(3), "no _target_"),
        (sequence(STEP | {"interval": "epoch"}), "schedulers.0.interval: .*no argument"),
        (sequence(STEP, milestones=[3, 4]), "milestone"),
        (sequence(STEP, STEP, STEP, milestones=[4, 3]), "milestones: must rise"),
        (sequence(STEP) | {"milestones": 5}, r"milestones: .* not 5; such as \[5\]"),
        (sequence(STEP) | {"milestones": {"a": 5}}, "milestones: must be a list"),
        (sequence(sequence(STEP) | {"milestones": 0.5}), "schedulers.0.milestones: .* 0.5"),
        (broken("MultiStepLR", milestones=5), "milestones: must be a list"),
        (broken("ChainedScheduler", schedulers=7), "schedulers: must be a list or a dict"),
        (broken("ChainedScheduler", schedulers=[PLATEAU]), "ReduceLROnPlateau"),
    ],
)
def test_a_schedule_that_cannot_be_built_is_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_lr_schedule(chosen, optimizers(), TOTAL, PER_EPOCH)
    assert getattr(caught.value, "exit_code", None) == 2


def test_a_run_without_a_length_has_no_horizon() -> None:
    warm = broken(step_size=1, warmup={"epochs": 1})
    for chosen, message in (
        (node("cosine"), r"lr_scheduler.T_max: depends on the length.*max_epochs"),
        (node("multi_step"), "milestones: depends on the length of the run"),
        (warm, "the length of an epoch is not known"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_lr_schedule(chosen, optimizers(), None, None)
    schedule = build_lr_schedule(broken(step_size=1), optimizers(), None, None)
    assert schedule.schedules["optimizer"].scheduler.step_size == 1


@pytest.mark.parametrize("updates", [100, 10**6])
def test_a_cycle_that_ends_before_the_run_is_refused(updates: int) -> None:
    chosen = broken("OneCycleLR", max_lr=0.1, total_steps=updates - 1)
    for whole in (chosen, broken("ChainedScheduler", schedulers=[chosen])):
        with pytest.raises(ConfigError, match=r"the run has .* updates.*total_steps"):
            build_lr_schedule(whole, optimizers(), updates, 10)
        build_lr_schedule(whole, optimizers(), updates, 10, guessed=True)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"warmup": {"steps": 12}}, "the run has 48 updates for it"),
        ({"warmup": {"epochs": 2}, "interval": "epoch"}, "the run has 8 epochs for it"),
    ],
)
def test_what_is_left_for_a_cycle_is_told_in_its_own_steps(more: Any, told: str) -> None:
    chosen = broken("OneCycleLR", max_lr=0.1, total_steps=5)
    with pytest.raises(ConfigError, match=told):
        build_lr_schedule(chosen | more, optimizers(), 60, 6)
