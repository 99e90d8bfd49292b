"""The metric that is monitored, and the run that it ends."""

import math
from types import SimpleNamespace

import pytest

from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.early_stopping import EarlyStopping
from regimen.callbacks.support import CallbackError, Monitor
from regimen.conf.errors import ConfigError
from regimen.trainer.state import TrainState
from regimen.trainer.task import Task
from regimen.trainer.tasks.gan import GAN

NAN = math.nan
INF = math.inf


@pytest.mark.parametrize("callback", [Checkpoint(), EarlyStopping(patience=1)])
def test_unknown_direction_is_asked_for_where_values_are_compared(make_trainer, tmp_path, callback):
    with pytest.raises(CallbackError, match="choose min, max or auto"):
        Monitor("val/loss", "smallest")

    EarlyStopping("val/wobble").check_task(Task(), ["val"])  # nothing is compared
    with pytest.raises(CallbackError, match="is a larger val/wobble better"):
        EarlyStopping("val/wobble", patience=1).check_task(Task(), ["val"])

    trainer = make_trainer({"mine": callback}, tmp_path)
    trainer.task.monitor = lambda: "wobble"
    with pytest.raises(CallbackError, match=r"^callbacks.mine: mode=auto: is a larger val/wobble"):
        trainer.setup()


@pytest.mark.parametrize(
    ("given", "mode", "metrics", "chosen", "rises"),
    [
        pytest.param("val/loss", "auto", [], "val/loss", False, id="loss"),
        pytest.param("val/loss_ce", "auto", [], "val/loss_ce", False, id="loss term"),
        pytest.param("val/acc_top5", "auto", [], "val/acc_top5", True, id="top-5 accuracy"),
        pytest.param("val/f1", "max", [], "val/f1", True, id="stated"),
        pytest.param("val/acc", "min", [], "val/acc", False, id="stated against the name"),
        pytest.param("val/dice_loss", "auto", [], "val/dice_loss", False, id="the last word"),
        pytest.param("val/loss_dice", "auto", [], "val/loss_dice", False, id="term of the loss"),
        pytest.param("val/map/error_rate", "auto", [], "val/map/error_rate", False, id="set: map"),
        pytest.param("val/loss/top1_acc", "auto", [], "val/loss/top1_acc", True, id="set: loss"),
        pytest.param("train/acc", "auto", [], "train/epoch_acc", True, id="of an epoch"),
        pytest.param("auto", "auto", ["loss", "acc", "accuracy"], "val/accuracy", True, id="task"),
        pytest.param("auto", "auto", ["loss"], "val/loss", False, id="without accuracy"),
        pytest.param("auto", "auto", None, None, True, id="none: a GAN"),
    ],
)
def test_the_metric_is_the_one_given_or_the_tasks_and_rises_by_mode_or_name(
    given, mode, metrics, chosen, rises
):
    task = GAN() if metrics is None else Task()
    task.metric_names = lambda: metrics
    monitor = Monitor(given, mode)
    monitor.resolve(task, [])

    assert monitor.name == chosen
    assert monitor.on_validation == (chosen or "").startswith("val/")
    assert monitor.better(2.0, 1.0) == rises
    assert monitor.better(1.0, 2.0) == (not rises)


class Scored(Task):
    """Says which values of its own metrics are better; of one the metric says it itself."""

    def __init__(self):
        self.own = {"distance": SimpleNamespace(higher_is_better=False)}

    def metric_names(self):
        return ["loss", "fid", "auc", "distance"]

    def metrics(self):
        return self.own

    def modes(self):
        return {
            **super().modes(),
            "fid": "min",
            "auc": "min",
        }


@pytest.mark.parametrize("name", ["val/fid", "val/auc/fid", "train/fid", "val/auc", "val/distance"])
def test_a_task_says_which_values_of_its_own_metrics_are_better(name):
    for mode, rises in (("auto", False), ("max", True)):
        monitor = Monitor(name, mode)
        monitor.resolve(Scored(), ["val"])
        assert monitor.better(2.0, 1.0) is rises
    nonsense = Monitor("val/fid")
    with pytest.raises(CallbackError, match=r"modes\(\) say 'down': choose min or max"):
        nonsense.find_direction({"fid": "down"})


def test_the_best_of_a_loss_whose_name_holds_the_word_of_an_accuracy_is_the_least():
    monitor = Monitor("val/dice_loss")
    monitor.resolve(Task(), ["val"])
    values = {
        1: 0.9,
        2: 0.5,
        3: 0.2,
        4: 0.6,
    }
    assert monitor.best_first(values)[0] == (3, 0.2)


def run(callback, values, first_epoch=1):
    """Return the epoch in which the callback stops a run whose validations give these values."""
    sets = {"val": object()}
    trainer = SimpleNamespace(state=TrainState(), metrics={}, val_loaders=sets, task=Task())
    callback.setup(trainer)
    for epoch, value in enumerate(values, first_epoch):
        trainer.state.epoch = epoch
        trainer.state.global_step = trainer.state.validated_at = 10 * epoch
        trainer.metrics["val/loss"] = value
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
        pytest.param({"patience": 2, "min_delta": 0.5}, [3, 2.4, 1.8], None, id="over min_delta"),
        pytest.param({"patience": 1, "min_epochs": 4}, [1, 2, 2, 2, 2], 4, id="min_epochs"),
        pytest.param({"patience": 9}, [1, NAN, 1], 2, id="nan"),
        pytest.param({"patience": None}, [1, INF], 2, id="inf, patience off"),
        pytest.param({"patience": 3, "check_finite": False}, [2, NAN, NAN, 1], None, id="let be"),
        pytest.param({"patience": 2, "check_finite": False}, [NAN, NAN, 1], 2, id="only nan"),
    ],
)
def test_verdict(options, values, stops):
    assert run(EarlyStopping("val/loss", **{"mode": "min", **options}), values) == stops


def resumed(callback, epoch, branched=False):
    """Return the stop that a callback with this one's state asks for as a run resumes."""
    fresh = EarlyStopping("val/loss", patience=callback.patience, min_epochs=callback.min_epochs)
    fresh.load_state_dict(callback.state_dict())
    trainer = SimpleNamespace(state=TrainState(epoch=epoch), metrics={}, branched=branched)
    fresh.on_fit_start(trainer)
    return str(trainer.state.stop_request)


def test_a_saved_verdict_is_carried_out_by_the_next_run_between_validations_none_is():
    patient = EarlyStopping("val/loss", patience=2)
    finite = EarlyStopping("val/loss")
    assert run(patient, [1.0, 1.0, 1.0]) == 3
    assert "val/loss has not improved in 2 validations (best 1)" in resumed(patient, epoch=3)
    assert run(finite, [1.0, NAN]) == 2
    assert "val/loss is nan" in resumed(finite, epoch=2)
    assert resumed(finite, epoch=2, branched=True) == "None"  # a smaller rate may mend it

    # After `min_epochs` the run goes on to the next validation, which may be better.
    waits = EarlyStopping("val/loss", patience=1, min_epochs=3)
    assert run(waits, [1.0, 1.0]) is None
    assert resumed(waits, epoch=3) == "None"
    assert run(waits, [0.5, 0.6], first_epoch=3) == 4


def test_a_training_metric_is_looked_at_once_an_epoch(make_trainer):
    callback = EarlyStopping("train/loss", "max", patience=2)  # it falls: never better
    trainer = make_trainer({"stop": callback}, max_epochs=9, validated=False)
    trainer.fit()

    assert trainer.state.epoch == 3
    assert callback.waited == 2
    assert "has not improved in 2 epochs (best" in str(trainer.state.stop_reason)

    callback.on_boundary(trainer)  # as by a run that resumes at this boundary
    assert callback.waited == 2


@pytest.mark.parametrize(
    ("monitor", "validated", "message"),
    [
        ("auto", False, r"callbacks\.stop\.monitor=val/accuracy: there is no val"),
        ("val/f1", True, r"no such metric; there are: .*val/accuracy, val/loss.*metric_names"),
    ],
)
def test_a_metric_that_is_not_there(make_trainer, monitor, validated, message):
    trainer = make_trainer({"stop": EarlyStopping(monitor, patience=2)}, validated=validated)
    with pytest.raises(ConfigError, match=message):
        trainer.fit()
    assert trainer.state.updates == 0
    make_trainer({"stop": EarlyStopping()}, validated=False).fit()  # off by default
