"""Tests of the callbacks as a set: what they read, what a resume leaves, their YAML."""

from pathlib import Path

import pytest
import torch
import yaml

from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.early_stopping import EarlyStopping
from regimen.callbacks.ema import EMA
from regimen.callbacks.lr_finder import LRFinder
from regimen.callbacks.pictures.classes import ConfusionMatrix, PRCurves
from regimen.callbacks.pictures.generated import GeneratedText
from regimen.callbacks.pictures.layers import LayerStatistics
from regimen.callbacks.pictures.masks import Masks
from regimen.callbacks.pictures.samples import Misclassified, TrainingSamples
from regimen.callbacks.profiler import Profiler
from regimen.callbacks.progress import Progress
from regimen.callbacks.support import CallbackError
from regimen.callbacks.swa import SWA
from regimen.callbacks.throughput import Throughput
from regimen.callbacks.trackers.recorder import MetricsLog
from regimen.scripts.composition.overrides import trains_the_same
from regimen.trainer.callback import Callback
from regimen.trainer.runs.status import read_metrics
from regimen.trainer.targets.allow_list import locate
from same_run import differences
from toys import StopAt

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "callbacks"


# Where the defaults would do nothing in a short run, or are no complete configuration.
OPTIONS = {
    "early_stopping": {"patience": 2, "mode": "min"},
    "unfreeze": {"stages": {"first": {"pattern": "0.*", "step": 7}}},
    "pruning": {
        "rules": {"weights": {"kind": "matrix"}},
        "start_step": 4,
        "every_n_steps": 3,
    },
    "qat": {"start_step": 3},
    "ema": {"decay": 0.9},
    "swa": {"start_epoch": 1, "use_for_evaluation": False},
    "layer_statistics": {"every_n_steps": 3},  # logged at step 4, 6, 10, ...
    "checkpoint": {"every_n_steps": 3, "save_top_k": 2, "mode": "min"},
}
LEFT_OUT = {
    "lr_finder": "ends the run by itself",
    "mirror": "has an address",
    "mlflow": "has a package of its own",
    "profiler": "records times",
    "wandb": "has a package of its own",
}


def shipped():
    """Return the classes of the callbacks that a YAML names, by its name."""
    classes = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        content = yaml.safe_load(path.read_text()) or {}
        node = content.get(path.stem)
        if node is not None:  # a set of callbacks, such as `default`, has no node of its name
            classes[path.stem] = locate(node["_target_"])
    return classes


def everything():
    """Return all callbacks that a training can have at once, each by its name."""
    classes = shipped()
    last = ("ema", "swa", "checkpoint")  # they read the weights that others change
    first = [name for name in classes if name not in last and name not in LEFT_OUT]
    callbacks = {"metrics_log": MetricsLog()}
    for name in (*first, *last):
        options = OPTIONS.get(name, {})
        callbacks[name] = classes[name](**options)
    return callbacks


def test_what_does_not_affect_the_result_is_said_by_its_class():
    # A search compares overrides by their names alone: its list must agree with the classes.
    for name, kind in shipped().items():
        assert trains_the_same(f"callbacks.{name}") is not kind.affects_result, name


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
            assert trainer.state.global_step == 10
            assert trainer.state.validated_at == 5
    assert differences(tmp_path / "cut", tmp_path / "whole") == []
    assert trainer.state.stop_reason == whole.state.stop_reason  # early stopping had its way


class Paired(Callback):
    """Hold something between `setup` and `teardown`, as a file that one opens there."""

    def __init__(self):
        self.held = []

    def setup(self, trainer):
        self.held.append("setup")

    def on_update_end(self, trainer):
        assert self.held[-1] == "setup"

    def teardown(self, trainer):
        self.held.append("teardown")


def test_a_second_fit_goes_on_as_if_there_had_been_one(make_trainer, tmp_path):
    # With clipping the gradients of pruned weights count, with momentum their updates.
    options = {"max_epochs": 4, "clip_grad_norm": 0.1}
    paired = Paired()
    callbacks = {**everything(), "paired": paired, "stop": StopAt(12)}
    whole = make_trainer(everything(), tmp_path / "whole", **options)
    whole.fit()
    parts = make_trainer(callbacks, tmp_path / "parts", **options)
    parts.fit()

    assert parts.state.global_step == 12

    parts.log({"own": 1.0})  # between the two
    parts.fit()
    trained = parts.model.state_dict()
    lines = list(read_metrics(tmp_path / "parts"))

    assert whole.state.global_step > 12
    assert parts.state.global_step == whole.state.global_step
    assert paired.held == ["setup", "teardown"] * 2
    for name, value in whole.model.state_dict().items():
        assert torch.equal(trained[name], value), name
    assert {"step": 12, "epoch": 2, "own": 1.0} in lines


@pytest.mark.parametrize(
    "lost", ["early_stopping", "checkpoint", "tensorboard", "metrics_log", "ema"]
)
def test_each_state_is_needed_for_that(make_trainer, tmp_path, carry_over, lost):
    cut = tmp_path / "cut"
    whole = make_trainer(everything(), tmp_path / "whole", max_epochs=6)
    first = make_trainer({**everything(), "stop": StopAt(12)}, cut, max_epochs=6)
    second = make_trainer(everything(), cut, max_epochs=6)
    whole.fit()
    first.fit()
    first.callbacks[lost].state_dict = dict
    carry_over(first, second)
    second.fit()

    assert differences(cut, tmp_path / "whole") != []


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
            (ConfusionMatrix, {"max_classes": 0}),
            (Profiler, {"active": 0}, {"wait": -1}),
            (SWA, {"bn_batches": 0}),
            (GeneratedText, {"temperature": 0}),
            (Masks, {"count": 0}),
        )
        for options in choices
    ],
)
def test_options_out_of_range(kind, options):
    with pytest.raises(CallbackError):
        kind(**options)
