"""Weighted, balanced, partial and huge orders."""

from typing import Any

import numpy as np
import pytest

from data.errors import DataError
from data.keys import Permutation
from data.orders import (
    ClassBalanced,
    LowMemory,
    Sequential,
    Shuffled,
    Subset,
    Weighted,
)
from data.samplers import default_order
from data.updates import UpdateSampler


class Labelled:
    """A data set that knows its classes: 90 of class 0, 9 of 1, 1 of 2."""

    targets = np.repeat([0, 1, 2], [90, 9, 1])

    def __len__(self) -> int:
        return 100


ORDERS = [
    pytest.param(lambda seed: Weighted(Labelled(), seed, np.arange(100.0).tolist()), id="weighted"),
    pytest.param(
        lambda seed: Weighted(Labelled(), seed, [1.0] * 100, 50, replacement=False), id="without"
    ),
    pytest.param(lambda seed: ClassBalanced(Labelled(), seed), id="balanced"),
    pytest.param(lambda seed: Subset(Labelled(), seed, size=0.4), id="subset"),
    pytest.param(lambda seed: LowMemory(Labelled(), seed), id="low-memory"),
]


@pytest.mark.parametrize("make", ORDERS)
def test_orders_are_functions_of_seed_and_epoch(make: Any) -> None:
    order = make(1)
    first = order(0)[0:40]
    assert np.array_equal(first, make(1)(0)[0:40])
    assert not np.array_equal(first, order(1)[0:40])
    assert not np.array_equal(first, make(2)(0)[0:40])
    assert first.dtype == np.int64
    assert first.min() >= 0
    assert first.max() < 100


@pytest.mark.parametrize("make", ORDERS)
def test_ranks_and_micro_batches_share_an_order_out(make: Any) -> None:
    order = make(3)
    whole = [order(2)[t * 7 : min(t * 7 + 7, len(order))].tolist() for t in range(3)]
    parts: list[list[int]] = [[], [], []]
    samplers = [
        UpdateSampler(order, batch_size=7, gradient_accumulation_steps=2, rank=rank, world_size=3)
        for rank in range(3)
    ]
    for t in range(3):
        pieces = [piece for sampler in samplers for piece in sampler.pieces(2, t)]
        for piece in sorted(pieces, key=lambda piece: piece.start):
            parts[t] += piece.indices[: piece.count]
    assert parts == whole


def test_weights_are_frequencies() -> None:
    order = Weighted(Labelled(), 0, [1.0] * 50 + [3.0] * 50, num_samples=40000)
    counts = np.bincount(order(0), minlength=100)
    assert abs(counts[50:].sum() / 40000 - 0.75) < 0.01
    assert counts.min() > 100


def test_without_replacement_heavy_samples_come_first_and_weightless_never() -> None:
    weights = [0.0] * 10 + [1.0] * 80 + [1000.0] * 10
    order = Weighted(Labelled(), 0, weights, num_samples=20, replacement=False)
    drawn = np.stack([order(epoch) for epoch in range(20)])
    assert all(len(set(row)) == 20 for row in drawn)
    assert (drawn >= 10).all()
    assert np.mean([set(range(90, 100)) <= set(row) for row in drawn]) > 0.9


def test_balanced_draws_classes_equally_often() -> None:
    order = ClassBalanced(Labelled(), 0, num_samples=30000)
    shares = np.bincount(Labelled.targets[order(0)]) / 30000
    assert np.abs(shares - 1 / 3).max() < 0.01
    natural = ClassBalanced(Labelled(), 0, power=0.0, num_samples=30000)
    assert abs((Labelled.targets[natural(0)] == 0).mean() - 0.9) < 0.01


def test_subset_is_stratified_and_the_same_for_every_seed() -> None:
    one, other = (Subset(Labelled(), seed, size=20) for seed in (1, 2))
    assert set(one(0)) == set(other(5))
    assert np.bincount(Labelled.targets[one(0)]).tolist() == [18, 1, 1]
    assert Subset(Labelled(), 0, indices=[5, 3, 9], shuffle=False)(4).tolist() == [5, 3, 9]
    assert len(Subset(Labelled(), 0, size=2)) == 2
    assert len(Subset(Labelled(), 0, size=1.0)) == 100


@pytest.mark.parametrize(
    ("make", "text"),
    [
        pytest.param(lambda: Weighted(Labelled(), 0, [1.0]), "1 weights for 100", id="count"),
        pytest.param(lambda: Weighted(Labelled(), 0, [0.0] * 100), "not all 0", id="zero"),
        pytest.param(lambda: Weighted(Labelled(), 0, [-1.0] * 100), "none negative", id="minus"),
        pytest.param(
            lambda: Weighted(Labelled(), 0, [1.0] * 9 + [0.0] * 91, 10, False), "only 9", id="few"
        ),
        pytest.param(lambda: ClassBalanced([1, 2], 0), "no `targets`", id="no-targets"),
        pytest.param(lambda: Subset(Labelled(), 0), "either indices or size", id="neither"),
        pytest.param(lambda: Subset(Labelled(), 0, [1], 2), "either indices or size", id="both"),
        pytest.param(lambda: Subset(Labelled(), 0, [1, 100]), "from 1 to 100", id="outside"),
        pytest.param(lambda: Subset(Labelled(), 0, size=101), "none or too many", id="size"),
    ],
)
def test_impossible_orders_name_the_key(make: Any, text: str) -> None:
    with pytest.raises(DataError, match=text) as caught:
        make()
    assert "loader.sampler" in str(caught.value)


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_permutation_is_one(samples: int) -> None:
    permutation = Permutation(samples, 5)
    whole = permutation[:]
    assert sorted(whole) == list(range(samples))
    assert np.array_equal(whole[3:9], permutation[3:9])
    assert np.array_equal(whole[::-1], permutation[::-1])


def test_the_orders_of_a_seed_stay() -> None:
    """Runs resume with them: these were written down."""
    assert Shuffled(8, 3)(1)[:].tolist() == [0, 2, 1, 4, 6, 7, 3, 5]
    assert LowMemory(range(11), 5)(2)[:].tolist() == [3, 9, 8, 0, 7, 6, 2, 4, 10, 5, 1]


def test_neighbours_of_a_permutation_are_unrelated() -> None:
    """Chi-squared over the distance of samples at neighbouring positions, over many keys."""
    steps = np.concatenate([np.diff(Permutation(11, 5, epoch)[:]) % 11 for epoch in range(2000)])
    counts = np.bincount(steps, minlength=11)[1:]
    mean = len(steps) / 10
    assert ((counts - mean) ** 2 / mean).sum() < 9 + 4 * (2 * 9) ** 0.5


def test_parts_of_a_permutation_are_those_of_the_whole() -> None:
    permutation = Permutation(10_000, 5)
    whole = permutation(np.arange(10_000, dtype=np.uint64))
    starts = [0, 100, 4000, 4050, 9990, 100, 0]  # on, across the end of a block, and back
    for start in starts:
        assert np.array_equal(permutation[start : start + 100], whole[start : start + 100])
    assert np.array_equal(permutation[50:9000], whole[50:9000])


def test_permutation_moves_samples_anywhere() -> None:
    """Chi-squared over where each of 20 samples lands, beside numpy's own shuffle."""
    landed = np.zeros((20, 20))
    for epoch in range(1000):
        landed[np.arange(20), LowMemory(range(20), 0)(epoch)[:]] += 1
    chi_squared = ((landed - 50) ** 2 / 50).sum()
    degrees = 19 * 19
    assert abs(chi_squared - degrees) < 4 * np.sqrt(2 * degrees)


def test_a_billion_samples_cost_no_memory_and_no_time() -> None:
    order = default_order(range(1_000_000_000), seed=1)
    sampler = UpdateSampler(order, batch_size=4096, rank=511, world_size=512)
    pieces = [sampler.pieces(3, update) for update in (0, 100_000, len(sampler) - 1)]
    drawn = [index for update in pieces for piece in update for index in piece.indices]
    assert len(set(drawn)) == len(drawn)
    assert max(drawn) > 500_000_000


def test_order_becomes_memoryless_where_it_is_huge() -> None:
    assert isinstance(default_order(range(10), 0), Shuffled)
    assert isinstance(default_order(range(10), 0, huge=10), LowMemory)


def test_sequential_is_the_order_of_evaluation() -> None:
    assert Sequential(4)(7).tolist() == [0, 1, 2, 3]
