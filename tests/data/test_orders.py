"""Orders and updates: pure functions of (seed, epoch), whoever brings them and however split."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import data as torch_data

from regimen.conf.errors import ConfigError
from regimen.data import samplers
from regimen.data.errors import DataError
from regimen.data.mixture import Mixture
from regimen.data.orders import (
    ClassBalanced,
    LowMemory,
    Repeated,
    Sequential,
    Shuffled,
    Subset,
    Weighted,
    occurrences_in,
)
from regimen.data.samplers import (
    GivenBatches,
    PerClass,
    SamplerOrder,
    UpdateSampler,
    as_order,
    as_updates,
    default_order,
)
from regimen.data.streams import Stream


class Labelled:
    """A data set that knows its classes: 90 of class 0, 9 of 1, 1 of 2."""

    targets = np.repeat([0, 1, 2], [90, 9, 1])

    def __len__(self):
        return 100


class Lucky(torch_data.Sampler[int]):
    """Draw from the generator that `source` names."""

    def __init__(self, source, samples=50):
        self.source = source
        self.samples = samples
        self.epoch = 0
        self.own = np.random.default_rng(0)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.samples

    def __iter__(self):
        order = list(range(self.samples - self.epoch * (self.source == "shrinking")))
        shuffles = {
            "random": random.shuffle,
            "numpy": np.random.shuffle,
            "epoch": random.Random(self.epoch).shuffle,
            "own": self.own.shuffle,
        }
        shuffles.get(self.source, list)(order)
        return iter(order)


SHARED = torch_data.DistributedSampler(range(10), num_replicas=2, rank=0)
READ = {
    "torch-random": lambda: torch_data.RandomSampler(range(50)),
    "generator": lambda: torch_data.RandomSampler(range(50), generator=torch.Generator()),
    "torch-weighted": lambda: torch_data.WeightedRandomSampler([1.0] * 50, 50),
    "torch-subset": lambda: torch_data.SubsetRandomSampler(range(5, 50)),
    "random": lambda: Lucky("random"),
    "numpy": lambda: Lucky("numpy"),
    "set-epoch": lambda: Lucky("epoch"),
}
ORDERS = {
    "shuffled": lambda seed: Shuffled(100, seed),
    "weighted": lambda seed: Weighted(Labelled(), seed, np.arange(100.0).tolist()),
    "balanced": lambda seed: ClassBalanced(Labelled(), seed),
    "subset": lambda seed: Subset(Labelled(), seed, size=0.4),
    "low-memory": lambda seed: LowMemory(Labelled(), seed),
    "repeated": lambda seed: Repeated(Labelled(), seed, spread=16, round_to=16),
    **{name: lambda seed, make=make: as_order(make(), seed) for name, make in READ.items()},
}


@pytest.mark.quick
@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
def test_orders_are_pure_functions_of_seed_and_epoch(make):
    states = torch.get_rng_state(), random.getstate()
    order = make(1)
    first = order(0)[0:40]
    assert np.array_equal(first, make(1)(0)[0:40])
    assert not np.array_equal(first, order(1)[0:40])
    assert np.array_equal(first, order(0)[0:40])
    assert first.dtype == np.int64
    assert 0 <= first.min() <= first.max() < 100
    assert random.getstate() == states[1]  # the training's own
    assert torch.equal(torch.get_rng_state(), states[0])
    if not isinstance(order, SamplerOrder):  # which may have a seed of its own
        assert not np.array_equal(first, make(2)(0)[0:40])


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 20),
    accumulation=st.integers(1, 5),
    world=st.integers(1, 5),
    kind=st.sampled_from([lambda n: Shuffled(n, 1), lambda n: LowMemory(range(n), 1)]),
)
def test_batch_slices_of_all_ranks_partition_the_update(samples, batch, accumulation, world, kind):
    order = kind(samples)
    whole = order(0)[:]
    assert sorted(whole) == list(range(samples))
    assert np.array_equal(whole[::-1], order(0)[::-1])
    cut = {"batch_size": batch, "gradient_accumulation_steps": accumulation}
    samplers = [UpdateSampler(order, **cut, rank=rank, world_size=world) for rank in range(world)]
    dropping = UpdateSampler(order, batch_size=min(batch, samples), drop_last=True)
    assert len(dropping) == samples // min(batch, samples)
    for update in range(len(samplers[0])):
        expected = order(0)[update * batch : min((update + 1) * batch, samples)].tolist()
        assert expected == whole[update * batch :][:batch].tolist()
        per_rank = [sampler.batch_slices(0, update) for sampler in samplers]
        assert len({len(batch_slices) for batch_slices in per_rank}) == 1
        own = [p for batch_slices in zip(*per_rank, strict=True) for p in batch_slices if p.count]
        assert [i for p in own for i in p.indices] == expected
        assert [p.start for p in own] == np.cumsum([0] + [p.count for p in own])[:-1].tolist()
        sizes = [len(part) for part in np.array_split(expected, accumulation * world)]
        assert [p.count for p in own] == [size for size in sizes if size]
        for batch_slices in per_rank:
            for m, batch_slice in enumerate(batch_slices):
                assert (batch_slice.total, batch_slice.micro_batch) == (len(expected), m)
                assert batch_slice.micro_batches == len(batch_slices)
                assert batch_slice.count or (batch_slice.indices, batch_slice.start) == (
                    (expected[0],),
                    0,
                )


def test_class_balanced_draws_classes_equally_often():
    weighted = Weighted(Labelled(), 0, [1.0] * 50 + [3.0] * 50, num_samples=40000)
    counts = np.bincount(weighted(0), minlength=100)
    assert abs(counts[50:].sum() / 40000 - 0.75) < 0.01
    assert counts.min() > 100
    order = ClassBalanced(Labelled(), 0, num_samples=30000)
    shares = np.bincount(Labelled.targets[order(0)]) / 30000
    assert np.abs(shares - 1 / 3).max() < 0.01
    natural = ClassBalanced(Labelled(), 0, power=0.0, num_samples=30000)
    assert abs((Labelled.targets[natural(0)] == 0).mean() - 0.9) < 0.01


def test_subset_is_stratified_and_the_same_for_every_seed():
    one, other = (Subset(Labelled(), seed, size=20) for seed in (1, 2))
    assert set(one(0)) == set(other(5))
    assert np.bincount(Labelled.targets[one(0)]).tolist() == [18, 1, 1]
    still = Subset(Labelled(), 0, size=20, shuffle=False)
    assert still(4).tolist() == sorted(one(0))
    assert len(Subset(Labelled(), 0, size=2)) == 2
    assert len(Subset(Labelled(), 0, size=1.0)) == 100


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 90),
    repeats=st.integers(1, 5),
    batch=st.integers(1, 20),
    round_to=st.integers(1, 16),
)
def test_repeated_augmentation_makes_the_updates_of_deit(samples, repeats, batch, round_to):
    """Of its sampler over all processes: each sample so often in a row, cut to the length."""
    length = samples // round_to * round_to
    if not length:
        with pytest.raises(DataError, match=rf"round_to={round_to}.*has {samples}"):
            Repeated(range(samples), 3, batch, repeats, round_to)
        return
    order = Repeated(range(samples), 3, batch, repeats, round_to)
    assert len(order) == len(order(0)) == length
    for epoch in (0, 1):
        in_a_row = np.repeat(Shuffled(samples, 3)(epoch), repeats)[:length]
        updates = UpdateSampler(order, batch_size=batch).updates
        for update in range(len(updates)):
            ours = updates.samples(epoch, update)
            theirs = in_a_row[update * batch : (update + 1) * batch]
            assert sorted(ours) == sorted(theirs)
            if repeats > 1 and batch >= 4 * repeats and len(ours) == batch:
                # MixUp pairs neighbours: none is paired with itself.
                assert not (ours[1:] == ours[:-1]).any()


@pytest.mark.parametrize("name", ["spread", "repeats", "round_to"])
def test_repeated_augmentation_of_nothing_is_refused(name):
    given = {"spread": 8, "repeats": 2, "round_to": 4, name: 0}
    with pytest.raises(ConfigError, match=rf"loader\.sampler\.{name}: expected an integer >= 1"):
        Repeated(range(20), 1, **given)


def test_orders_of_a_seed_are_the_same_in_every_version():
    """Runs resume with them: these were written down."""
    assert Shuffled(10, 0)(0).tolist() == [1, 6, 9, 5, 3, 7, 0, 4, 2, 8]
    assert Shuffled(8, 3)(1).tolist() == [0, 2, 1, 4, 6, 7, 3, 5]
    assert LowMemory(range(11), 5)(2)[:].tolist() == [3, 9, 8, 0, 7, 6, 2, 4, 10, 5, 1]


def test_permutation_moves_samples_to_any_position():
    """Chi-squared over where each of 20 samples lands, beside numpy's own shuffle."""
    landed = np.zeros((20, 20))
    for epoch in range(1000):
        landed[np.arange(20), LowMemory(range(20), 0)(epoch)[:]] += 1
    chi_squared = ((landed - 50) ** 2 / 50).sum()
    degrees = 19 * 19
    assert abs(chi_squared - degrees) < 4 * np.sqrt(2 * degrees)


def test_a_billion_samples_cost_no_memory_and_no_time():
    order = default_order(range(1_000_000_000), seed=1)
    sampler = UpdateSampler(order, batch_size=4096, rank=511, world_size=512)
    batch_slices = [sampler.batch_slices(3, update) for update in (0, 100_000, len(sampler) - 1)]
    drawn = [
        index for update in batch_slices for batch_slice in update for index in batch_slice.indices
    ]
    assert len(set(drawn)) == len(drawn)
    assert max(drawn) > 500_000_000


def test_the_order_of_a_data_set_without_a_sampler(monkeypatch):
    assert default_order(range(4), 0, shuffle=False)(7).tolist() == [0, 1, 2, 3]
    assert isinstance(default_order(Stream(range(9)), 0), Sequential)
    assert isinstance(default_order(range(10), 0), Shuffled)
    monkeypatch.setattr(samplers, "HUGE", 10)
    assert isinstance(huge := default_order(range(10), 0), LowMemory)
    assert as_order(huge, seed=1) is huge
    assert as_order([4, 2, 0], seed=0)(6).tolist() == [4, 2, 0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: UpdateSampler(Sequential(3), batch_size=4, drop_last=True), "drop_last.*size=4"),
        (lambda: UpdateSampler(Sequential(0), batch_size=4), r"data\.root"),
        (lambda: Weighted(Labelled(), 0, [1.0]), "loader.sampler.*1 weights for 100"),
        (lambda: Weighted(Labelled(), 0, [0.0] * 100), "loader.sampler.*not all 0"),
        (lambda: Weighted(Labelled(), 0, [-1.0] * 100), "loader.sampler.*none negative"),
        (lambda: ClassBalanced([1, 2], 0), "loader.sampler.*no `targets`"),
        (lambda: Subset(Labelled(), 0, size=101), "loader.sampler.*none or too many"),
        (lambda: PerClass(Labelled(), 0, 4, 1), r"loader\.batch_sampler\.classes=4"),
        (lambda: SamplerOrder(Lucky("own"), 0), "another order when the same epoch is read again"),
        (lambda: SamplerOrder(Lucky("shrinking"), 0)(1), "gives 49 in epoch 1, but 50 in epoch 0"),
        (lambda: as_order(SHARED, 0), "DistributedSampler is not needed"),
        (lambda: GivenBatches([[1], []], 0), "gives no batches, or empty ones"),
    ],
)
def test_no_update_names_the_keys(make, text):
    with pytest.raises(DataError, match=text):
        make()


def _batches():
    return torch_data.BatchSampler(torch_data.RandomSampler(range(23)), 5, drop_last=False)


def test_batch_sampler_defines_the_updates():
    updates = as_updates(_batches(), seed=4)
    sampler = UpdateSampler(updates, batch_size=1, gradient_accumulation_steps=2)
    assert len(sampler) == 5
    epoch = [
        i
        for t in range(5)
        for batch_slice in sampler.batch_slices(1, t)
        for i in batch_slice.indices
    ]
    assert sorted(epoch) == list(range(23))
    again = UpdateSampler(as_updates(_batches(), seed=4), batch_size=1)
    for t in (4, 0, 2):
        assert list(again.batch_slices(1, t)[0].indices) == epoch[5 * t : 5 * t + 5]
    other = [
        i
        for t in range(5)
        for batch_slice in sampler.batch_slices(2, t)
        for i in batch_slice.indices
    ]
    assert other != epoch


def test_per_class_updates_have_the_number_of_classes_and_samples():
    updates = PerClass(Labelled(), seed=0, classes=2, samples_per_class=4)
    sampler = UpdateSampler(as_updates(updates, seed=0), batch_size=1)
    assert len(sampler) == 12
    for update in range(12):
        drawn = sampler.batch_slices(0, update)[0].indices
        counts = np.bincount(Labelled.targets[list(drawn)], minlength=3)
        assert sorted(counts) == [0, 4, 4]
        assert len(set(drawn)) == (8 if counts[2] == 0 else 5)  # class 2 has one sample
    first = [UpdateSampler(updates, batch_size=1).batch_slices(0, 1)[0].indices for _ in range(2)]
    assert first[0] == first[1] != sampler.batch_slices(1, 1)[0].indices


def _counted(order):
    """Count one by one how often each sample was drawn before."""
    seen = {}
    found = []
    for index in order:
        found.append(seen.get(index, 0))
        seen[index] = seen.get(index, 0) + 1
    return found


@settings(max_examples=60, deadline=None)
@given(order=st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_occurrences_equal_those_counted_in_a_loop(order):
    found = occurrences_in(np.array(order, np.int64))
    expected = _counted(order)
    assert any(expected) == (found is not None)
    assert found is None or found.tolist() == expected


def _mixed():
    sets = {"large": list(range(40)), "small": list(range(7))}
    return default_order(Mixture(sets, {"large": 1, "small": 1}), seed=3)


class _Twice:
    """Updates of one's own, which hold what the one before them held."""

    def __len__(self):
        return 6

    def samples(self, epoch, update):
        return np.arange(4) + update // 2


REPEATING = {
    "balanced": lambda: ClassBalanced(Labelled(), 1),
    "mixture": _mixed,
    "with-replacement": lambda: as_order(
        torch_data.RandomSampler(range(30), replacement=True, num_samples=50), 1
    ),
    "repeated-augmentation": lambda: Repeated(Labelled(), 1, spread=9, repeats=4, round_to=10),
    "repeated": lambda: as_order([i for i in range(12) for _ in range(3)], 1),
    "batches": lambda: as_updates([[1, 2, 1], [2, 3], [1, 1, 4, 2]], 1),
    "per-class": lambda: PerClass(Labelled(), 1, classes=3, samples_per_class=2),
    "own-updates": _Twice,
}


@pytest.mark.parametrize("make", REPEATING.values(), ids=REPEATING)
@pytest.mark.parametrize(("accumulation", "world"), [(1, 1), (3, 1), (2, 2), (4, 3)])
def test_a_repeated_sample_is_numbered_by_the_epoch_whatever_the_split(make, accumulation, world):
    whole = UpdateSampler(make(), batch_size=9)
    cut = {"gradient_accumulation_steps": accumulation, "world_size": world}
    samplers = [UpdateSampler(make(), batch_size=9, **cut, rank=rank) for rank in range(world)]
    for epoch in (0, 1):
        updates = range(len(whole))
        drawn = [whole.batch_slices(epoch, update)[0].draws() for update in updates]
        every = [pair for draws in drawn for pair in draws]
        expected = _counted(index for index, _ in every)
        assert [occurrence for _, occurrence in every] == expected
        assert max(expected) > 0
        for update in reversed(updates):  # as after a resume, whatever came before
            per_rank = [sampler.batch_slices(epoch, update) for sampler in samplers]
            batch_slices = [
                batch_slice for column in zip(*per_rank, strict=True) for batch_slice in column
            ]
            assert [d for p in batch_slices if p.count for d in p.draws()] == drawn[update]
            borrowed = [
                batch_slice.draws() for batch_slice in batch_slices if not batch_slice.count
            ]
            assert borrowed == [drawn[update][:1]] * len(borrowed)


@pytest.mark.parametrize("name", ["shuffled", "subset", "low-memory"])
def test_orders_without_repetitions_are_not_searched_for_them(name, monkeypatch):
    monkeypatch.setattr(samplers, "occurrences_in", lambda order: pytest.fail("searched"))
    sampler = UpdateSampler(ORDERS[name](1), batch_size=16)
    assert all(batch_slice.occurrences == () for batch_slice in sampler.walk(0, 0, len(sampler)))
