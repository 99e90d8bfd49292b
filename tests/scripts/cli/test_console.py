"""Exit codes, error lines, memory between updates, and the keys of commands."""

import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data.errors import UnreadableError
from scripts.cli.console import describe, exit_code, log_to_stderr, report
from scripts.cli.keys import misspelt
from trainer.errors import CheckpointError, StorageError
from trainer.files.layout import indented_lines, visible
from trainer.summary.text import table, to_text


def host() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee docs")


def python() -> None:
    raise MemoryError


@pytest.mark.parametrize("allocate", [host, device, python])
def test_memory_that_gives_out_names_the_keys_to_turn(allocate) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert exit_code(caught.value) == 8
    text = describe(caught.value)
    assert "trainer.gradient_accumulation_steps" in text
    assert "\n" not in text


def test_an_unexpected_exception_is_one_line() -> None:
    error = ValueError("first\nsecond")
    assert (exit_code(error), describe(error)) == (1, "ValueError: first")


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


UPDATES = """
import resource
from scripts.cli.console import Command

def update():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = [bytearray(2**24) for _ in range(8)]
    del gradients
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with Command():
    print([update() for _ in range(4)][-1])
"""
PAGES = 8 * 2**24 // 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot be told")
@pytest.mark.parametrize(
    ("environment", "least", "most"),
    [
        pytest.param({}, 0, PAGES // 20, id="kept"),
        pytest.param({"MALLOC_TRIM_THRESHOLD_": "131072"}, PAGES // 2, 2 * PAGES, id="as-asked"),
        pytest.param(
            {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
            PAGES // 2,
            2 * PAGES,
            id="as-tuned",
        ),
    ],
)
def test_pages_are_not_taken_from_the_system_for_every_update(
    environment: dict[str, str], least: int, most: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UPDATES],
        env={k: v for k, v in os.environ.items() if "MALLOC" not in k} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert least <= int(done.stdout) <= most


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        pytest.param("chekpoint=best", ["did you mean checkpoint?"], id="near"),
        pytest.param("loader.batch_size=4", [], id="of-the-configuration"),
        pytest.param("transforms=none", [], id="a-group"),
        pytest.param("models=mlp", [], id="nearer-to-another"),
        pytest.param("+extra=1", [], id="far"),
    ],
)
def test_a_key_that_is_nearly_one_of_a_command_is_told(override: str, meant: list[str]) -> None:
    assert [p.hint for p in misspelt([override], ["run", "checkpoint", "split"])] == meant
