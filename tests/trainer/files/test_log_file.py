"""A log file takes records as lines and fails without a fuss."""

import errno
import logging
import os

import pytest

from trainer.errors import StorageError
from trainer.files.log_file import LogFileHandler


@pytest.fixture
def logger(tmp_path):
    handler = LogFileHandler(tmp_path / "train.log")
    logger = logging.getLogger("test.log_file")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)
    handler.close()


def test_records_are_lines_with_their_level(logger, tmp_path):
    logger.info("step %d", 3)
    logger.warning("grüße")
    first, second = (tmp_path / "train.log").read_text(encoding="utf-8").splitlines()
    assert first.endswith(" INFO step 3")
    assert second.endswith(" WARNING grüße")


def test_a_full_disk_is_one_warning(logger, monkeypatch, caplog, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for step in range(3):
        logger.info("step %d", step)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "no space left" in warnings[0].getMessage()
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_that_cannot_be_opened_is_an_error_at_once(tmp_path):
    with pytest.raises(StorageError):
        LogFileHandler(tmp_path / "no" / "train.log")
