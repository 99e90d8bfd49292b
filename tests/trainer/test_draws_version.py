"""A run does not go on with other random draws than it began with."""

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.transforms import v2

from data.keys import DRAWS_VERSION
from data.loading.batch_forms import defer
from data.loading.device_transforms import DeviceTransforms
from data.loading.loader import Loader
from data.loading.on_device import OnDevice
from data.orders import Shuffled
from data.sources import Digits
from data.transforms import Pipeline, ToFloat
from data.updates import UpdateSampler
from trainer import snapshot
from trainer.errors import CheckpointError
from trainer.options import TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer


def _trainer(*steps: Any) -> Trainer:
    pipeline = Pipeline({str(number): step for number, step in enumerate((*steps, ToFloat()))})
    defer(pipeline, "train")
    digits = Digits("val", 8, transform=pipeline)
    loader = Loader(digits, UpdateSampler(Shuffled(64, 0), batch_size=32), seed=0)
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
