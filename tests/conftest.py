"""What every test leaves as it was, and the threads and the time that it has."""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Read once, by `import torch`, here and in the processes that tests start. These share few cores,
# and many are forked: in a fork of a process in which OpenMP's threads run, torch waits for ever.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import pytest
import torch

from limits import (  # noqa: F401 (hooks of pytest)
    pytest_configure,
    pytest_runtest_call,
    pytest_runtest_setup,
    pytest_runtest_teardown,
)
from toy_pictures import write_digits


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """A command that runs within a test sets logging up for its process."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    level = root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def _absl_keeps_what_pytest_captures() -> None:
    """Give absl's log, which rouge-score imports, the real standard error.

    A setup of logging, as submitit does one, closes all handlers, and absl's closes its stream.
    That would be the one of pytest, into which every later test writes.
    """
    if importlib.util.find_spec("absl") is not None:
        from absl import logging as absl_logging

        absl_logging.get_absl_handler().python_handler.setStream(sys.__stderr__)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Whatever a test forks after this one would hang."""
    yield
    assert torch.get_num_threads() == 1, "the test has changed torch's number of threads"


@pytest.fixture(scope="session")
def digit_photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write JPEG files of digits, 32 x 32, in folders: 10 of each for training, 3 for the test."""
    root = tmp_path_factory.mktemp("photographs")
    return write_digits(root, {"train": 10, "test": 3}, size=32, colour=True, suffix="jpg")
