"""The checks on an accelerator: on the simulated one, and what the script says of its machine."""

import importlib.metadata as metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from accelerator import environment
from benchmarks.gpu_check import __main__ as driver
from benchmarks.gpu_check import wheels
from benchmarks.gpu_check.steps import STEPS, Step
from toy_pictures import write_digits

ROOT = Path(__file__).parents[2]


def checked(folder, *words, **variables):
    """Run the script; return its exit code, output and the JSON of each step."""
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu_check.sh"), *words],
        env={**os.environ, "PYTHON": sys.executable, "WHEELS": str(folder / "none"), **variables},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        timeout=1500,
        check=False,
    )
    path = folder / "gpu_check" / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return done.returncode, done.stdout, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_every_step_runs_on_the_simulated_accelerator(tmp_path):
    try:
        environment()
    except FileNotFoundError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    write_digits(tmp_path / "cifar10", {"train": 10, "test": 3}, size=32, colour=True, suffix="jpg")
    simulated = {"SIMULATED": "1", "DATA_ROOT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    code, said, results = checked(tmp_path, "--budget", "20000", **simulated)
    assert code == 0, said
    assert [result["step"] for result in results] == list(STEPS)
    for result in results:
        assert result["ok"], said
        assert result["exit_code"] == 0
        assert result["machine"]["card"] == "simulated accelerator"
        assert {"driver", "torch", "torchvision", "cuda", "python"} <= result["machine"].keys()
        assert all(check.keys() == {"what", "expected", "seen", "ok"} for check in result["checks"])
    files = [path for path in (tmp_path / "gpu_check").rglob("*") if path.is_file()]
    assert len(files) <= 8
    assert max(path.stat().st_size for path in files) < 2**24
    table = (tmp_path / "gpu_check" / "table.txt").read_text()
    assert said.rstrip().endswith(f"{table}written to gpu_check")
    assert table.split()[:5] == ["step", "what", "expected", "seen", "ok"]
    seen = {check["what"]: check["seen"] for result in results for check in result["checks"]}
    assert seen["killed by SIGKILL and resumed"] == "bit-equal"
    assert seen["4 micro-batches, by configuration"].startswith("trainer.gradient_accumulation")


RUNNER = """
import json, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)
name, folder = sys.argv[1], Path(sys.argv[2])
check = {"what": "begun", "expected": "yes", "seen": "yes", "ok": True}
(folder / "step.json").write_text(json.dumps({"step": name, "checks": [check]}))
print(name, "speaks")
if name == "fails":
    raise RuntimeError("as told")
if name == "hangs":
    time.sleep(60)
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Steps that take no time, by name; they need no torch."""
    known = {name: Step("", 1 if name == "hangs" else 30, name) for name in HOW}
    monkeypatch.setattr(driver, "STEPS", known)
    (tmp_path / "own_runner.py").write_text(RUNNER)
    monkeypatch.setattr(driver, "RUNNER", "own_runner")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("SIMULATED", raising=False)
    return known


HOW = ("fails", "hangs", "works")


def results(folder):
    lines = (folder / "results.jsonl").read_text().splitlines()
    return {result["step"]: result for result in map(json.loads, lines)}


def test_a_step_that_fails_or_hangs_ends_no_other(steps, tmp_path, capfd):
    folder = tmp_path / "out"
    assert driver.main(["--steps", ",".join(steps), "--output", str(folder)]) == 1
    found = results(folder)
    assert [found[name]["ok"] for name in steps] == [False, False, True]
    assert "exit 1" in found["fails"]["checks"][-1]["seen"]
    assert [check["what"] for check in found["hangs"]["checks"]] == ["begun", "ends"]
    assert found["hangs"]["checks"][-1]["seen"] == "over 2 s"
    log = (folder / "log.txt").read_text()
    assert "RuntimeError: as told" in log
    assert "hangs speaks" in log
    assert re.search(r"works +begun +yes +yes +yes", capfd.readouterr().out)


def test_what_does_not_fit_the_budget_is_left_out(steps, tmp_path, capsys):
    steps["fails"] = Step("", 1000, "")
    folder = tmp_path / "out"
    words = ["--steps", "fails,works", "--budget", "900", "--output", str(folder)]
    assert driver.main(words) == 0
    found = results(folder)
    assert "left_out" in found["fails"]
    assert found["works"]["ok"]
    assert "left out: " in capsys.readouterr().out


def test_an_unknown_step_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        driver.main(["--steps", "speed,smok"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "'smok'" in said
    assert "smoke" in said


def test_missing_wheels_are_named_with_their_versions(tmp_path, monkeypatch, capsys):
    real = wheels._distributions

    def without_hydra(site):
        found = real(site)
        for name in ("hydra-core", "antlr4-python3-runtime"):
            if site is None or not (site / "hydra").exists():
                found.pop(name, None)
        return found

    monkeypatch.setattr(wheels, "_distributions", without_hydra)
    monkeypatch.setenv("WHEELS", str(tmp_path))
    assert driver.main(["--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().out
    assert "missing: hydra-core==1.3.8, antlr4-python3-runtime==4.9.3" in said
    assert "pip wheel" in said
    assert str(tmp_path) in said


def test_wheels_are_unpacked_where_a_package_is_missing(tmp_path):
    for name in ("not_there", "PyYAML"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}.py", "")
            archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n")
    site = tmp_path / "site"
    assert wheels.unpack(tmp_path, site) == ["not_there-1.0-py3-none-any.whl"]
    assert (site / "not_there.py").exists()
    assert not (site / "PyYAML.py").exists()


def test_every_dependency_is_looked_for_in_a_version_that_is_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Those of Python 3.14 have no release yet that the machine could have.
    usual = [text for text in project["dependencies"] if "python_version >= '3.14'" not in text]
    for requirement in (text.partition(";")[0] for text in usual):
        name = re.match(r"[\w-]+", requirement)[0]
        version = [int(n) for n in wheels.WANTED[name].split(".")]
        for bound, limit in re.findall(r"(>=|<)([\d.]+)", requirement):
            numbers = [int(n) for n in limit.split(".")]
            assert version >= numbers if bound == ">=" else version < numbers
    assert wheels.WANTED["antlr4-python3-runtime"] == metadata.version("antlr4-python3-runtime")


def test_the_table_shows_what_was_expected_and_seen():
    check = {"what": "two runs", "expected": "bit-equal", "seen": "x" * 200, "ok": False}
    text = driver.table([{"step": "numbers", "checks": [check], "machine": {"card": "a card"}}])
    lines = text.splitlines()
    assert lines[0].split() == ["step", "what", "expected", "seen", "ok"]
    assert lines[1].startswith("numbers  two runs  bit-equal  xxx")
    assert lines[1].endswith("NO")
    assert lines[2] == "card a card"
