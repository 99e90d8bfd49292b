import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from callbacks.early_stopping import EarlyStopping
from callbacks.support import CallbackError
from trainer.state import TrainState

NAN, INF = math.nan, math.inf


def run(callback: EarlyStopping, values: list[float], first_epoch: int = 1) -> int | None:
    """Return the epoch in which the callback stops a run whose validations give these values."""
    trainer: Any = SimpleNamespace(state=TrainState(), metrics={}, val_loader=object())
    callback.setup(trainer)
    for epoch, value in enumerate(values, first_epoch):
        trainer.state.epoch, trainer.state.global_step = epoch, 10 * epoch
        trainer.metrics["val/loss"] = value
        callback.on_validation_end(trainer, {"val/loss": value})
        callback.on_boundary(trainer)
        if trainer.state.stop_request:
            return epoch
    return None


@pytest.mark.parametrize(
    ("options", "values", "stops"),
    [
        pytest.param({"patience": 2}, [3, 2, 1, 1, 1], 5, id="equal is no improvement"),
        pytest.param({"patience": 2}, [3, 2, 2.5, 1, 2, 2], 6, id="a better one starts anew"),
        pytest.param({"patience": 1}, [1, 1], 2, id="patience 1"),
        pytest.param({"patience": None}, [1] * 50, None, id="off"),
        pytest.param({"patience": 2, "mode": "max"}, [1, 2, 3, 2, 2], 5, id="max"),
        pytest.param({"patience": 2, "min_delta": 0.5}, [3, 2.75, 2.5, 2.25], 3, id="min_delta"),
        pytest.param(
            {"patience": 2, "min_delta": 0.5}, [3, 2.4, 1.8, 1.2], None, id="over min_delta"
        ),
        pytest.param({"patience": 1, "min_epochs": 4}, [1, 2, 2, 2, 2], 4, id="min_epochs"),
        pytest.param({"patience": 9}, [1, NAN, 1], 2, id="nan"),
        pytest.param({"patience": None}, [1, INF], 2, id="inf, patience off"),
        pytest.param(
            {"patience": 3, "check_finite": False}, [2, NAN, NAN, 1, NAN], None, id="nan let be"
        ),
        pytest.param({"patience": 2, "check_finite": False}, [NAN, NAN, 1], 2, id="only nan"),
    ],
)
def test_verdict(options: dict[str, Any], values: list[float], stops: int | None) -> None:
    assert run(EarlyStopping("val/loss", **{"mode": "min", **options}), values) == stops


def test_verdict_that_was_saved_is_carried_out_by_the_next_run() -> None:
    first, second = (EarlyStopping("val/loss", patience=2) for _ in range(2))
    assert run(first, [1.0, 1.0, 1.0]) == 3
    second.load_state_dict(first.state_dict())
    assert "val/loss has not improved in 2 validations (best 1)" in resumed(second, epoch=3)


def resumed(callback: EarlyStopping, epoch: int, branched: bool = False) -> str:
    """Return the stop that the callback asks for at the start of a resumed run."""
    trainer: Any = SimpleNamespace(state=TrainState(epoch=epoch), metrics={}, branched=branched)
    callback.on_fit_start(trainer)
    return str(trainer.state.stop_request)


def test_a_value_that_is_not_finite_ends_the_resumed_run_too() -> None:
    first, second = (EarlyStopping("val/loss") for _ in range(2))
    assert run(first, [1.0, NAN]) == 2
    second.load_state_dict(first.state_dict())
    assert "val/loss is nan" in resumed(second, epoch=2)
    assert resumed(second, epoch=2, branched=True) == "None"  # a smaller rate may mend it


def test_a_resume_between_two_validations_stops_no_run() -> None:
    """After `min_epochs` the run goes on to the next validation, which may be better."""
    first, second = (EarlyStopping("val/loss", patience=1, min_epochs=3) for _ in range(2))
    assert run(first, [1.0, 1.0]) is None
    second.load_state_dict(first.state_dict())
    assert resumed(second, epoch=3) == "None"
    assert run(second, [0.5, 0.6], first_epoch=3) == 4


def test_a_training_metric_is_looked_at_once_an_epoch(make_trainer: Any) -> None:
    callback = EarlyStopping("train/loss", "max", patience=2)  # it falls: never better
    trainer = make_trainer({"stop": callback}, max_epochs=9, validated=False)
    trainer.fit()
    assert (trainer.state.epoch, callback.waited) == (3, 2)
    assert "has not improved in 2 epochs (best" in str(trainer.state.stop_reason)
    callback.on_boundary(trainer)  # as by a run that resumes at this boundary
    assert callback.waited == 2


def test_stops_the_real_trainer_and_says_why(make_trainer: Any, tmp_path: Path) -> None:
    callback = EarlyStopping(patience=2, mode="min")  # of a rising accuracy
    trainer = make_trainer({"stop": callback}, max_epochs=9)
    trainer.fit()
    assert callback.monitor == "val/accuracy"
    assert "val/accuracy" in str(trainer.state.stop_reason)
    assert trainer.state.epoch < 9


def test_no_validation_set(make_trainer: Any) -> None:
    trainer = make_trainer({"stop": EarlyStopping(patience=2)}, validated=False)
    with pytest.raises(
        CallbackError, match=r"callbacks\.stop\.monitor=val/accuracy: there is no val"
    ):
        trainer.fit()
    make_trainer({"stop": EarlyStopping()}, validated=False).fit()  # off by default


def test_wrong_metric_lists_those_that_exist(make_trainer: Any) -> None:
    trainer = make_trainer({"stop": EarlyStopping("val/f1", patience=2)})
    with pytest.raises(CallbackError, match=r"no such metric; there are: .*val/accuracy, val/loss"):
        trainer.fit()
