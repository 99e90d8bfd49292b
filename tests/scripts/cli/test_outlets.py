"""A command whose reader leaves goes on quietly, to its own exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# What a run does with its streams, without one: many lines to both, a bar's pieces, an exit code.
COMMAND = """
import logging, sys
from scripts.cli.console import Command, log_to_stderr

def command():
    log_to_stderr(True)
    for i in range(5000):
        print("a line to be read", i)
        logging.getLogger("regimen").info("a line of the log %s", i)
        sys.stderr.write("\\r50%")
        sys.stderr.flush()
    print("the end", flush=True)
    open(sys.argv[1], "w").write("done")
    return 5

with Command() as it:
    it.code = command()
"""


def run(tmp_path: Path, redirection: str) -> tuple[int, bool, str]:
    """Return the command's exit code, whether it came to its end, and what was read."""
    done = tmp_path / "done"
    words = [sys.executable, "-c", COMMAND, str(done)]
    shell = f'"$0" "$@" {redirection}; exit ${{PIPESTATUS[0]}}'
    result = subprocess.run(
        ["bash", "-c", shell, *words], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    return result.returncode, done.exists(), result.stdout + result.stderr


@pytest.mark.parametrize(
    "redirection",
    [
        pytest.param("2> /dev/null | head -1", id="stdout-to-head"),
        pytest.param("2>&1 | head -1", id="both-to-head"),
        pytest.param("2> /dev/null > /dev/full", id="full"),
        pytest.param("> /dev/full 2>&1", id="both-full"),
        pytest.param("2> /dev/null >&-", id="closed"),
        pytest.param("<&- >&- 2>&-", id="all-closed"),
    ],
)
def test_nobody_need_read_to_the_end(tmp_path: Path, redirection: str) -> None:
    code, done, read = run(tmp_path, redirection)
    assert (code, done) == (5, True), read
    assert len(read.splitlines()) <= 1
    assert "Error" not in read


def test_who_reads_gets_it_all(tmp_path: Path) -> None:
    code, done, read = run(tmp_path, "2> /dev/null | cat")
    assert (code, done) == (5, True)
    assert read.splitlines()[0] == "a line to be read 0"
    assert read.splitlines()[-1] == "the end"


def test_a_terminal_that_is_gone_is_no_failure(tmp_path: Path) -> None:
    own, theirs = os.openpty()
    done = tmp_path / "done"
    words = [sys.executable, "-c", COMMAND, str(done)]
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT)
    os.close(theirs)
    os.read(own, 10)
    os.close(own)  # from here on each write is an EIO; without a session, no signal comes
    assert process.wait(60) == 5
    assert done.exists()
