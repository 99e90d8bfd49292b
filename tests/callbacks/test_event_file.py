"""Records of event files against tensorboard's own writer."""

import io
import random
from pathlib import Path

import pytest
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from callbacks.support.event_file import EventFile, _record


@pytest.mark.parametrize("length", [0, 1, 9, 64, 5000])
def test_a_record_is_that_of_tensorboard(length: int) -> None:
    content = random.Random(length).randbytes(length)
    expected = io.BytesIO()
    RecordWriter(expected).write(content)
    assert _record(content) == expected.getvalue()


def test_a_file_that_was_taken_away_is_not_begun_anew(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "tensorboard", 0)
    file.path.unlink()
    with pytest.raises(FileNotFoundError):
        file.scalars(1, {"train/loss": 1.0})
    assert not list(tmp_path.glob("tensorboard/*"))
