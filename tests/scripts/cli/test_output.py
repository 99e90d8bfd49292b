"""The first line, warnings, and streams whose reader leaves."""

import io
import logging
import os
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from scripts.cli import output
from scripts.cli.arguments import parse_arguments
from scripts.cli.console import log_to_stderr
from scripts.cli.output import (
    AS_JOB,
    asked_device,
    greet,
    is_library,
    known_device,
    quiet_others,
    threads,
)
from scripts.train import train


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", *AS_JOB):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_it_names_versions_device_and_threads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    greet("cpu")
    version = torch.__version__.partition("+")[0]
    assert said(capsys).endswith(f" · torch {version} · cpu, 3 threads\n")


def test_a_stream_of_ascii_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    greet("cpu")
    assert raw.getvalue().endswith(b" - cpu, 1 thread\n")


@pytest.mark.parametrize(
    "environment",
    [pytest.param({"RANK": "1"}, id="a further rank"), pytest.param(AS_JOB, id="a job")],
)
def test_it_is_printed_once_a_run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    greet()
    assert said(capsys) == ""


def test_a_device_that_torch_has_to_find_is_not_guessed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_DRIVERS", ("/",))
    greet(asked_device(["seed=1"]))
    assert "cpu" not in said(capsys)
    assert known_device(asked_device(["strategy.accelerator=cpu"])) == "cpu"
    assert known_device(asked_device(["device=cpu", "device=cuda:1"], "device")) == "cuda"


@pytest.mark.skipif(sys.platform != "linux", reason="drivers are looked for on Linux only")
@pytest.mark.parametrize(
    ("driver", "visible", "expected"),
    [
        pytest.param(False, None, "cpu", id="no driver"),
        pytest.param(True, None, None, id="a driver"),
        pytest.param(True, "", "cpu", id="hidden"),
    ],
)
def test_where_no_accelerator_can_be_it_is_the_cpu(
    monkeypatch: pytest.MonkeyPatch, driver: bool, visible: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(output, "_DRIVERS", ("/",) if driver else ())
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert known_device() == expected


@pytest.mark.slow
def test_this_machine_is_read_as_torch_reads_it() -> None:
    code = "import torch; print(torch.get_num_threads(), torch.accelerator.is_available())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, accelerated = asked.stdout.split()
    assert threads() == int(count)
    assert known_device() in ((None,) if accelerated == "True" else (None, "cpu"))


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["--cfg", "job"], ["--version"], ["--info"], ["--hydra-help"], ["-sc", "x=1"]],
)
def test_what_asks_for_text_is_no_run(argv: list[str]) -> None:
    assert parse_arguments(argv).asks_for_text
    assert not parse_arguments(["seed=1", "-m"]).asks_for_text


@pytest.mark.parametrize(
    ("environment", "words", "told"),
    [
        pytest.param({}, ["sweep.jobs=2"], "sweep has no effect without -m", id="sweep"),
        pytest.param(AS_JOB, ["sweep.jobs=2"], "", id="job"),
        pytest.param({"SLURM_NTASKS": "4"}, [], "torchrun once a node", id="srun"),
        pytest.param({"SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, [], "", id="srun-another"),
        pytest.param({"SLURM_NTASKS": "4", "RANK": "0"}, [], "", id="torchrun"),
        pytest.param({"SLURM_NTASKS": "1"}, [], "", id="one-task"),
    ],
)
def test_what_was_hardly_meant_is_told(
    environment: dict[str, str],
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scripts.train._starter", lambda config: lambda request: 0)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with console():
        assert train(["experiment=resnet18", *words]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == bool(told)
    assert told in "".join(warnings)


ROOT = Path(__file__).resolve().parents[3]
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
        (str(ROOT / "trainer" / "trainer.py"), True),
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


def piped(tmp_path: Path, redirection: str) -> tuple[int, bool, str]:
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
        pytest.param("2>&1 | head -1", id="both-to-head"),
        pytest.param("> /dev/full 2>&1", id="both-full"),
        pytest.param("2> /dev/null >&-", id="closed"),
        pytest.param("<&- >&- 2>&-", id="all-closed"),
    ],
)
def test_nobody_need_read_to_the_end(tmp_path: Path, redirection: str) -> None:
    code, done, read = piped(tmp_path, redirection)
    assert (code, done) == (5, True), read
    assert len(read.splitlines()) <= 1
    assert "Error" not in read


def test_who_reads_gets_it_all(tmp_path: Path) -> None:
    code, done, read = piped(tmp_path, "2> /dev/null | cat")
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
