"""What libraries say is not what a person reads on the terminal."""

import logging
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.cli.console import log_to_stderr
from scripts.cli.job import AS_JOB
from scripts.cli.others import is_library, quiet_others

TORCH = f"{sysconfig.get_path('purelib')}/torch/utils/data/dataloader.py"
MINE = "/home/me/project/mine.py"


@contextmanager
def console(*more: logging.Handler) -> Iterator[None]:
    """Set up what a command sets up, for a while."""
    root = logging.getLogger()
    kept = root.handlers, root.level
    log_to_stderr(True)
    root.handlers += more
    try:
        with warnings.catch_warnings():
            quiet_others()
            yield
    finally:
        root.handlers = kept[0]
        root.setLevel(kept[1])


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_a_library_s_warning_is_for_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    kept = Kept()
    with console(kept):
        warnings.showwarning(UserWarning("too many\n  workers"), UserWarning, TORCH, 3)
    assert kept.lines == [f"warning: UserWarning: too many workers ({TORCH}:3)"]
    assert capsys.readouterr() == ("", "")


def test_a_warning_of_one_s_own_code_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with console():
        warnings.showwarning(DeprecationWarning("use x"), DeprecationWarning, MINE, 7)
    assert capsys.readouterr().err == f"warning: DeprecationWarning: use x ({MINE}:7)\n"


@pytest.mark.parametrize(
    ("file", "theirs"),
    [
        (TORCH, True),
        (logging.__file__, True),
        ("<frozen importlib._bootstrap>", True),
        (str(Path(__file__).parents[3] / "trainer" / "trainer.py"), True),
        (str(Path(__file__)), False),
        (MINE, False),
    ],
)
def test_whose_file_it_is(file: str, theirs: bool) -> None:
    assert is_library(file) is theirs


def test_a_job_of_a_sweep_prints_warnings_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*next(iter(AS_JOB.items())))
    with console():
        logging.getLogger("regimen").info("run directory: here")
        logging.getLogger("regimen").warning("warning: something")
    assert capsys.readouterr().err == "warning: something\n"
