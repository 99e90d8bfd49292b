"""Streams: the same batches for any number of workers and ranks, resumed by count."""

import random

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from regimen.data.errors import DataError
from regimen.data.loading.loader import Loader
from regimen.data.orders import Sequential
from regimen.data.samplers import UpdateSampler
from regimen.data.streams import Stream
from toy_batches import batches


class Numbers(IterableDataset[tuple[torch.Tensor, int]]):
    """20 numbers through a shuffle buffer; divides itself among workers, as many streams do."""

    def __init__(self, samples=20, jumps=False):
        self.samples = samples
        self.epoch = -1
        if jumps:
            self.iter_from = self._from

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.samples

    def __iter__(self):
        info = get_worker_info()
        step = 1 if info is None else info.num_workers
        waiting = []
        for number in range(0 if info is None else info.id, self.samples, step):
            waiting.append(number)
            if len(waiting) == 4:
                yield self._sample(waiting.pop(random.randrange(4)))
        for number in waiting:
            yield self._sample(number)

    def _from(self, position):
        for number in range(position, self.samples):
            yield self._sample(number)

    def _sample(self, number):
        return torch.tensor([float(number), self.epoch, random.random()]), number


def _same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_a_stream(workers, jumps):
    whole = batches(Numbers(jumps=jumps))

    found = batches(Numbers(jumps=jumps), workers=workers)

    assert _same(found, whole)
    numbers = torch.cat(whole)[:, 0]
    assert sorted(numbers.tolist()) == list(range(20))


@pytest.mark.parametrize("jumps", [False, True])
def test_a_stream_is_told_its_epoch(jumps):
    first = batches(Numbers(jumps=jumps))
    later = batches(Numbers(jumps=jumps), epoch=2)

    epochs = torch.cat(later)[:, 1]
    assert epochs.unique().tolist() == [2.0]
    assert not _same(first, later)
    one = Loader(Numbers(jumps=jumps), UpdateSampler(Sequential(20), batch_size=6), seed=9)
    for epoch, expected in ((0, first), (2, later)):
        assert _same([micro.batch[0] for micro in one.epoch(epoch)], expected)


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_is_resumed_at_any_update(workers, jumps):
    whole = batches(Numbers(jumps=jumps), epoch=2)

    for start in range(4):
        resumed = batches(Numbers(jumps=jumps), epoch=2, start=start, workers=workers)
        assert _same(resumed, whole[start:])


def test_ranks_share_a_stream_out():
    cut = {"world_size": 2, "gradient_accumulation_steps": 2}

    first = batches(Numbers(), rank=0, **cut)
    second = batches(Numbers(), rank=1, **cut)

    in_order = []
    for pair in zip(first, second, strict=True):
        in_order += pair
    whole = batches(Numbers())
    assert torch.equal(torch.cat(in_order), torch.cat(whole))


class _Raw:
    """Yields keys; a sample is loaded only where it is needed."""

    loaded: list[int]

    def __init__(self):
        self.loaded = []

    def __iter__(self):
        return iter(range(100))

    def load(self, key):
        self.loaded.append(key)
        return torch.tensor([float(key)]), key


def test_only_needed_samples_are_loaded_and_transformed():
    raw = _Raw()
    stream = Stream(raw, length=20, transform=lambda image: image * 10)
    found = batches(stream, start=2)
    assert torch.cat(found)[:, 0].tolist() == [10.0 * i for i in range(12, 20)]
    assert raw.loaded == list(range(12, 20))


def test_an_epoch_that_was_broken_off_is_forgotten():
    broken = Stream(Numbers())
    fresh = Stream(Numbers())
    broken.begin_epoch(0, 5)
    assert broken[2] is not None

    broken.begin_epoch(1, 6)
    fresh.begin_epoch(1, 6)

    found, _ = broken[3]
    expected, _ = fresh[3]
    assert torch.equal(found, expected)


def test_a_stream_that_ends_early_is_told():
    with pytest.raises(DataError, match="ended after 20 of 30 samples: set its length to 20"):
        batches(Stream(Numbers(), length=30))


def test_a_stream_without_a_length_or_with_replacements_is_refused():
    with pytest.raises(DataError, match=r"_Raw has no length.*data\.streams\.Stream"):
        Stream(_Raw())
    sampler = UpdateSampler(Sequential(20), batch_size=6)
    with pytest.raises(DataError, match=r"data\.on_error=skip cannot be kept for a stream"):
        Loader(Numbers(), sampler, seed=0, on_error="replace")
