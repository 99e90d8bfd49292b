"""Samplers that users bring: exact under I1, or refused."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

from data.errors import DataError
from data.orders import Sequential, Shuffled
from data.samplers import GivenBatches, PerClass, SamplerOrder, as_order, as_updates, default_order
from data.streams import Stream
from data.updates import UpdateSampler


class Lucky(torch_data.Sampler[int]):
    """Draw from the generator that `source` names."""

    def __init__(self, source: str, samples: int = 30) -> None:
        self.source = source
        self.samples = samples
        self.epoch = 0
        self.own = np.random.default_rng(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.samples))
        if self.source == "random":
            random.shuffle(order)
        elif self.source == "numpy":
            np.random.shuffle(order)
        elif self.source == "epoch":
            random.Random(self.epoch).shuffle(order)
        elif self.source == "own":
            self.own.shuffle(order)
        elif self.source == "shrinking":
            order = order[: self.samples - self.epoch]
        return iter(order)


SAMPLERS = [
    pytest.param(lambda: torch_data.RandomSampler(range(30)), id="torch-random"),
    pytest.param(
        lambda: torch_data.RandomSampler(range(30), generator=torch.Generator()), id="generator"
    ),
    pytest.param(lambda: torch_data.WeightedRandomSampler([1.0] * 30, 30), id="torch-weighted"),
    pytest.param(lambda: torch_data.SubsetRandomSampler(range(5, 25)), id="torch-subset"),
    pytest.param(lambda: Lucky("random"), id="random"),
    pytest.param(lambda: Lucky("numpy"), id="numpy"),
    pytest.param(lambda: Lucky("epoch"), id="set-epoch"),
]


@pytest.mark.parametrize("make", SAMPLERS)
def test_samplers_become_functions_of_seed_and_epoch(make: Any) -> None:
    order = as_order(make(), seed=1)
    later = order(3)[:]
    assert np.array_equal(as_order(make(), seed=1)(3)[:], later)
    assert not np.array_equal(order(4)[:], later)
    assert np.array_equal(order(3)[:], later)
    assert len(order) == len(later)


@pytest.mark.parametrize("make", SAMPLERS)
def test_reading_a_sampler_leaves_the_training_rng(make: Any) -> None:
    torch.manual_seed(2)
    random.seed(2)
    expected = (torch.rand(1).item(), random.random())
    torch.manual_seed(2)
    random.seed(2)
    as_order(make(), seed=1)(5)
    assert (torch.rand(1).item(), random.random()) == expected


def test_default_orders() -> None:
    assert isinstance(default_order(range(9), 0), Shuffled)
    assert isinstance(default_order(range(9), 0, shuffle=False), Sequential)
    assert isinstance(default_order(Stream(range(9)), 0), Sequential)


def test_an_order_of_ours_is_taken_as_it_is() -> None:
    order = Shuffled(9, 0)
    assert as_order(order, seed=1) is order


def test_any_iterable_will_do() -> None:
    assert as_order([4, 2, 0], seed=0)(6)[:].tolist() == [4, 2, 0]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        pytest.param("own", "another order when the same epoch is read again", id="own-state"),
        pytest.param("shrinking", "gives 29 in epoch 1, but 30 in epoch 0", id="length"),
    ],
)
def test_samplers_that_cannot_be_exact_are_refused(source: str, text: str) -> None:
    def read() -> None:
        SamplerOrder(Lucky(source), seed=0)(1)

    with pytest.raises(DataError, match=text):
        read()


def test_distributed_sampler_is_not_needed() -> None:
    sampler = torch_data.DistributedSampler(range(10), num_replicas=2, rank=0)  # type: ignore
    with pytest.raises(DataError, match="DistributedSampler is not needed"):
        as_order(sampler, seed=0)


def _batches() -> Any:
    return torch_data.BatchSampler(torch_data.RandomSampler(range(23)), 5, drop_last=False)


def test_batch_sampler_makes_the_updates() -> None:
    updates = as_updates(_batches(), seed=4)
    sampler = UpdateSampler(updates, batch_size=None, gradient_accumulation_steps=2)
    assert len(sampler) == 5
    epoch = [i for t in range(5) for piece in sampler.pieces(1, t) for i in piece.indices]
    assert sorted(epoch) == list(range(23))
    again = UpdateSampler(as_updates(_batches(), seed=4), batch_size=None)
    assert [list(again.pieces(1, t)[0].indices) for t in (4, 0, 2)] == [
        epoch[20:],
        epoch[:5],
        epoch[10:15],
    ]
    other = [i for t in range(5) for piece in sampler.pieces(2, t) for i in piece.indices]
    assert other != epoch


def test_empty_batches_are_refused() -> None:
    with pytest.raises(DataError, match="gives no batches, or empty ones"):
        GivenBatches([[1], []], seed=0)


class _Labelled:
    targets = torch.arange(40) % 5

    def __len__(self) -> int:
        return 40


def test_per_class_updates_hold_so_many_of_so_many() -> None:
    updates = PerClass(_Labelled(), seed=0, classes=3, samples_per_class=4)
    sampler = UpdateSampler(as_updates(updates, seed=0), batch_size=None)
    assert len(sampler) == 3
    drawn = sampler.pieces(0, 1)[0].indices
    counts = torch.bincount(_Labelled.targets[list(drawn)], minlength=5)
    assert sorted(counts.tolist()) == [0, 0, 4, 4, 4]
    assert len(set(drawn)) == 12
    assert sampler.pieces(0, 1)[0].indices == drawn != sampler.pieces(1, 1)[0].indices


def test_per_class_with_too_many_classes() -> None:
    with pytest.raises(DataError, match=r"loader\.batch_sampler\.classes=6"):
        PerClass(_Labelled(), 0, classes=6, samples_per_class=1)
