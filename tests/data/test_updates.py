"""The order and its cut: pure functions, whatever the hardware."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.orders import FirstOf, Sequential, Shuffled
from data.updates import UpdateSampler


def test_shuffled_is_a_permutation_that_depends_on_seed_and_epoch_alone() -> None:
    order = Shuffled(101, seed=3)
    assert sorted(order(0)) == list(range(101))
    assert np.array_equal(order(5), Shuffled(101, seed=3)(5))
    assert not np.array_equal(order(0), order(1))
    assert not np.array_equal(order(0), Shuffled(101, seed=4)(0))


def test_shuffled_is_pinned_for_ever() -> None:
    assert Shuffled(10, seed=0)(0).tolist() == [1, 6, 9, 5, 3, 7, 0, 4, 2, 8]


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 20),
    accumulation=st.integers(1, 5),
    world=st.integers(1, 5),
)
def test_pieces_of_all_ranks_partition_the_batch(
    samples: int, batch: int, accumulation: int, world: int
) -> None:
    order = Shuffled(samples, seed=1)
    samplers = [
        UpdateSampler(
            order,
            batch_size=batch,
            gradient_accumulation_steps=accumulation,
            rank=rank,
            world_size=world,
        )
        for rank in range(world)
    ]
    for update in range(len(samplers[0])):
        expected = order(0)[update * batch : (update + 1) * batch].tolist()
        per_rank = [sampler.pieces(0, update) for sampler in samplers]
        assert len({len(pieces) for pieces in per_rank}) == 1
        own = [p for pieces in zip(*per_rank, strict=True) for p in pieces if p.count]
        assert [i for p in own for i in p.indices] == expected
        assert [p.start for p in own] == np.cumsum([0] + [p.count for p in own])[:-1].tolist()
        sizes = [len(part) for part in np.array_split(expected, accumulation * world)]
        assert [p.count for p in own] == [size for size in sizes if size]
        for pieces in per_rank:
            for m, piece in enumerate(pieces):
                assert (piece.total, piece.micro_batch) == (len(expected), m)
                assert piece.micro_batches == len(pieces)
                assert piece.count or (piece.indices, piece.start) == ((expected[0],), 0)


@pytest.mark.parametrize(
    ("drop_last", "updates"), [pytest.param(False, 4, id="short"), pytest.param(True, 3, id="drop")]
)
def test_last_update(drop_last: bool, updates: int) -> None:
    sampler = UpdateSampler(Sequential(10), batch_size=3, drop_last=drop_last)
    assert len(sampler) == updates
    assert [len(sampler.pieces(0, t)[0].indices) for t in range(updates)][:3] == [3, 3, 3]


def test_updates_are_the_same_for_any_batch_split() -> None:
    whole = UpdateSampler(Shuffled(30, 7), batch_size=8)
    split = UpdateSampler(Shuffled(30, 7), batch_size=8, gradient_accumulation_steps=3)
    for t in range(4):
        joined = [i for piece in split.pieces(2, t) for i in piece.indices]
        assert joined == list(whole.pieces(2, t)[0].indices)


def test_too_few_samples_for_drop_last_names_the_keys() -> None:
    with pytest.raises(DataError, match=r"loader\.drop_last.*loader\.batch_size=4"):
        UpdateSampler(Sequential(3), batch_size=4, drop_last=True)


def test_no_samples_names_the_root() -> None:
    with pytest.raises(DataError, match=r"data\.root"):
        UpdateSampler(Sequential(0), batch_size=4)


def test_first_of_repeats_the_same_samples() -> None:
    order = FirstOf(Shuffled(20, 1), 6)
    assert len(order) == 6
    assert np.array_equal(order(0), order(9))
    assert np.array_equal(order(0), Shuffled(20, 1)(0)[:6])
