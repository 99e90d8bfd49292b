"""A run's folder holds what repeats it, and tells how the run stands."""

import contextlib
import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from toy_runs import create
from trainer.errors import StorageError
from trainer.files import atomic
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


def written_in(folder):
    return {path.name: path.is_dir() or path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("place", ["a/b/c", "../elsewhere/mine"])
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


def test_a_run_holds_what_repeats_it_and_exists_once_its_manifest_does(tmp_path, monkeypatch):
    written, write = [], atomic.write_text
    for place in (module, atomic):
        monkeypatch.setattr(
            place, "write_text", lambda path, text: (written.append(path.name), write(path, text))
        )
    run = create(tmp_path / "run", seed=1)
    assert written == ["overrides.yaml", "config.yaml", "status.json", "manifest.json"]
    assert (run.path / "config.yaml").read_text() == "seed: 1\n"
    overrides = (run.path / "overrides.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(overrides) == ["seed=1", "name=ü"]
    record = run.manifest()
    assert (record["seed"], record["created"]) == (1, record["started"])
    assert record.keys() >= {"pid", "host", "code", "platform", "cpu_count"}
    assert record["versions"].keys() >= {"python", "torch", "numpy"}
    status = read_status(run.path)
    here = ("running", os.getpid(), socket.gethostname())
    assert (status["state"], status["pid"], status["host"]) == here
    assert module.now() > record["started"]
    run.release()


def test_what_is_there_already_is_refused_and_left_alone(tmp_path):
    create(tmp_path / "run").release()
    (tmp_path / "run" / LOCK_FILE).unlink()
    (tmp_path / "theirs" / "checkpoints").mkdir(parents=True)
    (tmp_path / "theirs" / "config.yaml").write_text("theirs: 1\n")
    for name, text in {
        "run": "already holds a run.*resume=auto",
        "theirs": r"config\.yaml, checkpoints, and no run",
    }.items():
        before = written_in(tmp_path / name)
        with pytest.raises(RunDirectoryError, match=f"(?s){text}") as caught:
            create(tmp_path / name)
        assert caught.value.exit_code == 2
        assert written_in(tmp_path / name) == before


def test_a_resume_and_the_end_are_recorded_in_status_and_manifest(tmp_path):
    run = create(tmp_path / "run", device="cpu")
    run.finish("preempted", code=130)
    run.release()
    (run.path / "checkpoints").mkdir()
    for folder in (run.path, run.path / "checkpoints"):
        (folder / ".tmp-1-dead").write_text("half")
    run = RunDirectory.resume(run.path, facts={"device": "cuda"}, command="train resume=auto")
    assert not list(run.path.rglob(".tmp*"))
    record, began = run.manifest(), read_status(run.path)
    assert (record["device"], record["exit"]) == ("cpu", None)
    assert [start["device"] for start in record["resumed"]] == ["cuda"]
    assert (began["state"], began["resume"]) == ("running", "train resume=auto")
    end = {"code": 143, "reason": "SIGTERM"}
    results = {"test/accuracy": 0.5, "val/loss": float("nan")}
    run.finish("preempted", **end, resume="train 'name=a b'", results=results)
    run.release()
    status = read_status(run.path)
    assert began["started"] == status["started"] < status["updated"]
    assert (status["state"], status["resume"]) == ("preempted", "train 'name=a b'")
    assert status["results"] == {"test/accuracy": 0.5, "val/loss": None}
    assert run.manifest()["exit"].items() >= {"state": "preempted", **end}.items()
    assert not is_held(run.path)


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
    assert [path.name[19:] for path in folders] == ["", "-2", "-3"]
    with pytest.raises(RunDirectoryError, match="holds no run"):
        RunDirectory.resume(folders[0], facts={})
    assert list(folders[0].iterdir()) == []
    create(folders[0]).release()


def test_seconds_add_up_over_all_starts(tmp_path):
    run = create(tmp_path)
    run.finish("preempted", seconds=2.5)
    run.release()
    run = RunDirectory.resume(tmp_path, facts={})
    assert read_status(tmp_path)["seconds"] == 2.5
    run.finish("finished", seconds=1)
    assert read_status(tmp_path)["seconds"] == 3.5
    run.release()


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


@pytest.mark.parametrize("seconds", ['"x"', "null", "1e400", "NaN", "1" + "0" * 400, "{"])
def test_a_status_is_read_or_named_as_damaged(tmp_path, seconds):
    create(tmp_path / "run").release()
    (tmp_path / "run" / "status.json").write_text(f'{{"state": "running", "seconds": {seconds}}}')
    if seconds in ('"x"', "null"):  # tells of none
        RunDirectory.resume(tmp_path / "run", facts={}).release()
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
    "name", ["", "..", "a/../../x", "/abs", "a//b", "a/./b", "x\0y", "x" * 300, "é" * 150, "a/"]
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(RunDirectoryError, match=r"name: .*\Z") as caught:
        name_folder(tmp_path / "runs", name)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a/b", "ä b", "a..b", "..a"])
def test_a_plain_name_is_taken_unless_it_is_a_link_out_of_the_root(tmp_path, name):
    assert name_folder(tmp_path, name) == tmp_path / name
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(tmp_path.parent)
    with pytest.raises(RunDirectoryError, match="leads out"):
        name_folder(tmp_path, name)


def test_code_is_a_commit_and_what_changed_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert module.code_record(tmp_path) == {"path": str(tmp_path), "commit": None}
    remote = "remote add origin https://user:swordfish@example.org/x.git"
    for words in ("init -q", remote, "add a.txt", "commit -qm x"):
        (tmp_path / "a.txt").write_text("one\n")
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", *identity, *words.split()], cwd=tmp_path, check=True)
    clean = module.code_record(tmp_path)
    assert (len(clean["commit"]), clean["changed_files"], clean["diff_sha256"]) == (40, [], None)
    (tmp_path / "new.txt").write_text("untracked\n")
    differences = []
    for text in ("two\n", "three\n"):
        (tmp_path / "a.txt").write_text(text)
        changed = module.code_record(tmp_path)
        assert (changed["commit"], changed["changed_files"]) == (clean["commit"], ["a.txt"])
        differences.append(changed["diff_sha256"])
    assert differences[0] != differences[1]
    monkeypatch.setenv("MY_API_TOKEN", "hunter2")
    monkeypatch.chdir(tmp_path)
    assert not re.search("hunter2|swordfish", json.dumps(module.start_record({})))
    monkeypatch.setenv("PATH", "")
    assert module.code_record(tmp_path)["commit"] is None
