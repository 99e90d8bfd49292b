"""A run belongs to one process at a time, also after a kill -9."""

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import time

import pytest

from toy_runs import FORK, create, hold, kill
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import StorageError
from trainer.runs.directory import RunDirectory
from trainer.runs.lock import LOCK_FILE, RunLock, is_held
from trainer.runs.status import RunDirectoryError, find_unfinished, read_status


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


def test_a_second_run_is_refused_naming_the_first(tmp_path, holding):
    process = holding(tmp_path / "run")
    expected = rf"^run_dir: .* is in use by pid {process.pid} on {socket.gethostname()} since 20"
    with pytest.raises(RunDirectoryError, match=expected) as caught:
        create(tmp_path / "run")
    assert caught.value.exit_code == 2
    with pytest.raises(RunDirectoryError, match=expected):
        RunDirectory.resume(tmp_path / "run", facts={})
    assert read_status(tmp_path / "run")["state"] == "running"
    kill(process)
    assert read_status(tmp_path / "run")["state"] == "killed"
    RunDirectory.resume(tmp_path / "run", facts={}).release()


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


@pytest.mark.parametrize("content", ["", '{"pid": 1}', '{"pid": "x", "host": 1, "since": 2}'])
def test_a_lock_without_a_readable_name_counts_while_it_is_held(tmp_path, monkeypatch, content):
    monkeypatch.setattr("trainer.runs.lock._PATIENCE", 0.1)
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


def ended(path, state):
    run = create(path)
    run.finish(state)
    run.release()


def test_the_newest_unfinished_run_that_nobody_holds_is_found(tmp_path, holding):
    assert find_unfinished(tmp_path / "none") is None
    assert find_unfinished(tmp_path) is None
    ended(tmp_path / "z-oldest", "preempted")
    ended(tmp_path / "failed", "failed")
    kill(holding(tmp_path / "killed"))
    ended(tmp_path / "finished", "finished")
    living = holding(tmp_path / "running")
    ended(tmp_path / "sweeps" / "x" / "0", "failed")
    ended(tmp_path / "damaged", "failed")
    (tmp_path / "damaged" / "status.json").write_text("")
    assert find_unfinished(tmp_path) == tmp_path / "damaged"  # its checkpoints tell how far it is
    shutil.rmtree(tmp_path / "damaged")
    assert find_unfinished(tmp_path) == tmp_path / "killed"
    ended_run = RunDirectory.resume(tmp_path / "killed", facts={})
    assert find_unfinished(tmp_path) == tmp_path / "failed"
    ended_run.finish("finished")
    ended_run.release()
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
