"""Run directories, and processes that hold one, for the tests of both."""

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from trainer.runs.directory import RunDirectory

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
