"""Limits are numbers of samples: the same ones whatever they are read with."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf.check import parse
from scripts.composition.compose import compose
from trainer.assembly.experiment import eval_loader, limited, overfit_samples
from trainer.options import count


def config_of(*overrides: str) -> Any:
    return parse(compose(["experiment=resnet18", "loader.batch_size=8", *overrides]).config)


class Numbers:
    def __len__(self) -> int:
        return 45  # five batches of 8, and a shorter one

    def __getitem__(self, index: int) -> int:
        return index


def read(config: Any, limit: float | None, world_size: int, samples: int | None = None) -> set[int]:
    """Return the samples that all processes together evaluate; none of them twice."""
    seen: list[int] = []
    for rank in range(world_size):
        group = SimpleNamespace(rank=rank, world_size=world_size)
        strategy: Any = SimpleNamespace(group=group, device=torch.device("cpu"))
        for micro_batch in eval_loader(config, Numbers(), strategy, limit, samples).epoch(0):
            seen += micro_batch.batch.tolist()[: micro_batch.piece.count]
    assert len(seen) == len(set(seen))
    return set(seen)


@pytest.mark.parametrize(
    ("limit", "batches"),
    [(0.28, 28), (0.29, 29), (0.57, 57), (0.58, 58), (0.145, 15), (0.004, 1), (1.0, 100), (7, 7)],
)
def test_a_fraction_is_rounded_as_it_is_written(limit: float, batches: int) -> None:
    assert count(limit, 100) == batches
    config = config_of(f"trainer.overfit_batches={limit}")
    assert overfit_samples(config, range(800)) == batches * 8
    assert limited(800, limit, config) == batches * 8


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("eval_batch_size", ["null", "5", "64"])
@pytest.mark.parametrize(
    ("limit", "samples"),
    [
        pytest.param(None, 45, id="none"),
        pytest.param(2, 16, id="count"),
        pytest.param(100, 45, id="more-than-there-are"),
        pytest.param(0.5, 24, id="share"),
        pytest.param(0.01, 8, id="at-least-one"),
    ],
)
def test_evaluation(
    limit: float | None, samples: int, eval_batch_size: str, world_size: int
) -> None:
    config = config_of(f"loader.eval_batch_size={eval_batch_size}")
    assert read(config, limit, world_size) == set(range(samples))


def test_of_few_samples() -> None:
    assert read(config_of(), 0.5, 2, samples=32) == set(range(16))


@pytest.mark.parametrize(
    ("few", "samples"), [("null", None), ("1", 8), ("0.5", 24), ("9", 45)], ids=str
)
def test_overfitting(few: str, samples: int | None) -> None:
    assert overfit_samples(config_of(f"trainer.overfit_batches={few}"), Numbers()) == samples


def test_no_limit_is_everything() -> None:
    assert limited(45, None, config_of()) == 45
