"""The write protocol: at every moment the previous or the new checkpoint is whole and named."""

import errno
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
from functools import partial

import pytest
import torch

from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import CheckpointError, ResourceError, StorageError
from toy_runs import files, in_a_child, listed, payload, value, without_links


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def verified(store, *names):
    """Read checkpoints whole, and return the value of each."""
    read = [read_checkpoint(store.folder / f"{name}.pt") for name in names]
    return [value_of(content) for content in read]


def value_of(content):
    return float(content["model"]["weight"][0])


@pytest.fixture
def three(store):
    """Return a store with three checkpoints, of which the second is the best."""
    store.save(payload(1.0), step=10, metrics={"val/loss": 0.5, "x": float("nan")})
    store.save(payload(2.0), step=20, names=("last", "best"))
    store.save(payload(3.0), step=30)
    return store


def test_names_are_links(three):
    last = three.folder / "last.pt"
    best = three.folder / "best.pt"
    assert last.samefile(three.path_of(30))
    assert best.samefile(three.path_of(20))


def test_the_index_describes(three):
    text = (three.folder / "index.json").read_text()
    index = json.loads(text)
    first = index["files"]["step-00000010.pt"]
    content = three.path_of(10).read_bytes()

    assert first["sha256"] == hashlib.sha256(content).hexdigest()
    assert first["metrics"] == {"val/loss": 0.5, "x": None}
    assert first["size"] == len(content)
    assert first["facts"].keys() >= {"torch", "threads", "device", "world_size", "saved"}
    assert index["layout"] == {"weight": "float32[1000]"}
    assert index["names"]["best"]["step"] == 20
    assert list(listed(three.folder)) == [10, 20, 30]


def test_a_name_is_given_to_a_checkpoint_that_is_there(store):
    store.save(payload(1.0), step=10)
    store.save(payload(2.0), step=20, names=("last", "best"))
    store.name({"best": 10, "other": 7})

    assert value(store.folder / "best.pt") == 1.0
    assert not (store.folder / "other.pt").exists()


def note_calls(monkeypatch, events):
    """Note the calls of os that change a folder: the function, and the name of the file."""

    def noted(name, place):
        original = getattr(os, name)

        def call(*arguments, **options):
            path = arguments[place]
            if name == "fsync":  # of an open file
                path = os.readlink(f"/proc/self/fd/{path}")
            base = os.path.basename(path)
            events.append((name, "temporary" if base.startswith(".tmp") else base))
            return original(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    noted("fsync", 0)
    noted("replace", 1)
    noted("unlink", 0)
    noted("link", 0)


def test_the_order_of_the_protocol(store, monkeypatch):
    store.save(payload(), step=1)
    events = []
    note_calls(monkeypatch, events)
    store.save(payload(), step=2)
    store.save(payload(), step=3)
    store.prune([])

    second = [
        ("fsync", "temporary"),
        ("replace", "step-00000002.pt"),
        ("fsync", "checkpoints"),
        ("link", "step-00000002.pt"),
        ("replace", "last.pt"),
        ("fsync", "temporary"),
        ("replace", "index.json"),
        ("fsync", "checkpoints"),
    ]
    third = [(call, name.replace("2", "3")) for call, name in second]

    assert events[:17] == [*second, *third, ("unlink", "step-00000001.pt")]


def save_and_die(folder, point):
    """Save three checkpoints, and be killed at a call of os in the fourth save."""
    store = CheckpointStore(folder)
    store.save(payload(1), step=1, names=("last", "best"))
    store.save(payload(2), step=2)
    store.save(payload(3), step=3)
    calls = itertools.count(1)

    def fatal(original, *arguments, **options):
        if next(calls) == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    for name in ("fsync", "replace", "link", "unlink"):
        original = getattr(os, name)
        setattr(os, name, partial(fatal, original))
    store.save(payload(4.0), step=4)
    store.prune([])


@pytest.mark.quick
@pytest.mark.parametrize("point", range(1, 13))  # one save, and the removal of one file
def test_a_kill_at_any_point_leaves_whole_ones(tmp_path, point):
    folder = tmp_path / "checkpoints"
    survivor = 3 if point <= 2 else 4  # the second call names it
    assert in_a_child(save_and_die, folder, point) == -signal.SIGKILL

    store = CheckpointStore(folder)
    for path in folder.glob("*.pt"):
        read_checkpoint(path)  # whole
    path, loaded, passed = store.newest()

    assert path.name == f"step-0000000{survivor}.pt"
    assert passed == []
    assert value_of(loaded) == survivor
    assert value(folder / "last.pt") in (survivor - 1, survivor)
    assert value(folder / "best.pt") == 1.0

    store.save(payload(5.0), step=5)  # the first save of a process cleans up
    assert list(folder.glob(".tmp*")) == []
    assert value(folder / "last.pt") == 5.0
    assert set(listed(store.folder)) >= {1, 3, survivor, 5}


def test_a_kill_while_the_same_step_is_replaced_leaves_it_readable(store, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    store.save(payload(1.0), step=1, names=("last", "best"))
    monkeypatch.setattr(store, "_point", kill)  # before the index is written

    with pytest.raises(KeyboardInterrupt):
        store.save(payload(2.0), step=1)

    again = CheckpointStore(store.folder)
    _, loaded, _ = again.newest()
    assert value_of(loaded) == 2.0

    again.save(payload(3.0), step=1)
    assert verified(store, "last", "best", "step-00000001") == [3.0, 1.0, 3.0]


def test_where_there_are_no_links_names_are_copies(store, monkeypatch):
    monkeypatch.setattr(os, "link", without_links)
    store.save(payload(1.0), step=1, names=("last", "best"))
    store.save(payload(2.0), step=2)

    assert not os.path.samefile(store.folder / "last.pt", store.path_of(2))
    assert verified(store, "last", "best") == [2.0, 1.0]

    store.path_of(2).write_bytes(b"broken")
    store.path_of(1).write_bytes(b"broken")
    path, _, passed = store.newest()

    assert path.name == "last.pt"
    assert len(passed) == 2


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
            seen.update(verified(store, "last", "best"))
    finally:
        writer.kill()
        writer.join()

    assert len(seen) > 2


def save_eight(store):
    """Save steps 1 to 8, of which 2 is the best."""
    for step in range(1, 9):
        names = ("last", "best") if step == 2 else ("last",)
        store.save(payload(step), step=step, names=names)


def test_pruning_keeps_what_may_be_needed(store):
    save_eight(store)
    store.prune({3, 5})
    assert list(listed(store.folder)) == [2, 3, 5, 7, 8]
    assert value(store.folder / "best.pt") == 2.0

    for step in (2, 3, 5, 7):
        store.path_of(step).write_bytes(b"cut")
    store.prune([])  # the whole ones are counted
    assert list(listed(store.folder)) == [2, 3, 5, 7, 8]


def test_a_file_that_cannot_be_removed_is_told(store, monkeypatch, caplog):
    def refuse(path, **_):
        raise OSError(errno.EACCES, "Permission denied")

    save_eight(store)
    monkeypatch.setattr(os, "unlink", refuse)
    store.prune([])

    assert "step-00000003.pt: Permission denied" in caplog.text


@pytest.mark.parametrize("indexed", [True, False])
def test_the_newest_whole_one_is_taken_and_the_others_named(store, indexed):
    assert store.newest() is None

    for step in (1, 2, 3):
        store.save(payload(step), step=step)
    broken = store.path_of(3)
    broken.write_bytes(broken.read_bytes()[:2000])
    if not indexed:
        (store.folder / "index.json").unlink()
    path, loaded, (passed,) = store.newest()

    assert path == store.path_of(2)
    assert value_of(loaded) == 2.0
    assert str(broken) in passed

    first, _, _ = store.newest(up_to=1)
    assert first == store.path_of(1)

    if not indexed:
        store.clean()
        assert list(listed(store.folder)) == [1, 2]  # what is whole is entered


def test_without_a_whole_checkpoint_nothing_begins_afresh(store):
    store.save(payload(1), step=1)
    store.path_of(1).write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint is whole") as caught:
        store.newest()
    assert "last.pt" not in str(caught.value)  # the same file

    for path in store.folder.glob("*.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        store.newest()


@pytest.mark.parametrize("spoil", [None, "step-00000001.pt", "step-00000099.pt", "other", "copy"])
def test_a_wrong_last_leads_nobody_astray(store, tmp_path, spoil):
    elsewhere = CheckpointStore(tmp_path / "other").save(payload(99), step=99)
    for step in (1, 2):
        store.save(payload(step), step=step)
    last = store.folder / "last.pt"
    last.unlink()
    if spoil == "copy":
        shutil.copy(elsewhere, last)
    elif spoil == "other":
        last.symlink_to(elsewhere)
    elif spoil is not None:
        last.symlink_to(spoil)

    newest, _, _ = store.newest()

    assert newest == store.path_of(2)

    store.clean()
    assert value(last) == 2.0
    assert value(elsewhere) == 99.0


DISK = OSError(errno.EIO, "x")
MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(
    ("module", "name", "error", "raised", "code"),
    [
        pytest.param(os, "fsync", DISK, StorageError, 7, id="disk"),
        pytest.param(torch, "save", MEMORY, ResourceError, 8, id="memory-of-torch"),
        pytest.param(torch, "save", KeyboardInterrupt(), KeyboardInterrupt, None, id="interrupt"),
    ],
)
def test_an_error_while_writing_keeps_the_earlier_ones(
    store, monkeypatch, module, name, error, raised, code
):
    store.save(payload(1), step=1)
    before = files(store)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fail)
        with pytest.raises(raised) as caught:
            store.save(payload(2), step=2)
    if code is not None:
        assert str(caught.value).startswith(f"cannot write {store.path_of(2)}: ")
        assert caught.value.exit_code == code

    assert files(store) == before
    assert value(store.folder / "last.pt") == 1.0

    store.save(payload(2), step=2)
    assert value(store.path_of(2)) == 2.0
