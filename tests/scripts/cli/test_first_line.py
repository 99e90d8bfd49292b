"""What a command says before it imports torch."""

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.cli import first_line
from scripts.cli.arguments import parse_arguments
from scripts.cli.first_line import asked_device, greet, known_device, threads
from scripts.cli.job import AS_JOB
from scripts.train import train

CUDA = "cuda: Optional[str] = '13.2'"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", *AS_JOB):
        monkeypatch.delenv(name, raising=False)


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
    monkeypatch.setattr(first_line, "_may_have_accelerator", lambda: True)
    greet(asked_device(["seed=1"]))
    assert "cpu" not in said(capsys)
    assert known_device(asked_device(["strategy.accelerator=cpu"])) == "cpu"
    assert known_device(asked_device(["device=cpu", "device=cuda:1"], "device")) == "cuda"


@pytest.mark.skipif(sys.platform != "linux", reason="drivers are looked for on Linux only")
@pytest.mark.parametrize(
    ("driver", "visible", "version", "expected"),
    [
        pytest.param(False, None, CUDA, "cpu", id="no driver"),
        pytest.param(True, None, CUDA, None, id="a driver"),
        pytest.param(True, "", CUDA, "cpu", id="hidden"),
        pytest.param(True, None, "cuda: Optional[str] = None\nhip = None", "cpu", id="for CPUs"),
        pytest.param(True, None, "cuda = None\nhip: Optional[str] = '6.4'", None, id="for ROCm"),
    ],
)
def test_where_no_accelerator_can_be_it_is_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    driver: bool,
    visible: str | None,
    version: str,
    expected: str | None,
) -> None:
    (tmp_path / "version.py").write_text(version)
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(first_line.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(first_line, "_DRIVERS", (str(tmp_path),) if driver else ())
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
    ("environment", "told"),
    [pytest.param({}, True, id="alone"), pytest.param(AS_JOB, False, id="job")],
)
def test_that_a_sweep_lacks_its_m_is_told(
    environment: dict[str, str],
    told: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = logging.getLogger()  # put back as it was
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr("scripts.train._starter", lambda config: lambda request: 0)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert train(["experiment=resnet18", "sweep.jobs=2"]) == 0
    assert ("no effect without -m" in capsys.readouterr().err) == told
