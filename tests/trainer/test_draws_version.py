"""A run does not go on with other random draws, or another order, than it began with."""

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.transforms import v2

from data.keys import DRAWS_VERSION, ORDER
from data.loading.batch_forms import defer
from data.loading.device_transforms import DeviceTransforms
from data.loading.loader import Loader
from data.loading.on_device import OnDevice
from data.orders import ORDER_VERSION, Permutation, Permuted, Shuffled
from data.sources import Digits
from data.transforms import Pipeline, ToFloat
from data.updates import Order, UpdateSampler
from trainer import snapshot
from trainer.errors import CheckpointError
from trainer.options import TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer


def _trainer(*steps: Any, order: Order | None = None) -> Trainer:
    pipeline = Pipeline({str(number): step for number, step in enumerate((*steps, ToFloat()))})
    defer(pipeline, "train")
    digits = Digits("val", 8, transform=pipeline)
    loader = Loader(digits, UpdateSampler(order or Shuffled(64, 0), batch_size=32), seed=0)
    transforms = DeviceTransforms({}, 0, pipeline.deferred)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return Trainer(
        model,
        Classification(num_classes=10),
        torch.optim.SGD(model.parameters(), lr=0.1),
        OnDevice(loader, torch.device("cpu"), transforms=transforms),
        options=TrainerOptions(max_epochs=1),
    )


def _saved(trainer: Trainer) -> Any:
    trainer.setup()
    return snapshot.take(trainer)


def test_the_version_is_saved_and_goes_on() -> None:
    payload = _saved(_trainer(v2.RandomHorizontalFlip()))
    assert payload["state"]["loader"][0]["draws"] == DRAWS_VERSION
    assert snapshot.restore(_trainer(v2.RandomHorizontalFlip()), payload) == []


@pytest.mark.parametrize("then", [None, 1], ids=["before-it-was-written-down", "another"])
def test_other_draws_are_refused_with_the_reason(then: int | None) -> None:
    payload = _saved(_trainer(v2.RandomHorizontalFlip()))
    if then is None:
        del payload["state"]["loader"][0]["draws"]
    else:
        payload["state"]["loader"][0]["draws"] = then
    with pytest.raises(CheckpointError, match=r"were drawn by version 1 .* has version 2"):
        snapshot.restore(_trainer(v2.RandomHorizontalFlip()), payload)


def test_without_random_steps_on_batches_an_older_run_goes_on() -> None:
    payload = _saved(_trainer())
    assert payload["state"]["loader"][0].pop("draws") is None
    assert snapshot.restore(_trainer(), payload) == []


@pytest.mark.parametrize("saved_by", [1, ORDER_VERSION])
def test_a_computed_order_stays_that_which_the_run_began_with(saved_by: int) -> None:
    payload = _saved(_trainer(order=Permuted(64, 0)))
    if saved_by == 1:
        del payload["state"]["loader"][0]["order"]  # version 1 did not write it down
    resumed = _trainer(order=Permuted(64, 0))
    next(resumed.draw(0))  # nothing of another order is kept
    assert snapshot.restore(resumed, payload) == []
    drawn = [
        index for update in resumed.draw(0) for micro in update for index in micro.piece.indices
    ]
    assert drawn == Permutation(64, 0, ORDER, 0, version=saved_by)[:].tolist()
    assert snapshot.take(resumed)["state"]["loader"][0]["order"] == saved_by


def test_a_later_version_of_an_order_is_refused() -> None:
    payload = _saved(_trainer(order=Permuted(64, 0)))
    payload["state"]["loader"][0]["order"] = ORDER_VERSION + 1
    with pytest.raises(CheckpointError, match="version 3, and this Regimen knows those up to 2"):
        snapshot.restore(_trainer(order=Permuted(64, 0)), payload)


def test_an_order_in_memory_has_no_version() -> None:
    payload = _saved(_trainer())
    assert payload["state"]["loader"][0]["order"] is None
    assert snapshot.restore(_trainer(order=Permuted(64, 0)), payload) == []
