"""Loading: the same tensors for any number of workers, from any position, and every fault told."""

import ctypes
import errno
import multiprocessing
import os
import random
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import tv_tensors

from data.errors import DataError, WorkerError
from data.loading.fetch import memory_error
from data.loading.loader import Loader
from data.orders import Sequential, Shuffled
from data.sources import Digits
from data.updates import UpdateSampler


@contextmanager
def loading(dataset: Any, order: Any = None, batch_size: int = 6, **options: Any) -> Iterator[Any]:
    sampler = UpdateSampler(order or Shuffled(len(dataset), 5), batch_size=batch_size)
    loader = Loader(dataset, sampler, seed=5, **options)
    try:
        yield loader
    finally:
        loader.close()


def processes(loader: Loader) -> list[Any]:
    assert loader._workers is not None
    return list(loader._workers.processes)


def drain(loader: Loader, epoch: int, start: int = 0) -> list[torch.Tensor]:
    return [micro.batch[0] for micro in loader.epoch(epoch, start)]


def drain_until(loader: Loader, stop: int) -> list[torch.Tensor]:
    return [micro.batch[0] for micro in loader.epoch(0, 0, stop)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_change_order_or_augmentation(
    noisy: Any, workers: int, persistent: bool
) -> None:
    options = {"num_workers": workers, "persistent_workers": persistent}
    with (  # more batches than all workers have ahead
        loading(noisy(), batch_size=2) as plain,
        loading(noisy(), batch_size=2, **options) as parallel,
    ):
        epochs = [drain(plain, epoch) for epoch in range(2)]
        assert same(drain(parallel, 0), epochs[0])
        assert same(drain(parallel, 1), epochs[1])
        assert same(drain(parallel, 1, start=2), epochs[1][2:])
    assert not same(*epochs)


def test_augmentation_is_keyed_by_the_sample_not_by_its_place(noisy: Any) -> None:
    with loading(noisy()) as shuffled, loading(noisy(), Sequential(20)) as sequential:
        one = torch.cat(drain(shuffled, 3))
        other = torch.cat(drain(sequential, 3))
    assert not torch.equal(one, other)
    assert torch.equal(one[one[:, 0].argsort()], other)
    assert len(one[:, 1:].unique()) == 60


def test_accumulation_and_ranks_do_not_change_a_sample(noisy: Any) -> None:
    with loading(noisy()) as loader:
        whole = torch.cat(drain(loader, 1))
    parts: list[torch.Tensor] = []
    for rank in range(2):
        sampler = UpdateSampler(
            Shuffled(20, 5),
            batch_size=6,
            gradient_accumulation_steps=2,
            rank=rank,
            world_size=2,
        )
        loader = Loader(noisy(), sampler, seed=5)
        parts += [micro.batch[0][: micro.piece.count] for micro in loader.epoch(1)]
    joined = torch.cat(parts)
    assert torch.equal(joined[joined[:, 0].argsort()], whole[whole[:, 0].argsort()])


@pytest.mark.parametrize("workers", [0, 2])
def test_start_equals_the_tail_and_stop_the_head(noisy: Any, workers: int) -> None:
    with loading(noisy(), num_workers=workers) as loader:
        whole = drain(loader, 1)
        for start in range(5):
            assert same(drain(loader, 1, start), whole[start:])
        assert same([micro.batch[0] for micro in loader.epoch(1, 1, 3)], whole[1:3])


@pytest.mark.parametrize("workers", [0, 2])
def test_training_rng_is_untouched(noisy: Any, workers: int) -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = (torch.rand(3), random.random(), np.random.random())
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    with loading(noisy(), num_workers=workers) as loader:
        drain(loader, 0)
        assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.random()) == expected[1:]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_exception_names_sample_and_file(noisy: Any, workers: int) -> None:
    with (
        loading(noisy(bad={10: "raise"}), num_workers=workers) as loader,
        pytest.raises(DataError) as caught,
    ):
        drain(loader, 0)
    assert str(caught.value) == "sample 10 (/pictures/10.jpg): ValueError: broken in two lines"
    assert "in __getitem__" in caught.value.__notes__[0]
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        pytest.param("kill", "was killed by SIGKILL at sample 10", id="killed"),
        pytest.param("exit", "left with exit code 3 at sample 10", id="exit"),
        pytest.param("hang", r"gave no batch for 2 s \(loader.timeout\) at sample 10", id="hang"),
    ],
)
def test_lost_worker_is_named_with_its_sample(noisy: Any, fault: str, text: str) -> None:
    with (
        loading(noisy(bad={10: fault}), num_workers=2, timeout=2.0) as loader,
        pytest.raises(WorkerError, match=text) as caught,
    ):
        drain(loader, 0)
    assert caught.value.exit_code == 8
    assert "\n" not in str(caught.value)


def test_a_worker_that_stops_before_it_hands_its_batch_over_is_named(noisy: Any) -> None:
    with loading(noisy(), num_workers=1, timeout=2.0) as loader:
        epoch = loader.epoch(0)
        next(epoch)
        os.kill(processes(loader)[0].pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"worker 0 gave no batch for 2 s \(loader.timeout\)"):
            list(epoch)


def test_memory_error_is_a_worker_error(noisy: Any) -> None:
    with loading(noisy(bad={4: "memory"})) as loader, pytest.raises(WorkerError, match="memory"):
        drain(loader, 0)


def test_workers_survive_signals_to_the_group_and_leave_with_the_loader(noisy: Any) -> None:
    with loading(noisy(), num_workers=2, persistent_workers=True) as loader:
        before = signal.getsignal(signal.SIGCHLD)
        expected = drain(loader, 0)
        workers = processes(loader)
        for worker in workers:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                os.kill(worker.pid, number)
        assert same(drain(loader, 0), expected)
        assert signal.getsignal(signal.SIGCHLD) == before
    assert not any(worker.is_alive() for worker in workers)


def test_hung_worker_of_an_abandoned_epoch_does_not_hold_up_the_next(noisy: Any) -> None:
    dataset = noisy(bad={19: "hang"})
    with loading(dataset, Sequential(20), num_workers=1, persistent_workers=True) as loader:
        hung = loader.epoch(0, start=2)
        next(hung)
        assert same(drain_until(loader, 2), drain_until(loader, 2))
        hung.close()


def test_abandoned_epoch_leaves_no_worker(noisy: Any) -> None:
    with loading(noisy(), num_workers=2) as loader:
        epoch = loader.epoch(0)
        next(epoch)
        workers = processes(loader)
        assert len(workers) == 2
        epoch.close()
        assert not any(worker.is_alive() for worker in workers)


def test_close_kills_a_worker_that_hangs(noisy: Any) -> None:
    with loading(noisy(bad={19: "hang"}), Sequential(20), num_workers=1) as loader:
        epoch = loader.epoch(0)
        next(epoch)
        workers = processes(loader)
    assert not workers[0].is_alive()


def _fail(worker_id: int) -> None:
    raise ValueError(f"worker {worker_id} has no licence")


def test_failing_worker_init_is_told(noisy: Any) -> None:
    with (
        loading(noisy(), num_workers=1, worker_init_fn=_fail) as loader,
        pytest.raises(WorkerError, match="worker 0 has no licence"),
    ):
        drain(loader, 0)


def test_unpicklable_data_set_with_spawn_names_the_key(noisy: Any) -> None:
    dataset = noisy()
    dataset.secret = lambda: None
    with (
        loading(dataset, num_workers=1, multiprocessing_context="spawn") as loader,
        pytest.raises(DataError, match=r"loader\.multiprocessing_context"),
    ):
        drain(loader, 0)


class _Ragged:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(index + 1)


def test_ragged_samples_name_themselves_and_the_keys() -> None:
    with (
        loading(_Ragged(), Sequential(4), batch_size=4) as loader,
        pytest.raises(DataError, match=r"samples 0, 1, 2, 3 .*transforms, loader\.collate_fn"),
    ):
        drain(loader, 0)


def test_worker_options_are_harmless_without_workers(noisy: Any) -> None:
    options = {"prefetch_factor": 4, "persistent_workers": True, "timeout": 9.0}
    with loading(noisy(), multiprocessing_context="fork", **options) as loader:
        assert len(drain(loader, 0)) == len(loader) == 4


class _Relabelled(Digits):
    """What a user writes to change samples: it must not be passed over by a fast path."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = super().__getitem__(index)
        return image, 9 - label


@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_a_subclass_with_samples_of_its_own_is_asked_for_them(on_error: Any) -> None:
    plain, own = Digits("val"), _Relabelled("val")
    labels = {}
    for dataset in (plain, own):
        sampler = UpdateSampler(Sequential(len(dataset)), batch_size=32)
        loader = Loader(dataset, sampler, seed=0, on_error=on_error)
        labels[dataset] = torch.cat([micro.batch[1] for micro in loader.epoch(0)])
    assert torch.equal(labels[own], 9 - labels[plain])


class _Kinds:
    """Samples of everything that a batch may hold."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {
            "half": torch.full((3, 2), index, dtype=torch.bfloat16),
            "bits": torch.tensor([True, False]),
            "complex": torch.ones(2, dtype=torch.complex64).conj(),
            "none": torch.empty(0, 3),
            "sparse": torch.eye(3).to_sparse(),
            "image": tv_tensors.Image(torch.ones(1, 2, 2)),
            "number": torch.tensor(float(index)),
            "deep": SimpleNamespace(text="a", tensor=torch.arange(6).view(2, 3).T),
        }


def _as_list(samples: list[Any]) -> Any:
    return samples


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_whatever_a_batch_holds_comes_from_a_worker_as_it_is(context: str) -> None:
    with (
        loading(_Kinds(), Sequential(4), collate_fn=_as_list) as plain,
        loading(
            _Kinds(),
            Sequential(4),
            collate_fn=_as_list,
            num_workers=1,
            multiprocessing_context=context,
        ) as parallel,
    ):
        expected, found = (next(iter(loader.epoch(0))).batch for loader in (plain, parallel))
    for one, other in zip(expected, found, strict=True):
        deep, same_deep = one.pop("deep"), other.pop("deep")
        assert torch.equal(deep.tensor, same_deep.tensor)
        assert deep.text == same_deep.text
        for name, value in one.items():
            assert type(other[name]) is type(value)
            assert other[name].dtype == value.dtype
            assert torch.equal(other[name].to_dense(), value.to_dense())
        other["half"].add_(1)  # it is the receiver's own
        assert not torch.equal(other["half"], one["half"])


class _Unsendable(_Kinds):
    def __getitem__(self, index: int) -> Any:
        return threading.Lock()


def test_a_batch_that_cannot_be_sent_is_an_error_not_a_hang() -> None:
    with (
        loading(_Unsendable(), num_workers=1, collate_fn=_as_list) as loader,
        pytest.raises(DataError, match=r"cannot be sent from a worker process .*lock"),
    ):
        next(loader.epoch(0))


def test_workers_leave_when_their_parent_is_gone(noisy: Any) -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if not parent:
        try:
            sampler = UpdateSampler(Sequential(20), batch_size=6)
            loader = Loader(noisy(), sampler, seed=5, num_workers=2)
            epoch = loader.epoch(0)
            next(epoch)
            os.write(writer, b"".join(worker.pid.to_bytes(4) for worker in processes(loader)))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    for pid in (int.from_bytes(os.read(reader, 4)) for _ in range(2)):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([descriptor], [], [], 20)[0]
        os.close(descriptor)


NEW_MOUNTS = 0x00020000  # CLONE_NEWNS


def _first_batch(noisy: Any) -> None:
    ctypes.CDLL(None).unshare(NEW_MOUNTS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", "/dev/shm"], check=True)
    with loading(noisy(), num_workers=2, multiprocessing_context="fork") as loader:
        next(loader.epoch(0))


def test_a_small_dev_shm_is_enough(noisy: Any) -> None:
    """Containers have 64 MB there, which torch's workers fill."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_first_batch, args=(noisy,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(MemoryError(), "out of memory", id="python"),
        pytest.param(OSError(errno.ENOMEM, "Cannot allocate"), "out of memory", id="system"),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out", id="torch"),
        pytest.param(RuntimeError("sizes differ"), None, id="another"),
    ],
)
def test_what_is_a_lack_of_memory(error: Exception, text: str | None) -> None:
    found = memory_error(error)
    assert (found is None) == (text is None)
    assert text is None or text in str(found)
