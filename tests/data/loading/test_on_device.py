"""Batches on their device: a pass-through on a CPU, one ahead elsewhere."""

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from data.batch import MicroBatch, Piece, to_device
from data.errors import DataError
from data.loading import on_device as prefetch
from data.loading.device_transforms import DeviceTransforms
from data.loading.loader import Loader
from data.loading.on_device import OnDevice, one_ahead
from data.orders import Sequential
from data.updates import UpdateSampler

CPU = torch.device("cpu")


@pytest.mark.parametrize("prefetch", [False, True])
def test_on_a_cpu_batches_pass_through(noisy: Any, prefetch: bool) -> None:
    def loader() -> Loader:
        return Loader(noisy(), UpdateSampler(Sequential(20), batch_size=6), seed=1)

    on_device = OnDevice(loader(), CPU, prefetch=prefetch)
    plain, moved = list(loader().epoch(1, 1, 3)), list(on_device.epoch(1, 1, 3))
    assert [m.piece for m in moved] == [m.piece for m in plain]
    assert all(torch.equal(a.batch[0], b.batch[0]) for a, b in zip(plain, moved, strict=True))
    assert len(on_device) == 4
    assert on_device.skipped == []
    on_device.close()


def test_device_transforms_are_applied(noisy: Any) -> None:
    loader = Loader(noisy(), UpdateSampler(Sequential(20), batch_size=6), seed=1)
    transforms = DeviceTransforms({"double": lambda inputs: inputs * 2}, seed=1)
    (micro, *_) = OnDevice(loader, CPU, transforms=transforms).epoch(0)
    assert micro.batch[0][:, 0].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def _micro(number: int) -> MicroBatch:
    return MicroBatch(torch.tensor([number]), Piece((number,), 1, 0, 1, 0, 1, 0, number))


class Recorder:
    """A side stream that notes what happens in which order."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def launch(self, move: Any, micro: MicroBatch) -> MicroBatch:
        self.events.append(f"launch {micro.piece.update}")
        moved: MicroBatch = move(micro)
        return moved

    def collect(self, ticket: MicroBatch) -> MicroBatch:
        self.events.append(f"collect {ticket.piece.update}")
        return ticket


def test_one_ahead_launches_the_next_before_handing_out_this_one() -> None:
    events: list[str] = []
    ahead = one_ahead(map(_micro, range(3)), Recorder(events), lambda micro: micro)
    events.extend(f"use {int(micro.batch)}" for micro in ahead)
    assert events == [
        *("launch 0", "launch 1", "collect 0", "use 0"),
        *("launch 2", "collect 1", "use 1", "collect 2", "use 2"),
    ]


def test_an_error_ahead_is_raised_after_what_came_before_it() -> None:
    def source() -> Iterator[MicroBatch]:
        yield _micro(0)
        yield _micro(1)
        raise DataError("sample 2")

    used: list[int] = []
    ahead = one_ahead(source(), Recorder([]), lambda micro: micro)
    with pytest.raises(DataError, match="sample 2"):
        used.extend(int(micro.batch) for micro in ahead)
    assert used == [0, 1]


def test_a_device_has_one_side_stream(noisy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of each stream is its own: one for every epoch would keep a batch in each."""
    made: list[torch.device] = []

    class Counted(Recorder):
        def __init__(self, device: torch.device) -> None:
            super().__init__([])
            made.append(device)

    monkeypatch.setattr(prefetch, "SideStream", Counted)
    monkeypatch.setattr(prefetch, "to_device", lambda batch, *_, **__: batch)
    prefetch.side_stream.cache_clear()
    for _ in range(2):  # loaders, as of training and validation
        loader = Loader(noisy(), UpdateSampler(Sequential(20), batch_size=6), seed=1)
        on_device = OnDevice(loader, torch.device("cuda", 1))
        for epoch in range(2):
            assert len(list(on_device.epoch(epoch))) == 4
    prefetch.side_stream.cache_clear()
    assert made == [torch.device("cuda", 1)]


def test_an_empty_source() -> None:
    assert list(one_ahead(iter(()), Recorder([]), lambda micro: micro)) == []


Point = namedtuple("Point", "x y")


def test_nested_batches_keep_their_form_and_their_other_leaves() -> None:
    batch = {"a": [torch.zeros(2), "text"], "b": Point(torch.ones(1), None), "c": (3,)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1] == "text"
    assert isinstance(moved["b"], Point)
    assert (moved["b"].y, moved["c"]) == (None, (3,))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_gpu_batches_are_those_of_the_cpu(noisy: Any, workers: int) -> None:
    def loader(**options: Any) -> Loader:
        return Loader(noisy(), UpdateSampler(Sequential(20), batch_size=6), seed=1, **options)

    device = torch.device("cuda", 0)
    moved = OnDevice(loader(num_workers=workers, pin_memory=True), device)
    for plain, micro in zip(loader().epoch(0), moved.epoch(0), strict=True):
        assert micro.batch[0].is_cuda
        assert torch.equal(micro.batch[0].cpu(), plain.batch[0])
    moved.close()
