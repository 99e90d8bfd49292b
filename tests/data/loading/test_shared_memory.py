"""A /dev/shm that is too small ends a run with the words that help: nothing hangs (E12)."""

import ctypes
import errno
import multiprocessing
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from data.errors import DataError, WorkerError
from data.loading.loader import Loader
from data.loading.workers import memory_error, worker_exit_message
from data.orders import Sequential
from data.updates import UpdateSampler

NEW_MOUNTS = 0x00020000  # CLONE_NEWNS


class Large:
    """Samples of 64 KB; `keep` collates them without torch's shared storage."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1 << 14)


def stacked(samples: list[torch.Tensor]) -> Any:
    """Collate in ordinary memory: it is the sending that needs the shared one."""
    return torch.stack(samples)


def first_batch(size: str, collate: Any) -> None:
    """Load with two workers and a /dev/shm of that size; leave with the error's code and text."""
    ctypes.CDLL(None).unshare(NEW_MOUNTS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", "/dev/shm"], check=True)
    try:
        loader = Loader(
            Large(),
            UpdateSampler(Sequential(64), batch_size=32),
            seed=1,
            num_workers=2,
            collate_fn=collate,
            multiprocessing_context="fork",
        )
        next(loader.epoch(0))
    except Exception as error:
        print(type(error).__name__, error, file=sys.stderr, flush=True)
        os._exit(getattr(error, "exit_code", 1))
    os._exit(0)


@pytest.fixture
def mounting() -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")


@pytest.mark.parametrize("size", ["4k", "64k", "1m"])
@pytest.mark.parametrize("collate", [None, stacked], ids=["in-collate", "in-sending"])
@pytest.mark.usefixtures("mounting")
def test_it_is_named_with_exit_code_8(size: str, collate: Any, capfd: Any) -> None:
    process = multiprocessing.get_context("fork").Process(target=first_batch, args=(size, collate))
    process.start()
    process.join(60)
    hangs = process.is_alive()
    process.kill()
    process.join()
    said = capfd.readouterr().err
    assert not hangs, said
    assert process.exitcode == 8, said
    assert "shared memory (/dev/shm) is full" in said
    assert "Traceback" not in said


class Unsendable:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return threading.Lock()


def as_list(samples: list[Any]) -> Any:
    return samples


def test_a_batch_that_cannot_be_sent_is_an_error_not_a_hang() -> None:
    sampler = UpdateSampler(Sequential(4), batch_size=2)
    loader = Loader(Unsendable(), sampler, seed=1, num_workers=1, collate_fn=as_list)
    try:
        with pytest.raises(DataError, match=r"cannot be sent from a worker process .*lock"):
            next(loader.epoch(0))
    finally:
        loader.close()


def test_full_memory_while_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sampler = UpdateSampler(Sequential(64), batch_size=32)
    loader = Loader(Large(), sampler, seed=1, num_workers=1)
    monkeypatch.setattr("torch.utils.data.DataLoader.__iter__", full)
    with pytest.raises(WorkerError, match="shared memory"):
        next(loader.epoch(0))
    loader.close()


def test_a_bus_error_is_full_shared_memory() -> None:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=os._exit, args=(3,))
    process.start()
    process.join()
    assert "shared memory" not in worker_exit_message(0, process, "sample 3")
    process._popen.returncode = -7  # type: ignore[attr-defined]
    assert "shared memory" in worker_exit_message(0, process, "sample 3")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(MemoryError(), "out of memory", id="python"),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out", id="torch"),
        pytest.param(RuntimeError("sizes differ"), None, id="another"),
    ],
)
def test_what_is_a_lack_of_memory(error: Exception, text: str | None) -> None:
    found = memory_error(error)
    assert (found is None) == (text is None)
    assert text is None or text in str(found)
