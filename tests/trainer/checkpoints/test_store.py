"""The write protocol: at every moment the previous or the new checkpoint is whole and named."""

import errno
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from toy_checkpoints import files, in_a_child, payload, value
from trainer.checkpoints.archive import DamagedCheckpointError
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import CheckpointError, ResourceError, StorageError


def test_names_are_links_and_the_index_describes(store):
    store.save(payload(1.0), step=10, metrics={"val/loss": 0.5, "x": float("nan")})
    store.save(payload(2.0), step=20, names=("last", "best"))
    store.save(payload(3.0), step=30)
    assert os.path.samefile(store.folder / "last.pt", store.path_of(30))
    assert os.path.samefile(store.folder / "best.pt", store.path_of(20))
    index = json.loads((store.folder / "index.json").read_text())
    first = index["files"]["step-00000010.pt"]
    assert first["metrics"] == {"val/loss": 0.5, "x": None}
    assert first["size"] == store.path_of(10).stat().st_size
    assert first["facts"].keys() >= {"torch", "threads", "device", "world_size", "saved"}
    assert index["layout"] == {"weight": "float32[1000]"}
    assert index["names"]["best"]["step"] == 20
    assert [entry.step for entry in store.entries()] == [10, 20, 30]


def test_the_digest_is_that_of_the_file(store):
    path = store.save({"model": {"w": torch.randn(600_000), "v": torch.ones(3)}}, step=1)
    expected = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True)
    assert store.entries()[0].sha256 == expected.stdout.split()[0]


def test_the_order_of_the_protocol(store, monkeypatch):
    store.save(payload(), step=1)
    events = []

    def record(name, target):
        original = getattr(os, name)

        def recorded(first, *rest, **options):
            events.append((name, target(first, rest)))
            return original(first, *rest, **options)

        monkeypatch.setattr(os, name, recorded)

    def synced(descriptor, _):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        return "temporary" if name.startswith(".tmp") else name

    record("fsync", synced)
    record("replace", lambda source, rest: os.path.basename(rest[0]))
    record("unlink", lambda path, rest: os.path.basename(path))
    record("link", lambda source, rest: os.path.basename(source))
    store.save(payload(), step=2)
    store.save(payload(), step=3)
    store.prune([])
    one_save = [
        ("fsync", "temporary"),
        ("replace", "step-00000002.pt"),
        ("fsync", "checkpoints"),
        ("link", "step-00000002.pt"),
        ("replace", "last.pt"),
        ("fsync", "temporary"),
        ("replace", "index.json"),
        ("fsync", "checkpoints"),
    ]
    third = [(verb, name.replace("2", "3")) for verb, name in one_save]
    assert events[: len(one_save)] == one_save
    assert events[len(one_save) : 2 * len(one_save)] == third
    assert events[2 * len(one_save)] == ("unlink", "step-00000001.pt")


def save_and_die(folder, name, occurrence, before):
    store = CheckpointStore(folder)
    store.save(payload(1.0), step=1, names=("last", "best"))
    store.save(payload(2.0), step=2)
    store.save(payload(3.0), step=3)
    original, calls = getattr(os, name), []

    def fatal(*arguments, **options):
        calls.append(1)
        if len(calls) < occurrence:
            return original(*arguments, **options)
        if not before:
            original(*arguments, **options)
        return os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, name, fatal)
    store.save(payload(4.0), step=4)
    store.prune([])


@pytest.mark.parametrize(
    ("call", "occurrence", "when", "survivor"),
    [
        pytest.param("fsync", 1, "before", 3, id="written"),
        pytest.param("fsync", 1, "after", 3, id="synced"),
        pytest.param("replace", 1, "after", 4, id="renamed"),
        pytest.param("fsync", 2, "after", 4, id="folder-synced"),
        pytest.param("link", 1, "after", 4, id="linked"),
        pytest.param("replace", 2, "after", 4, id="named"),
        pytest.param("replace", 3, "before", 4, id="index-written"),
        pytest.param("replace", 3, "after", 4, id="index-replaced"),
        pytest.param("unlink", 1, "before", 4, id="retention"),
        pytest.param("unlink", 1, "after", 4, id="one-removed"),
    ],
)
def test_a_kill_at_any_point_leaves_whole_ones(tmp_path, call, occurrence, when, survivor):
    folder = tmp_path / "checkpoints"
    assert in_a_child(save_and_die, folder, call, occurrence, when == "before") == -signal.SIGKILL
    store = CheckpointStore(folder)
    for path in folder.glob("*.pt"):
        store.load(path)
    found = store.newest()
    assert found is not None
    path, loaded, passed = found
    assert (path.name, passed) == (f"step-0000000{survivor}.pt", [])
    assert float(loaded["model"]["weight"][0]) == survivor
    assert value(folder / "last.pt") in (survivor - 1, survivor)
    assert value(folder / "best.pt") == 1.0
    store.save(payload(5.0), step=5)  # the first save of a process cleans up
    assert not list(folder.glob(".tmp*"))
    assert value(folder / "last.pt") == 5.0
    assert {entry.step for entry in store.entries()} >= {1, 3, survivor, 5}


def test_a_save_of_the_same_step_replaces_it(store):
    store.save(payload(1.0), step=1, names=("last", "best"))
    store.save(payload(2.0), step=1)
    assert store.load(store.path_of(1))["model"]["weight"][0] == 2.0
    assert store.load(store.folder / "last.pt")["model"]["weight"][0] == 2.0
    assert store.load(store.folder / "best.pt")["model"]["weight"][0] == 1.0


def test_a_kill_while_the_same_step_is_replaced_leaves_it_readable(store, monkeypatch):
    store.save(payload(1.0), step=1)
    monkeypatch.setattr(store, "_point", lambda *_: 1 / 0)  # killed before the index is written
    with pytest.raises(ZeroDivisionError):
        store.save(payload(2.0), step=1)
    found = CheckpointStore(store.folder).newest()
    assert found is not None
    assert found[1]["model"]["weight"][0] == 2.0


def test_where_there_are_no_links_names_are_copies(store, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    store.save(payload(1.0), step=1, names=("last", "best"))
    store.save(payload(2.0), step=2)
    assert not os.path.samefile(store.folder / "last.pt", store.path_of(2))
    assert [value(store.folder / f"{name}.pt") for name in ("last", "best")] == [2.0, 1.0]
    for name in ("last", "best"):
        store.load(store.folder / f"{name}.pt")
    store.path_of(2).write_bytes(b"broken")
    store.path_of(1).write_bytes(b"broken")
    found = store.newest()
    assert found is not None
    assert found[0].name == "last.pt"
    assert len(found[2]) == 2


def test_pruning_keeps_what_may_be_needed(store):
    for step in range(1, 9):
        store.save(payload(step), step=step, names=("last", "best") if step == 2 else ("last",))
    resuming = CheckpointStore(store.folder)
    resuming.load(resuming.path_of(3))
    removed = resuming.prune({5})
    assert [path.name for path in removed] == [f"step-0000000{n}.pt" for n in (6, 4, 1)]
    assert [entry.step for entry in store.entries()] == [2, 3, 5, 7, 8]
    assert value(store.folder / "best.pt") == 2.0


def test_pruning_counts_only_whole_ones(store):
    for step in (1, 2, 3):
        store.save(payload(step), step=step)
    store.path_of(3).write_bytes(b"cut")
    assert store.prune([]) == []


def test_a_failed_removal_is_a_warning(store, monkeypatch, caplog):
    for step in (1, 2, 3):
        store.save(payload(step), step=step)

    def refuse(path, **_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "unlink", refuse)
    assert store.prune([]) == []
    assert "step-00000001.pt" in caplog.text


def test_a_name_can_be_given_later(store):
    store.save(payload(1), step=1)
    store.save(payload(2), step=2)
    store.name({"last": 2, "best": 1, "other": 7})
    assert value(store.folder / "best.pt") == 1.0
    assert not (store.folder / "other.pt").exists()


def save_forever(folder):
    store = CheckpointStore(folder)
    for step in range(2, 100_000):
        store.save(payload(step, size=10), step=step, names=("last", "best"))
        store.prune([])


def test_a_reader_beside_a_living_run_sees_whole_ones(store):
    store.save(payload(1.0, size=10), step=1, names=("last", "best"))
    writer = multiprocessing.get_context("fork").Process(target=save_forever, args=(store.folder,))
    writer.start()
    seen = set()
    try:
        for _ in range(100):
            for name in ("last", "best"):
                seen.add(float(store.load(store.folder / f"{name}.pt")["model"]["weight"][0]))
    finally:
        writer.kill()
        writer.join()
    assert len(seen) > 2


def test_nothing_saved_is_no_checkpoint(store):
    assert store.newest() is None
    store.folder.mkdir()
    assert store.newest() is None


@pytest.mark.parametrize("indexed", [True, False])
def test_the_newest_whole_one_is_taken_and_the_others_named(store, indexed):
    for step in (1, 2, 3):
        store.save(payload(step), step=step)
    store.path_of(3).write_bytes(store.path_of(3).read_bytes()[:2000])
    if not indexed:
        (store.folder / "index.json").unlink()
    found = store.newest()
    assert found is not None
    path, loaded, passed = found
    assert path == store.path_of(2)
    assert loaded["model"]["weight"][0] == 2.0
    assert len(passed) == 1
    assert str(store.path_of(3)) in passed[0]


def test_if_none_is_whole_it_is_no_fresh_start(store):
    for step in (1, 2):
        store.save(payload(step), step=step)
        store.path_of(step).write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint is whole") as caught:
        store.newest()
    assert "\n" not in str(caught.value)
    for step in (1, 2):
        store.path_of(step).unlink()
    with pytest.raises(CheckpointError):
        store.newest()
    (store.folder / "last.pt").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        store.newest()


def remove(path, elsewhere):
    path.unlink()


def dangle(path, elsewhere):
    path.unlink()
    path.symlink_to("step-00000099.pt")


def point_elsewhere(path, elsewhere):
    path.unlink()
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("spoil", [remove, dangle, point_elsewhere])
def test_a_wrong_last_pointer_leads_nobody_astray(store, tmp_path, spoil):
    elsewhere = CheckpointStore(tmp_path / "other").save(payload(99), step=99)
    for step in (1, 2):
        store.save(payload(step), step=step)
    spoil(store.folder / "last.pt", elsewhere)
    found = store.newest()
    assert found is not None
    assert found[0] == store.path_of(2)
    store.clean()
    assert value(store.folder / "last.pt") == 2.0
    assert value(elsewhere) == 99.0


@pytest.mark.parametrize("spoil", [dangle, point_elsewhere])
def test_a_pointer_alone_is_no_checkpoint(store, tmp_path, spoil):
    elsewhere = CheckpointStore(tmp_path / "other").save(payload(99), step=99)
    store.save(payload(1), step=1)
    store.path_of(1).unlink()
    spoil(store.folder / "last.pt", elsewhere)
    with pytest.raises(CheckpointError):
        store.newest()


def test_an_unlisted_checkpoint_is_entered(store):
    for step in (1, 2):
        store.save(payload(step), step=step)
    (store.folder / "index.json").unlink()
    store.clean()
    assert [entry.step for entry in store.entries()] == [1, 2]
    content = bytearray(store.path_of(2).read_bytes())
    content[700] ^= 1
    store.path_of(2).write_bytes(content)
    with pytest.raises(DamagedCheckpointError):
        store.load(store.path_of(2))


def test_an_index_of_garbage_is_set_up_anew(store, caplog):
    store.save(payload(1), step=1)
    for garbage in ("", "[]", '{"files": 3}', '{"files": {"a": {}}, "names": {}, "layouts": {}}'):
        (store.folder / "index.json").write_text(garbage)
        found = store.newest()
        assert found is not None
    assert "damaged" in caplog.text
    store.save(payload(2), step=2)
    assert [entry.step for entry in store.entries()] == [2]


def test_an_index_that_is_a_pipe_is_not_waited_for(store):
    store.save(payload(1), step=1)
    (store.folder / "index.json").unlink()
    os.mkfifo(store.folder / "index.json")
    found = store.newest()
    assert found is not None
    store.save(payload(2), step=2)
    assert [entry.step for entry in store.entries()] == [2]


def test_an_error_while_writing_keeps_the_earlier_ones(store, monkeypatch):
    store.save(payload(1), step=1)
    before = files(store)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="input/output error"):
            store.save(payload(2), step=2)
    assert files(store) == before
    assert value(store.folder / "last.pt") == 1.0
    with pytest.raises(Exception, match=r"pickle|get local object"):
        store.save({"model": {}, "callbacks": lambda: None}, step=3)
    assert files(store) == before


def test_an_interrupt_while_writing_leaves_no_remains(store, monkeypatch):
    store.save(payload(1), step=1)
    before = files(store)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(payload(2), step=2)
    assert files(store) == before


def test_a_removed_folder_is_said_to_be_gone(tmp_path):
    store = CheckpointStore(tmp_path / "gone" / "checkpoints")
    with pytest.raises(StorageError, match="gone does not exist") as caught:
        store.save(payload(), step=1)
    assert caught.value.exit_code == 7


FULL = """
    import sys, os, torch
    from pathlib import Path
    from trainer.checkpoints.store import CheckpointStore
    from trainer.errors import StorageError

    store = CheckpointStore(Path(sys.argv[1]) / "checkpoints")
    payload = {"model": {"weight": torch.ones(1_250_000)}}
    store.save(payload, step=1)
    try:
        store.save(payload, step=2)
    except StorageError as error:
        print(error, error.exit_code)
    print(*sorted(os.listdir(store.folder)))
    path, _, passed = store.newest()
    print(path.name, passed)
"""


def test_a_full_disk_costs_nothing_but_the_save(tmp_path):
    mounting = ["unshare", "-m", "sh", "-c"]
    if subprocess.run(
        [*mounting, f"mount -t tmpfs none {tmp_path}"], capture_output=True
    ).returncode:
        pytest.skip("mounting a small file system needs root; the size limit is tested below")
    command = [*mounting, f'mount -t tmpfs -o size=8m none {tmp_path} && exec "$@"', "sh"]
    command += [sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.stderr == ""
    refused, listing, newest = result.stdout.splitlines()
    path = tmp_path / "checkpoints" / "step-00000002.pt"
    assert refused == f"cannot write {path}: no space left 7"
    assert listing == "index.json last.pt step-00000001.pt"
    assert newest == "step-00000001.pt []"


def exceed_the_size_limit(folder):
    store = CheckpointStore(folder)
    store.save(payload(1.0), step=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(StorageError, match="file too large"):
        store.save(payload(2.0, size=1_000_000), step=2)
    assert files(store) == ["index.json", "last.pt", "step-00000001.pt"]


def test_a_size_limit_costs_nothing_but_the_save(tmp_path):
    folder = tmp_path / "checkpoints"
    assert in_a_child(exceed_the_size_limit, folder) == 0
    assert value(folder / "last.pt") == 1.0


def test_files_get_the_users_umask(store):
    old = os.umask(0o027)
    try:
        path = store.save(payload(), step=1)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(MemoryError(), id="python"),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), id="torch"),
    ],
)
def test_memory_that_gives_out_within_a_save_is_named(store, monkeypatch, error):
    store.save(payload(1.0), step=1)
    before = files(store)

    def failing(content, file):
        file.write(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", failing)
        with pytest.raises(ResourceError, match=r"step-00000002.pt: no memory left") as caught:
            store.save(payload(2.0), step=2)
    assert caught.value.exit_code == 8
    assert files(store) == before
    store.save(payload(2.0), step=2)
    assert value(store.path_of(2)) == 2.0
