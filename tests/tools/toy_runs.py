"""Run directories and checkpoints, and processes that hold or write them, for their tests."""

import csv
import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch

from regimen.trainer.checkpoints.reader import Index, read_checkpoint
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import CheckpointError
from regimen.trainer.runs.directory import RunDirectory

FORK = multiprocessing.get_context("fork")


def create(path: Path, **facts: Any) -> RunDirectory:
    return RunDirectory.create(
        path, config_yaml="seed: 1\n", overrides=["seed=1", "name=ü"], facts=facts
    )


def hold(path: Path, ready: Event, resume: bool = False) -> None:
    """Hold a run until killed."""
    RunDirectory.resume(path, facts={}) if resume else create(path)
    ready.set()
    time.sleep(60)


def kill(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def payload(value: float = 1.0, size: int = 1000) -> dict[str, Any]:
    state = {"made_with": {"torch": "2", "threads": 1, "device": "cpu"}}
    return {"model": {"weight": torch.full((size,), value)}, "state": state}


def files(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def step_file(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}.pt"


def listed(folder: Path) -> dict[int, Any]:
    """Return the index's entries of the checkpoints that exist, by step."""
    entries = [e for e in Index.read(folder).files.values() if (folder / e.file).exists()]
    return {entry.step: entry for entry in sorted(entries, key=lambda e: e.step)}


def board(sweep: str | Path = "there") -> list[dict[str, str]]:
    """Return the rows of a sweep's leaderboard."""
    with Path(sweep, "leaderboard.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def value(path: Path) -> float:
    return float(torch.load(path, weights_only=True)["model"]["weight"][0])


def refused(
    path: Path,
    kind: type[CheckpointError] | None = None,
    reader: Callable[[Path], Any] = read_checkpoint,
) -> str:
    """Return the one line that refuses a file: it names the file and advises nothing unsafe."""
    with pytest.raises(CheckpointError) as caught:
        reader(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert "weights_only" not in message
    assert caught.value.exit_code == 4
    assert kind in (None, caught.type)
    return message


class Call:
    """Calls a function when unpickled by anything but a weights-only load."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def without_links(*_: Any) -> None:
    """Be `os.link` on a file system that has no hard links."""
    raise OSError(errno.EPERM, "no links here")


def in_a_child(function: Callable[..., Any], *arguments: Any) -> int | None:
    """Return how a forked process ended that ran `function`."""
    process = FORK.Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode
