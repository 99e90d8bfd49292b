"""Stratified cuts: exact sizes, every class, fixed for ever."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.errors import DataError
from data.splits import cut, fold_of


@given(targets=st.lists(st.integers(0, 4), min_size=1, max_size=80), wanted=st.integers(0, 40))
@example(targets=[0, 1, 2, 2, 2, 2, 2], wanted=4)
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


@pytest.mark.parametrize("labelled", [True, False])
def test_folds_share_all_samples_out(labelled: bool) -> None:
    targets = np.arange(50) % 3 if labelled else None
    folds = [fold_of(50, k, 5, 7, targets) for k in range(5)]
    assert sorted(i for _, part in folds for i in part) == list(range(50))
    for rest, part in folds:
        assert sorted([*rest, *part]) == list(range(50))
        assert len(part) == 10
        if targets is not None:
            assert set(np.bincount(targets[part])) <= {3, 4}


def test_folds_are_a_function_of_their_seed() -> None:
    targets = np.arange(60) % 4
    again, other = (fold_of(60, 1, 3, seed, targets)[1] for seed in (0, 1))
    assert np.array_equal(fold_of(60, 1, 3, 0, targets)[1], again)
    assert not np.array_equal(again, other)


def test_too_many_folds_are_refused() -> None:
    with pytest.raises(DataError, match=r"data.folds=5 is more than the 4 samples"):
        fold_of(4, 0, 5, 0)
    with pytest.raises(DataError, match=r"data.folds=3: no class has so many samples"):
        fold_of(4, 0, 3, 0, [0, 0, 1, 1])
