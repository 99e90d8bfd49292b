"""What every test leaves as it was, and the threads and the time that it has."""

import logging
import os
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
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


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
