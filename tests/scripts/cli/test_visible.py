"""Names with line breaks and escape sequences: one line, and no codes for the terminal."""

import logging
from pathlib import Path

import pytest

from data.errors import UnreadableError
from scripts.cli.console import log_to_stderr, report
from trainer.errors import CheckpointError, StorageError
from trainer.files.log_format import indented_lines, visible
from trainer.summary.text import table, to_text

EVIL = "a\nerror: b\x1b[2J\x9b31m\r\u202ec.png"


def test_text_keeps_its_lines_and_shows_its_codes() -> None:
    assert visible("é\t1\n\x1b[0m\u202e") == "é\t1\n\\x1b[0m\\u202e"
    assert indented_lines("first\n  second\nnone") == ["first", "  second\\nnone"]


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(UnreadableError(f"cannot decode {EVIL}: empty"), id="data"),
        pytest.param(CheckpointError(f"{EVIL}: the file is empty"), id="checkpoint"),
        pytest.param(StorageError(f"cannot write {Path(EVIL)}"), id="storage"),
    ],
)
def test_an_error_is_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    report(error)
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert printed[:-1].isprintable()
    assert r"a\nerror: b\x1b[2J" in printed


def test_a_traceback_shows_codes(capsys: pytest.CaptureFixture[str]) -> None:
    report(KeyError(EVIL))
    report(ValueError(EVIL))
    assert "\x1b" not in capsys.readouterr().err


def test_log_lines_show_paths_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers, root.level
    try:
        log_to_stderr(verbose=True)
        logging.getLogger("regimen").info("read %s, then %s", Path(EVIL), "x\x1b[0m")
        logging.getLogger("regimen").info("two\n  lines")
    finally:
        root.handlers = before
        root.setLevel(level)
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == r"read a\nerror: b\x1b[2J\x9b31m\r\u202ec.png, then x\x1b[0m"
    assert rest == ["two", "  lines"]


def test_tables_show_cells_on_one_line() -> None:
    text = to_text(table(["name"], [[EVIL]]), f"below {EVIL}", width=200)
    assert "\x1b" not in text
    assert r"a\nerror: b\x1b[2J" in text
