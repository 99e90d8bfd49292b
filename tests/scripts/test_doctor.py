"""`regimen doctor`: the checks of a machine and their cures."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts import doctor as module
from scripts.doctor import Finding, doctor

GIB = 2**30


@pytest.mark.parametrize(
    ("finding", "cure"),
    [
        pytest.param(module.of_versions({"python": "3.11.7", "torch": "2.11.0+cpu"}), None, id="a"),
        pytest.param(module.of_versions({"python": "3.13.1", "torch": "2.15.0"}), None, id="new"),
        pytest.param(module.of_versions({"python": "3.10.2", "torch": "2.15"}), "3.11", id="old"),
        pytest.param(module.of_versions({"python": "3.14.0", "torch": "2.15"}), "3.13", id="later"),
        pytest.param(module.of_versions({"python": "3.11.7", "torch": "2.9"}), "2.11", id="torch"),
        pytest.param(module.of_versions({"python": "3.11.7"}), "pip install", id="no torch"),
        pytest.param(module.of_threads(4, "4"), None, id="threads"),
        pytest.param(module.of_threads(4, "5"), "at most 4", id="too many"),
        pytest.param(module.of_threads(4, "x"), "to a number", id="no number"),
        pytest.param(module.of_shared_memory(Path("/tmp"), 1), None, id="shared memory"),
        pytest.param(module.of_shared_memory(Path("/tmp"), 2**62), "--shm-size", id="little"),
        pytest.param(module.of_shared_memory(Path("/nowhere")), "num_workers=0", id="none"),
        pytest.param(module.of_open_files(1024), None, id="open files"),
        pytest.param(module.of_open_files(-1), None, id="no limit"),
        pytest.param(module.of_open_files(256), "ulimit -n", id="few files"),
        pytest.param(module.of_space(Path("x"), 5 * GIB), None, id="space"),
        pytest.param(module.of_space(Path("x"), GIB), "run_dir", id="full"),
        pytest.param(module.of_speed(Path("x"), 50.0), None, id="speed"),
        pytest.param(module.of_speed(Path("x"), 5.0), "every_n_epochs", id="slow"),
        pytest.param(module.of_driver(None, "13.2", False), None, id="no driver"),
        pytest.param(module.of_driver("570.1", "12.8", True), None, id="driver"),
        pytest.param(module.of_driver("570.1", None, False), "CPUs only", id="CPU build"),
        pytest.param(module.of_driver("470.1", "13.2", False), "CUDA 13.2", id="old driver"),
    ],
)
def test_what_is_good_and_what_has_a_cure(finding: Finding, cure: str | None) -> None:
    assert (finding.cure is None) == (cure is None)
    assert cure is None or cure in str(finding.cure)


def test_the_speed_of_a_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    assert module.write_speed(tmp_path, 0.001) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("capability", "formats"),
    [((6, 1), "fp32"), ((7, 5), "fp32, fp16"), ((9, 0), "fp32, fp16, tf32, bf16, fp8")],
)
def test_the_formats_of_a_gpu(capability: tuple[int, int], formats: str) -> None:
    assert module.of_capability(capability) == formats


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


def test_a_wrong_derivative_is_noticed() -> None:
    finding = module.derivatives(
        ["cpu"], {"square": (Wrong.apply, [(3,)]), "sine": (torch.sin, [(2,)])}
    )
    assert finding.text == "wrong: square on cpu"
    assert finding.cure


def test_two_processes_that_fail_or_hang() -> None:
    def python(code: str) -> list[str]:
        return [sys.executable, "-c", code]

    good, bad = python("pass"), python("raise SystemExit('no route')")
    assert module.run_together([good, good], 60) is None
    assert module.run_together([good, bad], 60) == "no route"
    start = time.monotonic()
    said = module.run_together([python("import time; time.sleep(600)"), good], 0.2)
    assert said == "they did not find each other within 0.2 s"
    assert time.monotonic() - start < 300  # the sleeping one was ended


@pytest.mark.slow
def test_two_processes_of_this_machine_meet() -> None:
    assert module.pair("gloo") == Finding("found each other and added up their numbers")


@pytest.mark.parametrize("bad", [False, True])
def test_the_command_looks_at_every_part(
    bad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(folder: Path) -> float:
        raise OSError("no such\x1b thing")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "pair", lambda _: Finding("met"))
    monkeypatch.setattr(module, "write_speed", broken if bad else lambda folder: 100.0)
    monkeypatch.setattr(module, "of_space", lambda folder, free: Finding("enough"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = doctor(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert [line["name"] for line in found] == [
        "versions",
        "threads",
        "shared memory",
        "open files",
        "disk space",
        "disk speed",
        "torch",
        "driver",
        "devices",
        "CPU formats",
        "GPU formats",
        "derivatives",
        "two processes (gloo)",
    ]
    assert found[5]["good"] != bad
    assert code == (8 if any(not line["good"] for line in found) else 0)
    assert doctor([]) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found) + 1
    assert ("OSError: no such" in lines[5]) == bad
    assert "\x1b" not in lines[5]
