"""What every test leaves as it was."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from toy_pictures import write_digits


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
