"""Common names, and who answers to them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.cli.shadow import ROOT, clashes

GUARD = "from scripts.cli import shadow; shadow.refuse_shadows(); import data; print(data.__file__)"


def guarded(folder: Path, flags: list[str], path: str = "") -> subprocess.CompletedProcess[str]:
    """Run the guard as `python -m` would, with `folder` as the working folder."""
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *flags, "-c", f"import sys; sys.path.append({str(ROOT)!r}); {GUARD}"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def package(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("")
    return folder


def test_ours_are_ours(tmp_path: Path) -> None:
    done = guarded(tmp_path, [])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_package_in_the_working_folder_does_not_take_the_place_of_ours(tmp_path: Path) -> None:
    done = guarded(package(tmp_path, "data"), [])
    assert done.stdout.strip() == str(ROOT / "data" / "__init__.py")


def test_a_package_on_the_path_is_refused_by_name(tmp_path: Path) -> None:
    other = package(tmp_path / "other", "trainer")
    done = guarded(tmp_path, ["-P"], str(other))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the package 'trainer' is taken by")
    assert str(other) in line


@pytest.mark.parametrize("line", ["from trainer import load_run", "from trainer.task import Task"])
def test_a_script_beside_such_a_package_is_told_when_it_imports_ours(
    tmp_path: Path, line: str
) -> None:
    (tmp_path / "data.py").write_text("")
    (tmp_path / "go.py").write_text(f"{line}\n")
    command = [sys.executable, "go.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "the package 'data' is taken by" in last
    assert str(tmp_path / "data.py") in last


def test_a_clash_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "models")
    (tmp_path / "data").mkdir()  # of data sets: no package
    monkeypatch.chdir(tmp_path)
    (clash,) = clashes()
    assert str(tmp_path / "models") in clash


def test_our_own_folder_does_not_clash_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert clashes() == []
