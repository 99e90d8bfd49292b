"""Roles that a callback of one's own may have: an average, a saver, a receiver of what is shown."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from regimen.callbacks.ema import EMA
from regimen.callbacks.lr_finder import LRFinder
from regimen.conf.schema_trainer import TrainerConfig
from regimen.scripts.sweeps.leaderboard import Ranking
from regimen.trainer import snapshot
from regimen.trainer.assembly.parts import Assembly
from regimen.trainer.callback import (
    Average,
    Callback,
    Hooks,
    Results,
    Saver,
    keeps_weights,
)
from regimen.trainer.errors import ModelError
from regimen.trainer.media import as_image
from regimen.trainer.runs.results import best_of
from regimen.trainer.runs.rewind import RewindPoint
from regimen.trainer.state import LogPoint
from regimen.trainer.strategies.strategy import Strategy


def copies(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Half(Average):
    """Evaluate with half of the weights that the run ended with."""

    def __init__(self):
        self.weights = {}

    def on_fit_end(self, trainer):
        self.weights = {name: value / 2 for name, value in copies(trainer.model).items()}

    @contextmanager
    def swap(self, model):
        parameters = dict(model.named_parameters())
        kept = copies(model)
        with torch.no_grad():
            for name, value in self.weights.items():
                parameters[name].copy_(value)
            yield
            for name, value in kept.items():
                parameters[name].copy_(value)

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = dict(state["weights"])


class Keeper(Saver):
    """Write nothing, and know which step was the best."""

    def best_result(self):
        return "val/loss", 0.5, 7

    def state_dict(self):
        return {"ranking": [[7, 0.5]]}


def validated(trainer):
    return trainer.evaluate(trainer.val_loaders["val"], "val")


@pytest.mark.parametrize(("kind", "key"), [(Half, "weights"), (EMA, "model")])
def test_an_average_is_evaluated_saved_and_loaded_under_any_name(make_trainer, kind, key):
    trainer = make_trainer({"mine": kind()})
    trainer.fit()
    payload = trainer.state_dict()
    names = copies(trainer.model).keys()

    assert payload["ema"][key].keys() >= names

    expected = validated(trainer)
    evaluated = make_trainer({"mine": kind()})
    snapshot.load_weights(evaluated.components, payload)
    resumed = make_trainer({"mine": kind()})
    resumed.load_state_dict(payload)
    without = make_trainer({})
    snapshot.load_weights(without.components, payload)

    assert validated(evaluated) == expected
    assert validated(resumed) == expected
    assert validated(without) != expected


def test_averages_and_savers_of_ones_own_have_their_roles(make_trainer):
    with pytest.raises(ModelError, match=r"callbacks\.one and callbacks\.two"):
        make_trainer({"one": Half(), "two": EMA(0.9)})

    callbacks = {
        "one": Half(),
        "two": EMA(0.9, use_for_evaluation=False),
        "keeps": Keeper(),
    }
    trainer = make_trainer(callbacks)
    assert trainer.average is trainer.callbacks["one"]

    trainer.fit()
    experiment = SimpleNamespace(trainer=trainer)
    assert best_of(experiment.trainer.callbacks) == ("val/loss", 0.5, 7)
    assert RewindPoint.of(trainer.state_dict()).best == (7,)


def test_pruning_comes_first_and_checkpoints_last_under_any_name():
    nodes = {
        "saves": {"_target_": "regimen.callbacks.checkpoint.Checkpoint"},
        "ema": {"_target_": "regimen.callbacks.ema.EMA", "decay": 0.5},
        "smaller": {
            "_target_": "regimen.callbacks.compression.pruning.Pruning",
            "rules": {"weights": {"kind": "matrix"}},
        },
    }
    config = SimpleNamespace(callbacks=nodes, trainer=TrainerConfig())
    assert list(Assembly(config, Strategy()).callbacks) == ["smaller", "ema", "saves"]


def test_a_leaderboard_goes_by_the_metric_of_the_best():
    job = SimpleNamespace(results={"best/val/f1": 0.5, "val/f1": 0.25}, best={})
    config = {"callbacks": {"keeps": {"monitor": "val/f1", "mode": "min"}, "none": None}}

    ranking = Ranking(config, [job], task_metric="val/accuracy")

    assert ranking.name == "val/f1"
    assert ranking.value(job) == 0.5
    assert ranking.rank_of(0.5) == 0.5

    without_callbacks = {"callbacks": {}}
    by_task = Ranking(without_callbacks, [], task_metric="val/accuracy")
    by_default = Ranking(without_callbacks, [])

    assert by_task.name == "val/accuracy"
    assert by_default.name == "val/loss"


def test_a_hook_with_wrong_parameters_is_found():
    class Short(Callback):
        def on_epoch_end(self):
            pass

    with pytest.raises(ModelError, match=r"Short\.on_epoch_end must take \(self, trainer\)"):
        Hooks([Short()], None)


def test_a_name_nearly_as_a_hook_is_told(caplog):
    class Lightnings(Callback):
        def on_train_epoch_end(self, trainer):
            pass

        def on_my_own_account(self):
            pass

    Hooks([Lightnings()], None)
    (told,) = [record.getMessage() for record in caplog.records]

    assert "Lightnings.on_train_epoch_end is no hook" in told
    assert "did you mean on_" in told


class Tracker(Callback):
    """What a tracker of one's own looks like."""

    def __init__(self):
        self.got = {}
        self.ends = []

    def on_media(self, trainer, name, media):
        self.got[name] = (media, trainer.log_point)

    def on_run_end(self, trainer, results):
        self.ends.append(results)


class Figure:
    """All that is asked of a figure of matplotlib's."""

    def savefig(self, file, format):
        red = Image.new("RGB", (5, 3), (255, 0, 0))
        red.save(file, format)


def test_a_figure_is_an_image(make_trainer):
    tracker = Tracker()
    trainer = make_trainer({"a": tracker}, max_epochs=1)
    trainer.fit()
    trainer.log_figure("a/figure", Figure())
    image, point = tracker.got["a/figure"]

    assert point == LogPoint(step=5, epoch=1)
    assert (image == [255, 0, 0]).all()


def test_where_nobody_receives_nothing_is_read(make_trainer):
    deaf = make_trainer({})
    with torch.device("meta"):  # has no values to read
        image = torch.empty(3, 4, 4)
        values = torch.empty(4)
    deaf.log_image("image", image)
    deaf.log_histogram("histogram", values)


def test_the_end_is_told_once_and_an_error_in_it_changes_nothing(make_trainer, caplog):
    class Breaks(Callback):
        def on_run_end(self, trainer, results):
            raise ValueError("no network")

    tracker = Tracker()
    trainer = make_trainer({"breaks": Breaks(), "tracker": tracker})
    trainer.end(Results("failed"))  # before anything was set up: there is nothing to end
    trainer.fit()
    results = Results("finished", {"test/loss": 0.5})
    trainer.end(results)
    trainer.end(Results("failed"))

    (told,) = [record.getMessage() for record in caplog.records]

    assert tracker.ends == [results]
    assert told == "Breaks.on_run_end failed: no network"


@pytest.mark.parametrize(
    ("image", "pixel"),
    [
        pytest.param(torch.tensor([[[1.0]], [[0.0]], [[2.0]]]), [255, 0, 255], id="clipped"),
        pytest.param(torch.tensor([[[7]], [[8]], [[9]]]).byte(), [7, 8, 9], id="uint8"),
        pytest.param(torch.full((3, 1, 1), 0.5, dtype=torch.bfloat16), [128] * 3, id="bfloat16"),
        pytest.param(np.array([[[7, 8, 9]]], dtype=np.uint8), [7, 8, 9], id="numpy: H, W, C"),
        pytest.param(Image.new("RGBA", (1, 1), (7, 8, 9, 0)), [7, 8, 9], id="PIL"),
        pytest.param(torch.tensor([[float("nan")]]), [0, 0, 0], id="nan"),
        pytest.param(torch.tensor([[True]]), [255] * 3, id="bool"),
    ],
)
def test_images_of_any_kind(image, pixel):
    array = as_image(image)
    assert array.shape == (1, 1, 3)
    assert array.dtype == np.uint8
    assert array[0, 0].tolist() == pixel


def test_an_image_of_five_channels_is_refused():
    with pytest.raises(ValueError, match=r"an image of shape \[1, 2, 5\]"):
        as_image(torch.zeros(5, 1, 2))


def test_the_weights_of_a_range_test_are_of_no_use():
    assert keeps_weights({"ema": EMA()})
    assert not keeps_weights({"ema": EMA(), "finder": LRFinder()})
