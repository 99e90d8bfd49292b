"""`regimen doctor`: the checks of a machine and their hints."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts import doctor as command
from scripts.checkup import devices, machine
from scripts.checkup.finding import Finding, checked
from scripts.checkup.pair import pair, run_together
from scripts.doctor import doctor

GIB = 2**30


@pytest.mark.parametrize(
    ("finding", "cure"),
    [
        pytest.param(
            machine.of_versions({"python": "3.11.7", "torch": "2.11.0+cpu"}), None, id="old"
        ),
        pytest.param(machine.of_versions({"python": "3.13.1", "torch": "2.15.0"}), None, id="new"),
        pytest.param(
            machine.of_versions({"python": "3.10.2", "torch": "2.15.0"}), "3.11", id="python"
        ),
        pytest.param(
            machine.of_versions({"python": "3.14.0", "torch": "2.15.0"}), "3.13", id="later"
        ),
        pytest.param(
            machine.of_versions({"python": "3.11.7", "torch": "2.9.1"}), "2.11", id="torch"
        ),
        pytest.param(machine.of_versions({"python": "3.11.7"}), "pip install", id="no torch"),
        pytest.param(machine.of_threads(4, None), None, id="threads"),
        pytest.param(machine.of_threads(4, "4"), None, id="as many"),
        pytest.param(machine.of_threads(4, "5"), "at most 4", id="too many"),
        pytest.param(machine.of_threads(4, "x"), "to a number", id="no number"),
        pytest.param(machine.of_shared_memory(GIB, 2 * GIB), None, id="shared memory"),
        pytest.param(machine.of_shared_memory(2**26, 2**26), "--shm-size", id="docker's 64 MB"),
        pytest.param(machine.shared_memory("/nowhere"), "loader.num_workers=0", id="none"),
        pytest.param(machine.of_open_files(1024), None, id="open files"),
        pytest.param(machine.of_open_files(-1), None, id="no limit"),
        pytest.param(machine.of_open_files(256), "ulimit -n", id="few files"),
        pytest.param(machine.of_space(Path("x"), 5 * GIB), None, id="space"),
        pytest.param(machine.of_space(Path("x"), GIB), "run_dir", id="full"),
        pytest.param(machine.of_speed(Path("x"), 50.0), None, id="speed"),
        pytest.param(machine.of_speed(Path("x"), 5.0), "every_n_epochs", id="slow"),
        pytest.param(devices.of_driver(None, "13.2", False), None, id="no driver"),
        pytest.param(devices.of_driver("570.1", "12.8", True), None, id="driver"),
        pytest.param(devices.of_driver("570.1", None, False), "CPUs only", id="CPU build"),
        pytest.param(devices.of_driver("470.1", "13.2", False), "CUDA 13.2", id="old driver"),
    ],
)
def test_what_is_good_and_what_has_a_cure(finding: Finding, cure: str | None) -> None:
    assert finding.good == (cure is None)
    assert cure is None or cure in str(finding.cure)


def test_the_speed_of_a_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    assert machine.write_speed(tmp_path, 1000) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_fails_is_a_finding_and_the_next_is_made() -> None:
    def broken() -> Finding:
        raise OSError("no such thing")

    first, second = checked({"a": broken, "b": lambda: Finding("b", "is there")})
    assert (first.name, first.good) == ("a", False)
    assert "OSError: no such thing" in first.text
    assert second.good


@pytest.mark.parametrize(
    ("capability", "formats"),
    [((6, 1), "fp32"), ((7, 5), "fp32, fp16"), ((9, 0), "fp32, fp16, tf32, bf16, fp8")],
)
def test_the_formats_of_a_gpu(capability: tuple[int, int], formats: str) -> None:
    assert devices.of_capability(capability) == formats


def test_the_formats_of_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("flags : sse avx512f avx512_bf16 amx_bf16\n")
    (tmp_path / "old").write_text("flags : sse\n")
    assert devices.cpu_formats(tmp_path / "new").text.startswith("fp32, bf16 (")
    assert "but slowly" in devices.cpu_formats(tmp_path / "old").text
    assert devices.cpu_formats(tmp_path / "none").good


class Wrong(torch.autograd.Function):
    """A square whose derivative is a third too small."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x * 1.5


def test_a_wrong_derivative_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.derivatives().good
    operators = [("square", Wrong.apply, [(3,)]), ("sine", torch.sin, [(2,)])]
    monkeypatch.setattr(devices, "_operators", lambda: operators)
    finding = devices.derivatives()
    assert finding.text == "wrong: square on cpu"
    assert not finding.good


def test_two_processes_that_fail_or_hang() -> None:
    def python(code: str) -> list[str]:
        return [sys.executable, "-c", code]

    good, bad = python("pass"), python("raise SystemExit('no route')")
    assert run_together([good, good], 60) is None
    assert run_together([good, bad], 60) == "no route"
    start = time.monotonic()
    said = run_together([python("import time; time.sleep(600)"), good], 0.2)
    assert said == "they did not find each other within 0.2 s"
    assert time.monotonic() - start < 300  # the sleeping one was ended


@pytest.mark.slow
def test_two_processes_of_this_machine_meet() -> None:
    assert pair("gloo") == Finding(
        "two processes (gloo)", "found each other and added up their numbers"
    )


@pytest.mark.parametrize(
    ("meets", "code"),
    [
        pytest.param(lambda _: Finding("gloo", "met"), 0, id="good"),
        pytest.param(lambda _: Finding("gloo", "alone\x1b", "a cure"), 8, id="warned"),
    ],
)
def test_the_command(
    meets: Callable[[str], Finding],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "machine_checks", lambda folder: {})  # slow disks are no failure
    monkeypatch.setattr(command, "pair", meets)
    assert doctor(["--json"]) == code
    found = json.loads(capsys.readouterr().out)
    names = ["torch", "driver", "devices", "CPU formats", "GPU formats", "derivatives"]
    assert [line["name"] for line in found][:6] == names
    assert found[-1]["good"] == (code == 0)
    assert doctor([]) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found) + 1
    assert ("cure: a cure" in lines[-2]) == (code == 8)
    assert "\x1b" not in lines[-2]


def test_every_part_of_the_machine_is_looked_at(tmp_path: Path) -> None:
    names = [finding.name for finding in checked(machine.machine_checks(tmp_path))]
    assert names == [
        "versions",
        "threads",
        "shared memory",
        "open files",
        "disk space",
        "disk speed",
    ]
