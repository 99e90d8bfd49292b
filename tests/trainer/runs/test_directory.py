"""A run's folder holds what repeats it, tells how the run stands, and belongs to one process."""

import contextlib
import errno
import fcntl
import json
import os
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


def resume(path, **facts):
    return RunDirectory.resume(path, facts=facts)


def written_in(folder):
    """Return what lies in a folder: the bytes of each file, True for a folder."""
    return {path.name: path.is_dir() or path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("place", ["a/b/c", "../elsewhere/mine"])
def test_missing_parents_are_made_and_removed_with_a_run_that_is_refused(
    tmp_path, monkeypatch, place
):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    run = create(Path(place))

    assert holds_run(Path(place))

    monkeypatch.chdir(tmp_path)  # what a relative path has meant it goes on to mean
    run.finish("finished")
    assert read_status(run.path)["state"] == "finished"

    run.discard()
    assert list(tmp_path.rglob("*")) == [work]


def test_a_run_exists_once_its_manifest_does(tmp_path, monkeypatch):
    names = []
    write = atomic.write_text

    def write_and_note(path, text):
        names.append(path.name)
        write(path, text)

    for place in (module, atomic):
        monkeypatch.setattr(place, "write_text", write_and_note)
    create(tmp_path / "run").release()

    assert names == ["overrides.yaml", "config.yaml", "status.json", "manifest.json"]


def test_a_run_holds_what_repeats_it(tmp_path):
    run = create(tmp_path / "run", seed=1)
    config = (run.path / "config.yaml").read_text()
    overrides = (run.path / "overrides.yaml").read_text(encoding="utf-8")
    record = run.manifest()
    status = read_status(run.path)
    run.release()

    assert config == "seed: 1\n"
    assert yaml.safe_load(overrides) == ["seed=1", "name=ü"]
    assert record["seed"] == 1
    assert record["created"] == record["started"]
    assert record["started"] < module.now()
    assert record.keys() >= {"code", "platform", "cpu_count"}
    assert record["versions"].keys() >= {"python", "torch", "numpy"}
    assert status["state"] == "running"
    for told in (record, status):
        assert told["pid"] == os.getpid()
        assert told["host"] == socket.gethostname()


def assert_refused(folder, text):
    before = written_in(folder)
    with pytest.raises(RunDirectoryError, match=f"(?s){text}") as caught:
        create(folder)
    assert caught.value.exit_code == 2
    assert written_in(folder) == before


def test_a_run_that_is_there_already_is_refused_and_left_alone(tmp_path):
    create(tmp_path / "run").release()
    (tmp_path / "run" / LOCK_FILE).unlink()
    assert_refused(tmp_path / "run", "already holds a run.*resume=auto")


def test_files_of_others_that_a_run_would_write_are_left_alone(tmp_path):
    theirs = tmp_path / "theirs"
    (theirs / "checkpoints").mkdir(parents=True)
    (theirs / "config.yaml").write_text("theirs: 1\n")
    assert_refused(theirs, r"config\.yaml, checkpoints, and no run")


def test_a_resume_removes_files_that_were_half_written(tmp_path):
    run = create(tmp_path / "run")
    ended(run, "preempted")
    checkpoints = run.path / "checkpoints"
    checkpoints.mkdir()
    for folder in (run.path, checkpoints):
        (folder / ".tmp-1-dead").write_text("half")

    resume(run.path).release()

    assert not list(run.path.rglob(".tmp*"))


def test_a_resume_and_the_end_are_recorded_in_status_and_manifest(tmp_path):
    run = create(tmp_path / "run", device="cpu")
    ended(run, "preempted", code=130, seconds=2.5)

    run = RunDirectory.resume(run.path, facts={"device": "cuda"}, command="train resume=auto")
    record = run.manifest()
    began = read_status(run.path)

    assert record["device"] == "cpu"
    assert record["exit"] is None
    assert [start["device"] for start in record["resumed"]] == ["cuda"]
    assert began["state"] == "running"
    assert began["resume"] == "train resume=auto"
    assert began["seconds"] == 2.5

    end = {"code": 143, "reason": "SIGTERM"}
    results = {"test/accuracy": 0.5, "val/loss": float("nan")}
    ended(
        run,
        "preempted",
        **end,
        resume="train 'name=a b'",
        results=results,
        seconds=1,
    )
    status = read_status(run.path)
    recorded = run.manifest()["exit"]
    expected = {"state": "preempted", **end}

    assert status["seconds"] == 3.5  # over all starts
    assert began["started"] == status["started"] < status["updated"]
    assert status["state"] == "preempted"
    assert status["resume"] == "train 'name=a b'"
    assert status["results"] == {"test/accuracy": 0.5, "val/loss": None}
    assert recorded.items() >= expected.items()
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
    path = tmp_path / "run"
    create(path).release()
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    link = path / name
    if link.is_dir():
        link.rmdir()
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(victim)

    with pytest.raises(RunDirectoryError, match=f"{name} is a link that leads out of"):
        resume(path)

    (path / "manifest.json").unlink()
    with pytest.raises(RunDirectoryError):
        create(path)
    assert victim.read_text() == "theirs"


def test_links_within_a_run_and_those_of_wandb_may_stay(tmp_path):
    path = tmp_path / "run"
    create(path).release()
    (path / "latest").symlink_to("status.json")
    logs = path / "wandb" / "offline-run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(tmp_path / "cache/core-debug.log")

    resume(path).release()


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path):
    time_of_all = "2026-01-01_00-00-00"
    folders = [reserve(tmp_path / "a" / "b", time_of_all) for _ in range(3)]
    suffixes = [folder.name.removeprefix(time_of_all) for folder in folders]

    assert suffixes == ["", "-2", "-3"]

    with pytest.raises(RunDirectoryError, match="holds no run"):
        resume(folders[0])
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


@pytest.fixture
def run_with_seconds(tmp_path):
    """Return a function that makes a run whose status says how long it took."""

    def make(seconds):
        path = tmp_path / "run"
        create(path).release()
        (path / "status.json").write_text(f'{{"state": "running", "seconds": {seconds}}}')
        return path

    return make


@pytest.mark.parametrize("seconds", ['"x"', "null"])
def test_a_status_without_a_time_tells_of_none(run_with_seconds, seconds):
    path = run_with_seconds(seconds)
    resume(path).release()
    assert read_status(path)["seconds"] == 0.0


@pytest.mark.parametrize("seconds", ["1e400", "NaN", "1" + "0" * 400, "{"])
def test_a_damaged_status_is_named(run_with_seconds, seconds):
    path = run_with_seconds(seconds)
    with pytest.raises(RunDirectoryError, match=r"status\.json"):
        read_status(path)


@pytest.mark.parametrize("target", ["nowhere", "link", "file"], ids=["dangling", "loop", "file"])
def test_what_is_no_folder_cannot_be_a_run_directory(tmp_path, target):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / target)
    for path in (tmp_path / "link", tmp_path / "file" / "run"):
        with pytest.raises(RunDirectoryError, match="is no folder"):
            check_run_dir(path)


NO_NAMES = ["", "..", "a/../../x", "/abs", "a//b", "a/./b", "x\0y", "x" * 300, "é" * 150, "a/"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(RunDirectoryError, match=r"name: .*\Z") as caught:
        name_folder(tmp_path / "runs", name)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a/b", "ä b", "a..b", "..a"])
def test_a_name_is_a_folder_unless_a_link_leads_out_there(tmp_path, name):
    folder = tmp_path / name
    assert name_folder(tmp_path, name) == folder

    folder.parent.mkdir(exist_ok=True)
    folder.symlink_to(tmp_path.parent)
    with pytest.raises(RunDirectoryError, match="leads out"):
        name_folder(tmp_path, name)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a folder with a commit of one file, and a remote whose address holds a password."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    remote_of_it = "remote add origin https://user:swordfish@example.org/x.git"
    for words in ("init -q", remote_of_it, "add a.txt", "commit -qm x"):
        subprocess.run(["git", *identity, *words.split()], cwd=folder, check=True)
    return folder


def test_code_is_a_commit_and_what_changed(tmp_path, repository):
    clean = module.code_record(repository)
    (repository / "new.txt").write_text("untracked\n")
    (repository / "a.txt").write_text("two\n")
    second = module.code_record(repository)
    (repository / "a.txt").write_text("three\n")
    third = module.code_record(repository)

    assert len(clean["commit"]) == 40
    assert clean["changed_files"] == []
    assert clean["diff_sha256"] is None
    for changed in (second, third):
        assert changed["commit"] == clean["commit"]
        assert changed["changed_files"] == ["a.txt"]
    assert second["diff_sha256"] != third["diff_sha256"]


def test_code_without_a_repository_or_git_has_no_commit(tmp_path, repository, monkeypatch):
    assert module.code_record(tmp_path) == {"path": str(tmp_path), "commit": None}
    monkeypatch.setenv("PATH", "")
    assert module.code_record(repository)["commit"] is None


def test_the_record_of_a_start_holds_no_secret(repository, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "hunter2")
    monkeypatch.chdir(repository)
    record = json.dumps(module.start_record({}))

    assert "hunter2" not in record
    assert "swordfish" not in record


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
    path = tmp_path / "run"
    ready = FORK.SimpleQueue()
    process = FORK.Process(target=hold_with_a_worker, args=(path, ready))
    process.start()
    worker = ready.get()
    kill(process)
    try:
        os.kill(worker, 0)  # it lives
        assert read_status(path)["state"] == "killed"
        resume(path).release()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_an_address_that_does_not_answer_is_refused(tmp_path, monkeypatch):
    there = remote.Remote(f"file://{tmp_path}")
    over = threading.Event()
    there.probe()
    monkeypatch.setattr(remote, "_PATIENCE", 0.05)
    monkeypatch.setattr(there, "_put", lambda *_: over.wait())

    with pytest.raises(StorageError, match=f"{tmp_path}: no answer within 0.05 s"):
        there.probe()

    over.set()


@pytest.mark.parametrize("content", ["", '{"pid": 1}', '{"pid": "x", "host": 1, "since": 2}'])
def test_a_lock_without_a_readable_name_counts_while_it_is_held(tmp_path, monkeypatch, content):
    monkeypatch.setattr("regimen.trainer.runs.lock._PATIENCE", 0.1)
    first = RunLock(tmp_path)
    second = RunLock(tmp_path)

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

    holder = {
        "pid": 2**22 + 1,
        "host": socket.gethostname(),
        "since": "x",
    }
    (run.path / LOCK_FILE).write_text(json.dumps(holder))
    assert not is_held(run.path)

    run.release()


def test_the_newest_unfinished_run_that_nobody_holds_is_found(tmp_path, holding):
    assert find_unfinished(tmp_path / "none") is None
    assert find_unfinished(tmp_path) is None

    damaged = tmp_path / "damaged"
    killed = tmp_path / "killed"
    failed = tmp_path / "failed"
    ended(create(tmp_path / "z-oldest"), "preempted")
    ended(create(failed), "failed")
    kill(holding(killed))
    ended(create(tmp_path / "finished"), "finished")
    living = holding(tmp_path / "running")
    ended(create(tmp_path / "sweeps" / "x" / "0"), "failed")
    ended(create(damaged), "failed")
    (damaged / "status.json").write_text("")

    assert find_unfinished(tmp_path) == damaged  # its checkpoints tell how far it is

    shutil.rmtree(damaged)
    assert find_unfinished(tmp_path) == killed

    resumed = resume(killed)
    assert find_unfinished(tmp_path) == failed

    ended(resumed, "finished")
    assert find_unfinished(tmp_path) == failed

    kill(living)
    assert find_unfinished(tmp_path) == tmp_path / "running"


def test_a_run_whose_folder_was_moved_writes_nothing_into_the_next_one(tmp_path, holding):
    path = tmp_path / "run"
    run = create(path)
    store = CheckpointStore(path / "checkpoints")
    path.rename(tmp_path / "moved")
    other = holding(path)
    before = written_in(path)
    told = f"another run is there now .pid {other.pid} "

    with pytest.raises(StorageError, match=told):
        store.prepare()
    with pytest.raises(StorageError, match=told):
        run.finish("finished")
    assert written_in(path) == before

    kill(other)
    run.release()
    store.prepare()


def test_a_run_whose_best_value_is_infinite_keeps_its_end(tmp_path):
    run = create(tmp_path / "run")
    best = {
        "metric": "val/ratio",
        "value": float("inf"),
        "step": 3,
    }
    results = {"val/ratio": float("nan"), "val/loss": 1}
    ended(run, "finished", results=results, best=best)

    text = (run.path / "status.json").read_text()
    status = json.loads(text, parse_constant=pytest.fail)  # NaN would be no JSON

    assert status["state"] == "finished"
    assert status["results"] == {"val/ratio": None, "val/loss": 1}
    assert status["best"] == {**best, "value": None}
    assert run.manifest()["exit"]["state"] == "finished"
