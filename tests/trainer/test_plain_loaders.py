"""What a trainer from Python may be given to draw batches from."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trainer.errors import SampleError
from trainer.options import TrainerOptions
from trainer.tasks.regression import Regression
from trainer.trainer import Trainer

BATCHES = [(torch.full((4, 2), float(i)), torch.ones(4)) for i in range(3)]


class Endless(IterableDataset[Any]):
    """Samples without a number of them."""

    def __init__(self, source: Any = None) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        samples = ((x, y) for xs, ys in BATCHES for x, y in zip(xs, ys, strict=True))
        return samples if self.source is None else self.source


def trained(train: Any, val: Any = None, **options: Any) -> Trainer:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(
        model,
        Regression(),
        optimizer,
        train,
        val,
        options=TrainerOptions(**{"max_epochs": 1, **options}),
    )
    trainer.fit()
    return trainer


def test_a_loader_without_a_length_trains_and_validates() -> None:
    loader = DataLoader(Endless(), batch_size=4)
    trainer = trained(loader, loader, max_epochs=2)
    assert trainer.state.global_step == 6
    assert trainer.metrics["val/loss"] >= 0
    assert trained(loader, max_epochs=None, max_steps=7).state.global_step == 7


@pytest.mark.parametrize("place", ["train_loader", "val_loader"])
def test_what_can_be_read_only_once_is_refused(place: str) -> None:
    given = [iter(BATCHES)] if place == "train_loader" else [BATCHES, (b for b in BATCHES)]
    with pytest.raises(TypeError, match=f"{place} is an iterator .* only once"):
        trained(*given)
    with pytest.raises(TypeError, match=f"{place} is not an iterable of batches: "):
        trained(*given[:-1], 3)


@pytest.mark.parametrize("horizon", [{"max_epochs": 3}, {"max_epochs": None, "max_steps": 20}])
def test_an_epoch_without_batches_ends_the_training(horizon: dict[str, Any]) -> None:
    once = DataLoader(Endless(iter(Endless())))
    with pytest.raises(SampleError, match="no batch in epoch 1"):
        trained(once, **horizon)
