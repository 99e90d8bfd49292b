"""Records of event files against tensorboard's own writer."""

import io
import random

import pytest
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from callbacks.support.event_file import _record


@pytest.mark.parametrize("length", [0, 1, 9, 64, 5000])
def test_a_record_is_that_of_tensorboard(length: int) -> None:
    content = random.Random(length).randbytes(length)
    expected = io.BytesIO()
    RecordWriter(expected).write(content)
    assert _record(content) == expected.getvalue()
