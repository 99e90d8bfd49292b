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
    sets = {f"set{i}": Numbers((i, n) for n in range(size)) for i, size in enumerate(sizes)}
    return Mixture(sets, dict(zip(sets, weights, strict=True)), **more)


@pytest.mark.parametrize(
    "weights", [(3, 1), (0.7, 0.3), (1, 1, 1), (0.1, 0.25, 0.65), (97, 1, 1, 1), (7, 5, 3, 3, 2)]
)
def test_each_set_has_its_share_of_any_first_samples_to_within_one_sample(weights):
    slots = np.resize(slot_sequence(list(weights)), 1000)
    for number, weight in enumerate(weights):
        share = np.arange(1, 1001) * (weight / sum(weights))
        assert np.abs(np.cumsum(slots == number) - share).max() < 1


@pytest.mark.parametrize("repeat", [True, False])
def test_a_pass_of_a_set_is_whole_and_shuffled_anew(repeat):
    made = mixture((3, 1, 2), repeat=repeat)
    order = default_order(made, seed=3)
    for epoch in (0, 1):
        seen = [made[index] for index in order(epoch)]
        for number, size in enumerate(made.sizes):
            own = [n for which, n in seen if which == number]
            passes = [own[i : i + size] for i in range(0, len(own), size)]
            assert all(len(set(one)) == len(one) for one in passes)
            assert passes[0] != sorted(passes[0]) or len(passes[0]) < 3
        whole = [sum(which == i for which, _ in seen) >= size for i, size in enumerate(made.sizes)]
        assert all(whole) if repeat else any(whole)
    assert order(0).tolist() != order(1).tolist()
    assert order(1).tolist() == default_order(made, seed=3)(1).tolist()
    plain = [made[index] for index in default_order(made, 3, shuffle=False)(0)]
    assert [n for which, n in plain if which == 1] == sorted(n for which, n in plain if which == 1)
    assert str(len(order)) in made.explain()


def test_sets_without_a_sample_in_the_epoch_are_told_too():
    told = mixture((1000, 1, 1), repeat=False).explain()
    assert told.startswith("10 samples: 10 of set0 (1.0 x its 10), 0 of set1 (0.0 x its 7), 0 of")


def test_many_passes_over_a_small_set_are_told_as_a_number():
    told = mixture((1, 1), sizes=(10_000, 5)).explain()
    assert "10,000 of set0 (1.0 x its 10,000)" in told
    assert "of set1 (1,999.8 x its 5)" in told


def test_processes_and_micro_batches_share_the_same_updates():
    order = default_order(mixture((3, 1, 2)), seed=3)
    whole = UpdateSampler(order, batch_size=6)
    ranks = [
        UpdateSampler(order, batch_size=6, gradient_accumulation_steps=2, rank=r, world_size=2)
        for r in range(2)
    ]
    for update in range(len(whole)):
        parts = [p.indices for rank in ranks for p in rank.batch_slices(1, update) if p.count]
        expected = [index for p in whole.batch_slices(1, update) for index in p.indices]
        assert sorted(index for part in parts for index in part) == sorted(expected)


def test_targets_and_classes_are_those_of_the_sets():
    first = Numbers([(torch.zeros(1), 1)])
    other = Numbers([(torch.zeros(1), 0)] * 2)
    first.targets, other.targets = [1], [0, 0]
    first.classes = other.classes = ["no", "yes"]
    made = Mixture({"a": first, "b": other}, {"a": 1, "b": 1}, transform=lambda x: x + 1)
    assert (made.classes, made.targets.tolist()) == (["no", "yes"], [1, 0, 0])
    assert made[0] == (torch.ones(1), 1)
    other.classes = ["yes", "no"]
    with pytest.raises(DataError, match="classes of a, b are not the same"):
        Mixture({"a": first, "b": other}, {"a": 1, "b": 1})
    with pytest.raises(DataError, match="round them"):
        slot_sequence([0.123456789, 1])
