"""Mixtures: shares to within one sample, each pass of a set whole, and one order for any split."""

import numpy as np
import pytest
import torch

from regimen.data.errors import DataError
from regimen.data.mixture import Mixture, slot_sequence
from regimen.data.samplers import UpdateSampler, default_order


class Numbers(list):
    """Samples that say which they are."""


def mixture(weights, sizes=(10, 7, 3), **more):
    """Return a mixture whose samples are (number of their set, number in it)."""
    sets = {}
    for which, size in enumerate(sizes):
        sets[f"set{which}"] = Numbers((which, number) for number in range(size))
    return Mixture(sets, dict(zip(sets, weights, strict=True)), **more)


@pytest.mark.parametrize(
    "weights", [(3, 1), (0.7, 0.3), (1, 1, 1), (0.1, 0.25, 0.65), (97, 1, 1, 1), (7, 5, 3, 3, 2)]
)
def test_each_set_has_its_share_of_any_first_samples_to_within_one_sample(weights):
    slots = np.resize(slot_sequence(list(weights)), 1000)

    for which, weight in enumerate(weights):
        found = np.cumsum(slots == which)
        expected = np.arange(1, 1001) * (weight / sum(weights))
        assert np.abs(found - expected).max() < 1


def numbers_of(made, order, which):
    """Return the samples of one set in the order that they are drawn in."""
    drawn = [made[index] for index in order]
    return [number for of_set, number in drawn if of_set == which]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("repeat", [True, False])
def test_a_pass_of_a_set_is_whole_and_shuffled(repeat, epoch):
    made = mixture((3, 1, 2), repeat=repeat)

    order = default_order(made, seed=3)(epoch)

    drawn_whole = []
    for which, size in enumerate(made.sizes):
        own = numbers_of(made, order, which)
        for start in range(0, len(own), size):
            one_pass = own[start : start + size]
            assert len(set(one_pass)) == len(one_pass)
        first_pass = own[:size]
        if len(first_pass) >= 3:  # fewer may be in order by chance
            assert first_pass != sorted(first_pass)
        drawn_whole.append(len(own) >= size)
    if repeat:
        assert all(drawn_whole)
    else:
        assert any(drawn_whole)


def test_sets_without_a_sample_in_the_epoch_are_told_too():
    told = mixture((1000, 1, 1), repeat=False).explain()
    assert told.startswith("10 samples: 10 of set0 (1.0 x its 10), 0 of set1 (0.0 x its 7), 0 of")


def test_many_passes_over_a_small_set_are_told_as_a_number():
    told = mixture((1, 1), sizes=(10_000, 5)).explain()
    assert "10,000 of set0 (1.0 x its 10,000)" in told
    assert "of set1 (1,999.8 x its 5)" in told


def test_the_order_of_a_mixture_is_a_function_of_seed_and_epoch():
    made = mixture((3, 1, 2))
    order = default_order(made, seed=3)

    second = order(1).tolist()

    assert order(0).tolist() != second
    again = default_order(made, seed=3)
    assert again(1).tolist() == second
    assert str(len(order)) in made.explain()


def test_a_mixture_that_is_not_shuffled_has_the_order_of_its_sets():
    made = mixture((3, 1, 2))

    order = default_order(made, 3, shuffle=False)(0)

    numbers = numbers_of(made, order, which=1)
    assert numbers == sorted(numbers)


def test_processes_and_micro_batches_share_the_same_updates():
    order = default_order(mixture((3, 1, 2)), seed=3)
    whole = UpdateSampler(order, batch_size=6)
    cut = {"batch_size": 6, "gradient_accumulation_steps": 2, "world_size": 2}
    ranks = [UpdateSampler(order, **cut, rank=rank) for rank in range(2)]

    for update in range(len(whole)):
        found = []
        for rank in ranks:
            for batch_slice in rank.batch_slices(1, update):
                found += batch_slice.indices[: batch_slice.count]
        (expected,) = whole.batch_slices(1, update)
        assert sorted(found) == sorted(expected.indices)


@pytest.fixture
def labelled():
    """Two sets of one and two samples with the same classes."""
    first = Numbers([(torch.zeros(1), 1)])
    first.targets = [1]
    first.classes = ["no", "yes"]
    other = Numbers([(torch.zeros(1), 0)] * 2)
    other.targets = [0, 0]
    other.classes = ["no", "yes"]
    return {"a": first, "b": other}


def test_targets_and_classes_are_those_of_the_sets(labelled):
    made = Mixture(labelled, {"a": 1, "b": 1}, transform=lambda x: x + 1)

    assert made.classes == ["no", "yes"]
    assert made.targets.tolist() == [1, 0, 0]
    assert made[0] == (torch.ones(1), 1)


def test_sets_of_different_classes_are_refused(labelled):
    labelled["b"].classes = ["yes", "no"]
    with pytest.raises(DataError, match="classes of a, b are not the same"):
        Mixture(labelled, {"a": 1, "b": 1})


def test_weights_that_need_a_long_sequence_are_refused():
    with pytest.raises(DataError, match="round them"):
        slot_sequence([0.123456789, 1])
