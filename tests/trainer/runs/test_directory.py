"""A run's folder holds what repeats it, and tells how the run stands."""

import contextlib
import json
import os
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from toy_runs import create
from trainer.errors import StorageError
from trainer.runs import directory as module
from trainer.runs.directory import RunDirectory, name_folder, reserve
from trainer.runs.lock import LOCK_FILE, is_held
from trainer.runs.status import (
    RunDirectoryError,
    check_run_dir,
    find_unfinished,
    holds_run,
    read_metrics,
    read_status,
)


@pytest.mark.parametrize("place", ["runs/mine", "a/b/c", "../elsewhere/mine"])
def test_missing_parents_are_made_and_removed_with_a_run_that_is_refused(
    tmp_path, monkeypatch, place
):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    run = create(Path(place))
    assert holds_run(Path(place))
    monkeypatch.chdir(tmp_path)  # what a relative path has meant it goes on to mean
    run.finish("finished")
    assert read_status(run.path)["state"] == "finished"
    run.discard()
    assert [path.name for path in tmp_path.rglob("*")] == ["work"]


def test_a_run_holds_what_repeats_it(tmp_path):
    run = create(tmp_path / "run", seed=1)
    assert (run.path / "config.yaml").read_text() == "seed: 1\n"
    overrides = (run.path / "overrides.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(overrides) == ["seed=1", "name=ü"]
    assert run.manifest()["seed"] == 1
    assert run.manifest()["created"] == run.manifest()["started"]
    status = read_status(run.path)
    assert status["state"] == "running"
    assert (status["pid"], status["host"]) == (os.getpid(), socket.gethostname())
    run.release()


def test_a_run_exists_once_its_manifest_does(tmp_path, monkeypatch):
    written = []
    for name in ("write_text", "write_json"):
        original = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda path, value, original=original: (
                written.append(path.name),
                original(path, value),
            ),
        )
    create(tmp_path / "run").release()
    assert written[-1] == "manifest.json"
    assert sorted(written[:-1]) == ["config.yaml", "overrides.yaml", "status.json"]


def test_an_existing_run_is_refused_and_left_alone(tmp_path):
    create(tmp_path / "run", seed=1).release()
    (tmp_path / "run" / LOCK_FILE).unlink()
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(RunDirectoryError, match="already holds a run") as caught:
        create(tmp_path / "run", seed=2)
    assert caught.value.exit_code == 2
    assert "resume=auto" in str(caught.value)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_the_end_is_recorded_twice(tmp_path):
    run = create(tmp_path / "run")
    run.release()
    run = RunDirectory.resume(run.path, facts={}, command="train run_dir=x resume=auto")
    assert read_status(run.path)["resume"] == "train run_dir=x resume=auto"
    started = read_status(run.path)["started"]
    run.finish(
        "preempted",
        code=143,
        reason="SIGTERM",
        resume="train 'name=a b' resume=auto",
        results={"test/accuracy": 0.5, "val/loss": float("nan")},
    )
    run.release()
    status = read_status(tmp_path / "run")
    assert status["state"] == "preempted"
    assert started == status["started"] < status["updated"]
    assert status["resume"] == "train 'name=a b' resume=auto"
    assert status["results"] == {"test/accuracy": 0.5, "val/loss": None}
    end = run.manifest()["exit"]
    assert (end["state"], end["code"], end["reason"]) == ("preempted", 143, "SIGTERM")
    assert not is_held(tmp_path / "run")


def test_a_resume_is_added_to_the_manifest(tmp_path):
    run = create(tmp_path / "run", device="cpu")
    run.finish("preempted", code=143)
    run.release()
    (run.path / "checkpoints").mkdir()
    for folder in (run.path, run.path / "checkpoints"):
        (folder / ".tmp-1-dead").write_text("half")
    run = RunDirectory.resume(tmp_path / "run", facts={"device": "cuda"})
    manifest = run.manifest()
    assert manifest["device"] == "cpu"
    assert [start["device"] for start in manifest["resumed"]] == ["cuda"]
    assert manifest["exit"] is None
    assert read_status(run.path)["state"] == "running"
    run.release()
    assert not list((tmp_path / "run").rglob(".tmp*"))


@pytest.mark.parametrize("name", [".lock", "status.json", "manifest.json", "metrics.jsonl"])
def test_a_pipe_in_a_run_is_not_waited_for(tmp_path, name):
    path = tmp_path / "run"
    create(path).release()
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    assert not is_held(path)
    assert list(read_metrics(path)) == []
    find_unfinished(tmp_path)
    with contextlib.suppress(RunDirectoryError):
        read_status(path)


@pytest.mark.parametrize(
    "name", [".lock", "metrics.jsonl", "checkpoints", "tensorboard/x", "wandb"]
)
def test_a_run_with_a_link_that_leads_out_of_it_is_refused(tmp_path, name):
    create(tmp_path / "run").release()
    victim, link = tmp_path / "victim", tmp_path / "run" / name
    victim.write_text("theirs")
    link.parent.mkdir(exist_ok=True)
    (tmp_path / "run" / "latest").symlink_to("status.json")  # within the run it may stay
    RunDirectory.resume(tmp_path / "run", facts={}).release()
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    with pytest.raises(RunDirectoryError, match=f"{name} is a link that leads out of the run"):
        RunDirectory.resume(tmp_path / "run", facts={})
    (tmp_path / "run" / "manifest.json").unlink()
    with pytest.raises(RunDirectoryError):
        create(tmp_path / "run")
    assert victim.read_text() == "theirs"


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path):
    folders = [reserve(tmp_path / "a" / "b", "2026-01-01_00-00-00") for _ in range(3)]
    assert [path.name for path in folders] == [
        "2026-01-01_00-00-00",
        "2026-01-01_00-00-00-2",
        "2026-01-01_00-00-00-3",
    ]
    with pytest.raises(RunDirectoryError, match="holds no run"):
        RunDirectory.resume(folders[0], facts={})
    assert list(folders[0].iterdir()) == []
    create(folders[0]).release()


def test_seconds_add_up_over_all_starts_a_killed_one_included(tmp_path):
    run = create(tmp_path)
    run.finish("preempted", seconds=2.5)
    run.release()
    run = RunDirectory.resume(tmp_path, facts={})
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["seconds"] == 2.5
    run.release()  # as if it were killed, 40 seconds after it began
    began = datetime.fromisoformat(status["updated"]).timestamp() - 100
    status["updated"] = datetime.fromtimestamp(began, UTC).isoformat()
    (tmp_path / "status.json").write_text(json.dumps(status))
    (tmp_path / "metrics.jsonl").touch()
    os.utime(tmp_path / "metrics.jsonl", (began + 40, began + 40))
    assert read_status(tmp_path)["seconds"] == pytest.approx(42.5)
    run = RunDirectory.resume(tmp_path, facts={})
    run.finish("finished", seconds=1)
    run.release()
    assert read_status(tmp_path)["seconds"] == pytest.approx(43.5)


def test_files_that_no_run_has_made_are_neither_overwritten_nor_removed(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("theirs: 1\n")
    with pytest.raises(RunDirectoryError, match=r"config\.yaml, checkpoints, and no run"):
        create(tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "theirs: 1\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "config.yaml"]


def test_a_run_that_could_not_begin_is_none_and_can_be_begun_again(tmp_path, monkeypatch):
    (tmp_path / "plan.txt").write_text("a dry run's, which may stand beside a run")

    def fail(*_):
        raise StorageError("full")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", fail)
        with pytest.raises(StorageError):
            create(tmp_path)
    assert not holds_run(tmp_path)
    assert not is_held(tmp_path)
    create(tmp_path).release()
    (tmp_path / "manifest.json").unlink()  # as if it were killed before it existed
    create(tmp_path).release()
    assert holds_run(tmp_path)


@pytest.mark.parametrize("seconds", ['"x"', "[1]", "null", "1e400", "NaN", "1" + "0" * 400, "{"])
def test_a_status_is_read_or_named_as_damaged(tmp_path, seconds):
    create(tmp_path / "run").release()
    (tmp_path / "run" / "status.json").write_text(f'{{"state": "running", "seconds": {seconds}}}')
    if seconds in ('"x"', "[1]", "null"):  # tells of none
        assert read_status(tmp_path / "run")["seconds"] == 0.0
    else:
        with pytest.raises(RunDirectoryError, match=r"status\.json"):
            read_status(tmp_path / "run")


@pytest.mark.parametrize("target", ["nowhere", "link", "file"], ids=["dangling", "loop", "file"])
def test_what_is_no_folder_cannot_be_a_run_directory(tmp_path, target):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / target)
    for path in (tmp_path / "link", tmp_path / "file" / "run"):
        with pytest.raises(RunDirectoryError, match="is no folder"):
            check_run_dir(path)


@pytest.mark.parametrize(
    "name",
    ["", "..", "../x", "a/../../x", "/abs", "a//b", "a/./b", "x\0y", "x" * 300, "é" * 150, "a/"],
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(RunDirectoryError, match="name: ") as caught:
        name_folder(tmp_path / "runs", name)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "a/b", "ä b", "a..b", "..a", "2026"])
def test_a_plain_name_is_taken_unless_it_is_a_link_out_of_the_root(tmp_path, name):
    assert name_folder(tmp_path, name) == tmp_path / name
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(tmp_path.parent)
    with pytest.raises(RunDirectoryError, match="leads out"):
        name_folder(tmp_path, name)


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


def test_a_checkout_is_its_commit_and_what_changed(repository):
    clean = module.code_record(repository)
    assert len(clean["commit"]) == 40
    assert (clean["changed_files"], clean["diff_sha256"]) == ([], None)
    (repository / "a.txt").write_text("two\n")
    (repository / "new.txt").write_text("untracked\n")
    changed = module.code_record(repository)
    assert changed["commit"] == clean["commit"]
    assert changed["changed_files"] == ["a.txt"]
    (repository / "a.txt").write_text("three\n")
    assert module.code_record(repository)["diff_sha256"] != changed["diff_sha256"]


def test_without_a_repository_or_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert module.code_record(tmp_path) == {"path": str(tmp_path), "commit": None}
    monkeypatch.setenv("PATH", "")
    assert module.code_record(module.Path(__file__).parent)["commit"] is None


def test_secrets_stay_out(repository, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "hunter2")
    monkeypatch.chdir(repository)
    text = json.dumps(module.start_record({"seed": 1}))
    assert "hunter2" not in text
    assert "swordfish" not in text


def test_a_start_names_versions_process_and_facts():
    record = module.start_record({"seed": 1, "device": "cpu"})
    assert record["seed"] == 1
    assert record["versions"].keys() >= {"python", "torch", "numpy"}
    assert record.keys() >= {"started", "pid", "host", "code", "platform", "cpu_count"}
    assert module.now() > record["started"]
