"""Stratified cuts: exact sizes, every class, fixed for ever."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.splits import cut


@given(targets=st.lists(st.integers(0, 4), min_size=1, max_size=80), wanted=st.integers(0, 40))
def test_cut_partitions_and_leaves_every_class_behind(targets: list[int], wanted: int) -> None:
    rest, part = cut(targets, wanted, seed=1)
    assert sorted([*rest, *part]) == list(range(len(targets)))
    assert {targets[i] for i in rest} == set(targets)
    assert len(part) == min(wanted, len(targets) - len(set(targets)))


def test_cut_is_proportional() -> None:
    _, part = cut([0] * 60 + [1] * 30 + [2] * 10, 10, seed=0)
    assert np.bincount(np.repeat([0, 1, 2], [60, 30, 10])[part]).tolist() == [6, 3, 1]


@pytest.mark.parametrize("seed", [0, 1])
def test_cut_is_a_function_of_its_seed(seed: int) -> None:
    targets = np.arange(100) % 7
    assert np.array_equal(cut(targets, 20, seed)[1], cut(targets, 20, seed)[1])
    assert not np.array_equal(cut(targets, 20, seed)[1], cut(targets, 20, seed + 1)[1])
