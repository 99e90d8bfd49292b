"""Orders and updates: pure functions of (seed, epoch), whoever brings them and however split."""

import random
from collections import Counter

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
        samples = self.samples
        if self.source == "shrinking":
            samples -= self.epoch
        order = list(range(samples))
        shuffles = {
            "random": random.shuffle,
            "numpy": np.random.shuffle,
            "epoch": random.Random(self.epoch).shuffle,
            "own": self.own.shuffle,
        }
        if self.source in shuffles:
            shuffles[self.source](order)
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


def of_sampler(name):
    """Return a function from a seed to the order that is read from a sampler of `READ`."""
    return lambda seed: as_order(READ[name](), seed)


ORDERS = {
    "shuffled": lambda seed: Shuffled(100, seed),
    "weighted": lambda seed: Weighted(Labelled(), seed, np.arange(100.0).tolist()),
    "balanced": lambda seed: ClassBalanced(Labelled(), seed),
    "subset": lambda seed: Subset(Labelled(), seed, size=0.4),
    "low-memory": lambda seed: LowMemory(Labelled(), seed),
    "repeated": lambda seed: Repeated(Labelled(), seed, spread=16, round_to=16),
    **{name: of_sampler(name) for name in READ},
}


@pytest.mark.quick
@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
def test_orders_are_pure_functions_of_seed_and_epoch(make):
    order = make(1)
    first = order(0)[0:40]

    assert first.dtype == np.int64
    assert 0 <= first.min() <= first.max() < 100
    same_seed = make(1)
    assert np.array_equal(first, same_seed(0)[0:40])
    assert not np.array_equal(first, order(1)[0:40])
    assert np.array_equal(first, order(0)[0:40])  # whatever was read in between
    if not isinstance(order, SamplerOrder):  # which may have a seed of its own
        other_seed = make(2)
        assert not np.array_equal(first, other_seed(0)[0:40])


@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
def test_orders_leave_the_generators_of_the_training_alone(make):
    torch_state = torch.get_rng_state()
    python_state = random.getstate()

    order = make(1)
    for epoch in (0, 1):
        order(epoch)[0:40]

    assert random.getstate() == python_state
    assert torch.equal(torch.get_rng_state(), torch_state)


KINDS = [lambda samples: Shuffled(samples, 1), lambda samples: LowMemory(range(samples), 1)]


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1, 60), batch=st.integers(1, 20), kind=st.sampled_from(KINDS))
def test_orders_hold_each_sample_once_and_are_read_in_slices(samples, batch, kind):
    order = kind(samples)

    whole = order(0)[:]

    assert sorted(whole) == list(range(samples))
    assert np.array_equal(whole[::-1], order(0)[::-1])
    for start in range(0, samples, batch):
        end = min(start + batch, samples)
        assert order(0)[start:end].tolist() == whole[start:end].tolist()
    batch = min(batch, samples)
    dropping = UpdateSampler(order, batch_size=batch, drop_last=True)
    assert len(dropping) == samples // batch


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 20),
    accumulation=st.integers(1, 5),
    world=st.integers(1, 5),
    kind=st.sampled_from(KINDS),
)
def test_batch_slices_of_all_ranks_partition_the_update(samples, batch, accumulation, world, kind):
    order = kind(samples)
    cut = {"batch_size": batch, "gradient_accumulation_steps": accumulation, "world_size": world}
    samplers = [UpdateSampler(order, **cut, rank=rank) for rank in range(world)]

    for update in range(len(samplers[0])):
        expected = order(0)[:][update * batch :][:batch].tolist()
        per_rank = [sampler.batch_slices(0, update) for sampler in samplers]
        assert len({len(batch_slices) for batch_slices in per_rank}) == 1

        # The first micro-batches of all ranks, then the second ones.
        every = [batch_slice for column in zip(*per_rank, strict=True) for batch_slice in column]
        own = [batch_slice for batch_slice in every if batch_slice.count]
        found = []
        for batch_slice in own:
            assert batch_slice.start == len(found)
            found += batch_slice.indices
        assert found == expected
        parts = np.array_split(expected, accumulation * world)
        sizes = [len(part) for part in parts if len(part)]
        assert [batch_slice.count for batch_slice in own] == sizes

        for batch_slices in per_rank:
            for position, batch_slice in enumerate(batch_slices):
                assert batch_slice.total == len(expected)
                assert batch_slice.micro_batch == position
                assert batch_slice.micro_batches == len(batch_slices)
                if batch_slice.count == 0:  # it borrows the update's first sample
                    assert batch_slice.indices == (expected[0],)
                    assert batch_slice.start == 0


def test_weights_say_how_often_a_sample_is_drawn():
    weights = [1.0] * 50 + [3.0] * 50

    order = Weighted(Labelled(), 0, weights, num_samples=40000)

    counts = np.bincount(order(0), minlength=100)
    share = counts[50:].sum() / 40000
    assert abs(share - 0.75) < 0.01
    assert counts.min() > 100


def test_class_balanced_draws_classes_equally_often():
    order = ClassBalanced(Labelled(), 0, num_samples=30000)

    counts = np.bincount(Labelled.targets[order(0)])
    shares = counts / 30000
    assert np.abs(shares - 1 / 3).max() < 0.01


def test_class_balanced_of_power_zero_draws_classes_as_often_as_they_are():
    order = ClassBalanced(Labelled(), 0, power=0.0, num_samples=30000)

    is_first_class = Labelled.targets[order(0)] == 0
    assert abs(is_first_class.mean() - 0.9) < 0.01


def test_subset_is_stratified_and_the_same_for_every_seed():
    one = Subset(Labelled(), 1, size=20)
    other = Subset(Labelled(), 2, size=20)

    chosen = one(0)
    assert set(chosen) == set(other(5))
    assert np.bincount(Labelled.targets[chosen]).tolist() == [18, 1, 1]
    in_order = Subset(Labelled(), 0, size=20, shuffle=False)
    assert in_order(4).tolist() == sorted(chosen)


def test_the_size_of_a_subset_is_a_number_or_a_fraction():
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
    if length == 0:
        with pytest.raises(DataError, match=rf"round_to={round_to}.*has {samples}"):
            Repeated(range(samples), 3, batch, repeats, round_to)
        return

    order = Repeated(range(samples), 3, batch, repeats, round_to)

    assert len(order) == len(order(0)) == length
    updates = UpdateSampler(order, batch_size=batch).updates
    for epoch in (0, 1):
        shuffled = Shuffled(samples, 3)(epoch)
        in_a_row = np.repeat(shuffled, repeats)[:length]
        for update in range(len(updates)):
            ours = updates.samples(epoch, update)
            theirs = in_a_row[update * batch :][:batch]
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
    order = LowMemory(range(20), 0)
    landed = np.zeros((20, 20))
    for epoch in range(1000):
        landed[np.arange(20), order(epoch)[:]] += 1

    expected = 1000 / 20
    chi_squared = ((landed - expected) ** 2 / expected).sum()
    degrees = 19 * 19
    standard_deviation = np.sqrt(2 * degrees)
    assert abs(chi_squared - degrees) < 4 * standard_deviation


def test_a_billion_samples_cost_no_memory_and_no_time():
    order = default_order(range(1_000_000_000), seed=1)
    sampler = UpdateSampler(order, batch_size=4096, rank=511, world_size=512)

    drawn = []
    for update in (0, 100_000, len(sampler) - 1):
        drawn += indices_of(sampler, 3, update)

    assert len(set(drawn)) == len(drawn)
    assert max(drawn) > 500_000_000


def indices_of(sampler, epoch, update):
    """Return the samples of a rank's micro-batches, in their order."""
    indices = []
    for batch_slice in sampler.batch_slices(epoch, update):
        indices += batch_slice.indices
    return indices


def test_the_order_of_a_data_set_without_a_sampler(monkeypatch):
    unshuffled = default_order(range(4), 0, shuffle=False)
    assert unshuffled(7).tolist() == [0, 1, 2, 3]
    assert isinstance(default_order(Stream(range(9)), 0), Sequential)
    assert isinstance(default_order(range(10), 0), Shuffled)
    monkeypatch.setattr(samplers, "HUGE", 10)
    assert isinstance(default_order(range(10), 0), LowMemory)


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


def test_an_order_or_a_list_is_an_order():
    order = LowMemory(range(10), 0)

    assert as_order(order, seed=1) is order
    of_list = as_order([4, 2, 0], seed=0)
    assert of_list(6).tolist() == [4, 2, 0]


def epoch_of(sampler, epoch):
    drawn = []
    for update in range(len(sampler)):
        drawn += indices_of(sampler, epoch, update)
    return drawn


def test_batch_sampler_defines_the_updates():
    sampler = UpdateSampler(
        as_updates(_batches(), seed=4), batch_size=1, gradient_accumulation_steps=2
    )
    again = UpdateSampler(as_updates(_batches(), seed=4), batch_size=1)

    assert len(sampler) == 5
    drawn = epoch_of(sampler, 1)
    assert sorted(drawn) == list(range(23))
    for update in (4, 0, 2):
        assert indices_of(again, 1, update) == drawn[5 * update :][:5]
    assert epoch_of(sampler, 2) != drawn


def test_per_class_updates_have_the_number_of_classes_and_samples():
    updates = PerClass(Labelled(), seed=0, classes=2, samples_per_class=4)
    sampler = UpdateSampler(as_updates(updates, seed=0), batch_size=1)

    assert len(sampler) == 12
    for update in range(12):
        drawn = indices_of(sampler, 0, update)
        counts = np.bincount(Labelled.targets[drawn], minlength=3)
        assert sorted(counts) == [0, 4, 4]
        # Class 2 has one sample, which is drawn four times.
        different = 8 if counts[2] == 0 else 5
        assert len(set(drawn)) == different


def test_per_class_updates_are_functions_of_the_epoch():
    updates = PerClass(Labelled(), seed=0, classes=2, samples_per_class=4)
    drawn = indices_of(UpdateSampler(updates, batch_size=1), 0, 1)

    again = UpdateSampler(updates, batch_size=1)

    assert indices_of(again, 0, 1) == drawn
    assert indices_of(again, 1, 1) != drawn


def _counted(order):
    """Count one by one how often each sample was drawn before."""
    drawn_before = Counter()
    counts = []
    for index in order:
        counts.append(drawn_before[index])
        drawn_before[index] += 1
    return counts


@settings(max_examples=60, deadline=None)
@given(order=st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_occurrences_equal_those_counted_in_a_loop(order):
    found = occurrences_in(np.array(order, np.int64))

    expected = _counted(order)
    if any(expected):
        assert found.tolist() == expected
    else:
        assert found is None


def _mixed():
    sets = {"large": list(range(40)), "small": list(range(7))}
    return default_order(Mixture(sets, {"large": 1, "small": 1}), seed=3)


class _Twice:
    """Updates of one's own, which hold what the one before them held."""

    def __len__(self):
        return 6

    def samples(self, epoch, update):
        return np.arange(4) + update // 2


THREE_EACH = np.repeat(range(12), 3).tolist()
WITH_REPLACEMENT = {"replacement": True, "num_samples": 50}


REPEATING = {
    "balanced": lambda: ClassBalanced(Labelled(), 1),
    "mixture": _mixed,
    "with-replacement": lambda: as_order(
        torch_data.RandomSampler(range(30), **WITH_REPLACEMENT), 1
    ),
    "repeated-augmentation": lambda: Repeated(Labelled(), 1, spread=9, repeats=4, round_to=10),
    "repeated": lambda: as_order(THREE_EACH, 1),
    "batches": lambda: as_updates([[1, 2, 1], [2, 3], [1, 1, 4, 2]], 1),
    "per-class": lambda: PerClass(Labelled(), 1, classes=3, samples_per_class=2),
    "own-updates": _Twice,
}


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("make", REPEATING.values(), ids=REPEATING)
def test_a_repeated_sample_is_numbered_by_the_epoch(make, epoch):
    drawn = []
    for draws in draws_of_updates(make(), epoch):
        drawn += draws

    occurrences = [occurrence for _, occurrence in drawn]
    assert occurrences == _counted(index for index, _ in drawn)
    assert max(occurrences) > 0


def draws_of_updates(order, epoch):
    """Return the pairs (sample, how often it was drawn before) of each update on one process."""
    sampler = UpdateSampler(order, batch_size=9)
    draws = []
    for update in range(len(sampler)):
        (batch_slice,) = sampler.batch_slices(epoch, update)
        draws.append(batch_slice.draws())
    return draws


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("make", REPEATING.values(), ids=REPEATING)
@pytest.mark.parametrize(("accumulation", "world"), [(1, 1), (3, 1), (2, 2), (4, 3)])
def test_a_repeated_sample_has_the_same_number_whatever_the_split(make, accumulation, world, epoch):
    expected = draws_of_updates(make(), epoch)
    cut = {"gradient_accumulation_steps": accumulation, "world_size": world}
    samplers = [UpdateSampler(make(), batch_size=9, **cut, rank=rank) for rank in range(world)]

    for update in reversed(range(len(expected))):  # as after a resume, whatever came before
        per_rank = [sampler.batch_slices(epoch, update) for sampler in samplers]
        found = []
        for column in zip(*per_rank, strict=True):
            for batch_slice in column:
                if batch_slice.count:
                    found += batch_slice.draws()
                else:  # it borrows the update's first sample
                    assert list(batch_slice.draws()) == list(expected[update][:1])
        assert found == list(expected[update])


@pytest.mark.parametrize("name", ["shuffled", "subset", "low-memory"])
def test_orders_without_repetitions_are_not_searched_for_them(name, monkeypatch):
    monkeypatch.setattr(samplers, "occurrences_in", lambda order: pytest.fail("searched"))

    sampler = UpdateSampler(ORDERS[name](1), batch_size=16)

    for batch_slice in sampler.walk(0, 0, len(sampler)):
        assert batch_slice.occurrences == ()
