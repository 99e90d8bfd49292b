"""A run's folder holds what repeats it, tells how the run stands, and belongs to one process."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import yaml

from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import StorageError
from regimen.trainer.files import atomic
from regimen.trainer.runs import directory as module
from regimen.trainer.runs import remote
from regimen.trainer.runs.directory import RunDirectory, name_folder, reserve
from regimen.trainer.runs.lock import LOCK_FILE, RunLock, is_held
from regimen.trainer.runs.status import (
    RunDirectoryError,
    check_run_dir,
    find_unfinished,
    holds_run,
    read_metrics,
    read_status,
)
from toy_runs import FORK, create, hold, kill


def ended(run, state, **end):
    run.finish(state, **end)
    run.release()


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
    record, here = run.manifest(), {"pid": os.getpid(), "host": socket.gethostname()}
    assert record.items() >= {"seed": 1, "created": record["started"], **here}.items()
    assert record.keys() >= {"code", "platform", "cpu_count"}
    assert record["versions"].keys() >= {"python", "torch", "numpy"}
    assert read_status(run.path).items() >= {"state": "running", **here}.items()
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
    ended(run, "preempted", code=130, seconds=2.5)
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
    ended(run, "preempted", **end, resume="train 'name=a b'", results=results, seconds=1)
    status = read_status(run.path)
    assert (began["seconds"], status["seconds"]) == (2.5, 3.5)  # over all starts
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
    logs = tmp_path / "run" / "wandb" / "offline-run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(tmp_path / "cache/core-debug.log")  # of W&B
    RunDirectory.resume(tmp_path / "run", facts={}).release()
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    with pytest.raises(RunDirectoryError, match=f"{name} is a link that leads out of"):
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


def test_a_name_that_leads_elsewhere_is_refused(tmp_path):
    long = ["x" * 300, "é" * 150]
    for name in ("", "..", "a/../../x", "/abs", "a//b", "a/./b", "x\0y", *long, "a/"):
        with pytest.raises(RunDirectoryError, match=r"name: .*\Z") as caught:
            name_folder(tmp_path / "runs", name)
        assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []
    for name in ("a/b", "ä b", "a..b", "..a"):
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


@pytest.fixture
def holding():
    """Start processes that hold a run; end them with the test."""
    started = []

    def start(path, **options):
        ready = FORK.Event()
        process = FORK.Process(target=hold, args=(path, ready), kwargs=options)
        process.start()
        started.append(process)
        assert ready.wait(20)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def hold_with_a_worker(path, ready):
    create(path)
    worker = FORK.Process(target=time.sleep, args=(5,))
    worker.start()
    ready.put(worker.pid)
    worker.join()


def test_a_worker_that_outlives_a_killed_run_does_not_hold_it(tmp_path):
    ready = FORK.SimpleQueue()
    process = FORK.Process(target=hold_with_a_worker, args=(tmp_path / "run", ready))
    process.start()
    worker = ready.get()
    kill(process)
    try:
        os.kill(worker, 0)
        assert read_status(tmp_path / "run")["state"] == "killed"
        RunDirectory.resume(tmp_path / "run", facts={}).release()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_an_address_that_does_not_answer_is_refused(tmp_path, monkeypatch):
    there, over = remote.Remote(f"file://{tmp_path}"), threading.Event()
    there.probe()
    monkeypatch.setattr(remote, "_PATIENCE", 0.05)
    monkeypatch.setattr(there, "_put", lambda *_: over.wait())
    with pytest.raises(StorageError, match=f"{tmp_path}: no answer within 0.05 s"):
        there.probe()
    over.set()


@pytest.mark.parametrize("content", ["", '{"pid": 1}', '{"pid": "x", "host": 1, "since": 2}'])
def test_a_lock_without_a_readable_name_counts_while_it_is_held(tmp_path, monkeypatch, content):
    monkeypatch.setattr("regimen.trainer.runs.lock._PATIENCE", 0.1)
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    assert first.acquire() is None
    first.path.write_text(content)
    assert "unknown" in str(second.acquire())
    assert is_held(tmp_path)
    first.release()
    first.path.write_text(content)
    assert not is_held(tmp_path)
    assert second.acquire() is None
    second.release()


def test_where_locks_are_not_supported_the_recorded_process_decides(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    run = create(tmp_path / "run")
    assert "cannot lock" in caplog.text
    assert is_held(run.path)
    holder = {"pid": 2**22 + 1, "host": socket.gethostname(), "since": "x"}
    (run.path / LOCK_FILE).write_text(json.dumps(holder))
    assert not is_held(run.path)
    run.release()


def test_the_newest_unfinished_run_that_nobody_holds_is_found(tmp_path, holding):
    assert find_unfinished(tmp_path / "none") is None
    assert find_unfinished(tmp_path) is None
    ended(create(tmp_path / "z-oldest"), "preempted")
    ended(create(tmp_path / "failed"), "failed")
    kill(holding(tmp_path / "killed"))
    ended(create(tmp_path / "finished"), "finished")
    living = holding(tmp_path / "running")
    ended(create(tmp_path / "sweeps" / "x" / "0"), "failed")
    ended(create(tmp_path / "damaged"), "failed")
    (tmp_path / "damaged" / "status.json").write_text("")
    assert find_unfinished(tmp_path) == tmp_path / "damaged"  # its checkpoints tell how far it is
    shutil.rmtree(tmp_path / "damaged")
    assert find_unfinished(tmp_path) == tmp_path / "killed"
    resumed = RunDirectory.resume(tmp_path / "killed", facts={})
    assert find_unfinished(tmp_path) == tmp_path / "failed"
    ended(resumed, "finished")
    assert find_unfinished(tmp_path) == tmp_path / "failed"
    kill(living)
    assert find_unfinished(tmp_path) == tmp_path / "running"


def test_a_run_whose_folder_was_moved_writes_nothing_into_the_next_one(tmp_path, holding):
    path = tmp_path / "run"
    run, store = create(path), CheckpointStore(path / "checkpoints")
    path.rename(tmp_path / "moved")
    other = holding(path)
    before = {file: file.read_bytes() for file in path.rglob("*")}
    for write in (store.prepare, lambda: run.finish("finished")):
        with pytest.raises(StorageError, match=f"another run is there now .pid {other.pid} "):
            write()
    assert {file: file.read_bytes() for file in path.rglob("*")} == before
    kill(other)
    run.release()
    store.prepare()


def test_a_run_whose_best_value_is_infinite_keeps_its_end(tmp_path):
    run = create(tmp_path / "run")
    best = {"metric": "val/ratio", "value": float("inf"), "step": 3}
    ended(run, "finished", results={"val/ratio": float("nan"), "val/loss": 1}, best=best)
    status = json.loads((run.path / "status.json").read_text(), parse_constant=pytest.fail)
    assert (status["state"], status["results"]) == ("finished", {"val/ratio": None, "val/loss": 1})
    assert status["best"] == {**best, "value": None}
    assert run.manifest()["exit"]["state"] == "finished"
