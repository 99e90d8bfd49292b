"""What every test leaves as it was."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from toy_pictures import write_digits


@pytest.fixture(autouse=True, scope="session")
def _autograd() -> None:
    """Start torch's autograd before a test has fake tensors on `cuda`.

    It starts a thread for each device that it finds at its first backward pass, a fake one too, and
    no process that is forked after that, as by `ranks`, can compute gradients.
    """
    if not torch.cuda.is_available():
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """A command that runs within a test sets logging up for its process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def digit_photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write JPEG files of digits, 32 x 32, in folders: 10 of each for training, 3 for the test."""
    root = tmp_path_factory.mktemp("photographs")
    return write_digits(root, {"train": 10, "test": 3}, size=32, colour=True, suffix="jpg")
