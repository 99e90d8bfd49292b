"""Random numbers of many samples: each sample's its own, uniform, and unrelated to the others'."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from data.keys import Draws, key, keys

N = 40_000


def test_keys_of_many_are_the_keys_of_each() -> None:
    values = [0, 1, 7, 2**40, 2**63]
    assert keys(values, 3, 2, 5).tolist() == [key(3, 2, 5, value) for value in values]


def test_a_samples_numbers_do_not_depend_on_the_others() -> None:
    def numbers(rows: list[int]) -> list[torch.Tensor]:
        draws = Draws(keys(rows, 3))
        drawn = [draws.uniform(-1, 2), draws.integers(9), draws.uniform(each=10)]
        return [*drawn, draws.integers(torch.full((len(rows),), 5)), draws.order(3)]

    whole = numbers(list(range(50)))
    for row in (0, 17, 49):
        alone = numbers([row])
        assert all(torch.equal(a[row], b[0]) for a, b in zip(whole, alone, strict=True))


def test_some_samples_numbers_and_later_ones_are_those_that_all_draw() -> None:
    draws, which = Draws.seeded(50, 3), torch.arange(50) % 3 == 0
    later = draws.ahead(12)
    first, twelve = draws.uniform(), draws.uniform(each=11)
    assert torch.equal(draws.uniform(), later)
    some = draws.of(which)
    assert torch.equal(some.uniform(), first[which])
    assert torch.equal(some.uniform(each=11), twelve[which])


@pytest.mark.parametrize("which", range(3))
def test_numbers_are_uniform(which: int) -> None:
    draws = Draws.seeded(N, which)
    first, second = draws.uniform(), draws.uniform(-2, 3)
    assert first.min() >= 0
    assert first.max() < 1
    assert second.min() >= -2
    assert second.max() <= 3
    assert kstest(first.double(), "uniform").pvalue > 1e-3
    assert kstest((second.double() + 2) / 5, "uniform").pvalue > 1e-3
    for sides in (2, 9, 37):
        counts = np.bincount(draws.integers(sides), minlength=sides)
        assert len(counts) == sides
        assert chisquare(counts).pvalue > 1e-3
    orders = draws.order(3) @ torch.tensor([9, 3, 1])
    counts = orders.unique(return_counts=True)[1]
    assert len(counts) == 6
    assert chisquare(counts).pvalue > 1e-3


def test_each_sample_has_its_own_bound() -> None:
    bounds = torch.arange(1, 1001).repeat(20)
    drawn = Draws.seeded(len(bounds), 5).integers(bounds)
    assert (drawn < bounds).all()
    assert drawn.min() == 0
    assert kstest(((drawn + 0.5) / bounds)[bounds > 500].double(), "uniform").pvalue > 1e-3


def test_numbers_are_unrelated() -> None:
    """Between neighbours in a sample, samples, epochs and names: a 10 x 10 table of pairs."""
    draws = Draws.seeded(N, 1)
    first, second = draws.uniform(), draws.uniform()
    epochs = [Draws(keys(range(N), 1, 2, epoch)).uniform() for epoch in (0, 1)]
    names = [Draws(keys(range(N), 1) ^ np.uint64(name)).uniform() for name in (6, 7)]
    for one, other in [(first, second), (first[:-1], first[1:]), tuple(epochs), tuple(names)]:
        cells = (one * 10).long() * 10 + (other * 10).long()
        assert chisquare(np.bincount(cells, minlength=100)).pvalue > 1e-3
