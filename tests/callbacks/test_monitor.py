import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from callbacks.checkpoint import Checkpoint
from callbacks.early_stopping import EarlyStopping
from callbacks.support import CallbackError, Monitor
from trainer.task import Task
from trainer.tasks.gan import GAN


@pytest.mark.parametrize(
    ("name", "mode", "higher_is_better"),
    [
        pytest.param("val/loss", "auto", False, id="loss"),
        pytest.param("val/loss_ce", "auto", False, id="loss term"),
        pytest.param("val/accuracy_top5", "auto", True, id="top-5 accuracy"),
        pytest.param("val/f1", "max", True, id="stated"),
        pytest.param("val/accuracy", "min", False, id="stated against the name"),
    ],
)
def test_mode(name: str, mode: str, higher_is_better: bool) -> None:
    monitor = Monitor(name, mode)
    assert monitor.better(2.0, 1.0) == higher_is_better
    assert monitor.better(1.0, 2.0) != higher_is_better


def test_unknown_direction_is_asked_for() -> None:
    with pytest.raises(CallbackError, match="is a larger val/wobble better"):
        Monitor("val/wobble")
    with pytest.raises(CallbackError, match="choose min, max or auto"):
        Monitor("val/loss", "smallest")


def test_what_compares_nothing_does_not_ask() -> None:
    assert EarlyStopping("val/wobble").monitor == "val/wobble"
    with pytest.raises(CallbackError, match="wobble"):
        EarlyStopping("val/wobble", patience=1)


@pytest.mark.parametrize("callback", [Checkpoint(), EarlyStopping(patience=1)])
def test_a_direction_that_is_asked_for_later_names_the_callback(
    make_trainer: Any, tmp_path: Path, callback: Any
) -> None:
    trainer = make_trainer({"mine": callback}, tmp_path)
    trainer.task.monitor = lambda: "wobble"
    with pytest.raises(CallbackError, match=r"^callbacks.mine: mode=auto: is a larger val/wobble"):
        trainer.setup()


@pytest.mark.parametrize(
    ("metrics", "mode", "chosen", "rising"),
    [
        pytest.param(["loss", "accuracy"], "auto", "val/accuracy", True, id="classification"),
        pytest.param(["loss"], "auto", "val/loss", False, id="without accuracy"),
    ],
)
def test_auto_takes_the_tasks_metric(
    metrics: list[str], mode: str, chosen: str, rising: bool
) -> None:
    task = Task()
    task.metric_names = lambda: metrics  # type: ignore[method-assign]
    trainer: Any = SimpleNamespace(task=task)
    monitor = Monitor("auto", mode)
    monitor.resolve(trainer)
    assert monitor.name == chosen
    assert monitor.better(2.0, 1.0) == rising


def test_a_task_may_have_no_metric() -> None:
    trainer: Any = SimpleNamespace(task=GAN())
    monitor = Monitor("auto")
    monitor.resolve(trainer)
    assert monitor.name is None
    assert not monitor.on_validation


def test_nan_is_never_better_and_an_improvement_must_exceed_min_delta() -> None:
    monitor = Monitor("val/loss")
    assert not monitor.better(math.nan, None)
    assert monitor.better(5.0, None)
    assert not monitor.better(0.9, 1.0, min_delta=0.25)
    assert monitor.better(0.5, 1.0, min_delta=0.25)
    assert not monitor.better(0.75, 1.0, min_delta=0.25)


def test_missing_metric_lists_those_that_exist() -> None:
    with pytest.raises(
        CallbackError, match="val/loss: no such metric; there are: train/loss, val/f1"
    ):
        Monitor("val/loss").value({"val/f1": 1.0, "train/loss": 2.0})
