"""Tests of the callbacks as a set: what they read, what a resume leaves, their YAML."""

import pytest

from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.early_stopping import EarlyStopping
from regimen.callbacks.ema import EMA
from regimen.callbacks.lr_finder import LRFinder
from regimen.callbacks.lr_monitor import LRMonitor
from regimen.callbacks.memory import Memory
from regimen.callbacks.model_summary import ModelSummary
from regimen.callbacks.pictures.classes import PRCurves
from regimen.callbacks.pictures.generated import GeneratedText
from regimen.callbacks.pictures.layers import LayerStatistics
from regimen.callbacks.pictures.masks import Masks
from regimen.callbacks.pictures.samples import Misclassified, TrainingSamples
from regimen.callbacks.progress import Progress
from regimen.callbacks.support import CallbackError
from regimen.callbacks.swa import SWA
from regimen.callbacks.tensorboard import TensorBoard
from regimen.callbacks.throughput import Throughput
from regimen.callbacks.trackers.recorder import MetricsLog
from regimen.callbacks.unfreeze import Unfreeze
from regimen.trainer.callback import Callback
from same_run import differences
from toys import StopAt


def everything():
    return {
        "metrics_log": MetricsLog(),
        "progress": Progress(),
        "tensorboard": TensorBoard(),
        "lr_monitor": LRMonitor(),
        "throughput": Throughput(),
        "memory": Memory(),
        "model_summary": ModelSummary(),
        "early_stopping": EarlyStopping(patience=2, mode="min"),
        "unfreeze": Unfreeze({"first": {"pattern": "0.*", "step": 7}}),
        "ema": EMA(0.9),
        "swa": SWA(1, use_for_evaluation=False),
        "layers": LayerStatistics(3),  # logged at step 4, 6, 10, ...
        "checkpoint": Checkpoint(every_n_steps=3, save_top_k=2, mode="min"),
    }


class StopInValidation(Callback):
    """End a run as a signal would that comes while it validates."""

    def on_validation_start(self, trainer):
        if trainer.state.global_step == 10:
            trainer.state.request_stop("SIGTERM", 143)


@pytest.mark.parametrize("cuts", [[3], [5], [10], [12], [4, 7, 11], ["validation"]], ids=str)
def test_resumed_as_if_never_interrupted(make_trainer, tmp_path, carry_over, cuts):
    whole = make_trainer(everything(), tmp_path / "whole", max_epochs=6)
    whole.fit()
    assert "has not improved" in str(whole.state.stop_reason)
    trainer = None
    for cut in [*cuts, None]:
        stop = StopInValidation() if cut == "validation" else StopAt(cut)
        following = make_trainer({**everything(), "stop": stop}, tmp_path / "cut", max_epochs=6)
        if trainer is not None:
            carry_over(trainer, following)
        trainer = following
        trainer.fit()
        if cut == "validation":
            assert (trainer.state.global_step, trainer.state.validated_at) == (10, 5)
    assert differences(tmp_path / "cut", tmp_path / "whole") == []
    assert trainer.state.stop_reason == whole.state.stop_reason  # early stopping had its way


@pytest.mark.parametrize(
    "lost", ["early_stopping", "checkpoint", "tensorboard", "metrics_log", "ema"]
)
def test_each_state_is_needed_for_that(make_trainer, tmp_path, carry_over, lost):
    whole = make_trainer(everything(), tmp_path / "whole", max_epochs=6)
    first = make_trainer({**everything(), "stop": StopAt(12)}, tmp_path / "cut", max_epochs=6)
    second = make_trainer(everything(), tmp_path / "cut", max_epochs=6)
    whole.fit()
    first.fit()
    first.callbacks[lost].state_dict = dict
    carry_over(first, second)
    second.fit()
    assert differences(tmp_path / "cut", tmp_path / "whole") != []


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, id=f"{kind.__name__} {options}")
        for kind, *choices in (
            (EMA, {"decay": 1.0}, {"decay": -0.1}, {"update_every": 0}),
            (Checkpoint, {"every_n_steps": 0}, {"every_n_epochs": -1}, {"save_top_k": -2}),
            (Checkpoint, {"mode": "best"}),
            (EarlyStopping, {"patience": 0}, {"min_delta": -1.0}, {"min_delta": float("nan")}),
            (Throughput, {"hint_share": 1.5}),
            (Progress, {"every_seconds": 0}),
            (LRFinder, {"min_lr": 1.0, "max_lr": 0.1}, {"updates": 1}),
            (LayerStatistics, {"every_n_steps": 0}),
            (TrainingSamples, {"count": 0}),
            (Misclassified, {"every_n_validations": 0}),
            (PRCurves, {"thresholds": 1}),
            (GeneratedText, {"temperature": 0}),
            (Masks, {"count": 0}),
        )
        for options in choices
    ],
)
def test_options_out_of_range(kind, options):
    with pytest.raises(CallbackError):
        kind(**options)
