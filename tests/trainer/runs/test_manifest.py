"""What is recorded of a run's code and machine, and what is not."""

import json
import subprocess
import sys

import pytest

from trainer.runs import manifest


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    git(tmp_path, "remote", "add", "origin", "https://user:swordfish@example.org/x.git")
    (tmp_path / "a.txt").write_text("one\n")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-qm", "x")
    return tmp_path


def test_a_clean_checkout_is_its_commit(repository):
    record = manifest.code_record(repository)
    assert len(record["commit"]) == 40
    assert record["changed_files"] == []
    assert record["diff_sha256"] is None


def test_a_changed_checkout_says_so(repository):
    clean = manifest.code_record(repository)
    (repository / "a.txt").write_text("two\n")
    (repository / "new.txt").write_text("untracked\n")
    changed = manifest.code_record(repository)
    assert changed["commit"] == clean["commit"]
    assert changed["changed_files"] == ["a.txt"]
    (repository / "a.txt").write_text("three\n")
    assert manifest.code_record(repository)["diff_sha256"] != changed["diff_sha256"]


def test_outside_a_repository_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert manifest.code_record(tmp_path) == {"path": str(tmp_path), "commit": None}


def test_without_git_there_is_no_commit(repository, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert manifest.code_record(repository)["commit"] is None


def test_secrets_stay_out(repository, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "hunter2")
    monkeypatch.chdir(repository)
    text = json.dumps(manifest.start_record({"seed": 1}))
    assert "hunter2" not in text
    assert "swordfish" not in text


def test_a_start_names_versions_process_and_facts():
    record = manifest.start_record({"seed": 1, "device": "cpu"})
    assert record["seed"] == 1
    assert record["versions"].keys() >= {"python", "torch", "numpy"}
    assert record.keys() >= {"started", "pid", "host", "code", "platform", "cpu_count"}
    assert manifest.now() > record["started"]


def test_it_needs_no_torch():
    code = (
        "import sys, trainer.runs.directory; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "False"]
