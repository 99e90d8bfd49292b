"""The write protocol: at every moment the previous or the new checkpoint is whole and named."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess

import pytest
import torch

from toy_checkpoints import files, in_a_child, payload, value
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import CheckpointError


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
    assert index["layouts"][first["layout"]] == {"weight": "float32[1000]"}
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
    monkeypatch.setattr(store, "_point", lambda *_: None)  # killed before the index is written
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
    assert [path.name for path in removed] == [
        "step-00000006.pt"[:0] + f"step-0000000{n}.pt" for n in (6, 4, 1)
    ]
    assert [entry.step for entry in store.entries()] == [2, 3, 5, 7, 8]
    assert value(store.folder / "best.pt") == 2.0


def test_pruning_counts_only_whole_ones(store):
    for step in (1, 2, 3):
        store.save(payload(step), step=step)
    store.path_of(3).write_bytes(b"cut")
    assert store.prune([]) == []


def test_a_lost_index_prunes_nothing_whole(store):
    for step in (1, 2, 3):
        store.save(payload(step), step=step)
    (store.folder / "index.json").unlink()
    store.save(payload(4), step=4)
    assert store.prune([]) == []
    assert {"step-00000001.pt", "step-00000002.pt", "step-00000003.pt"} <= set(files(store))


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
    assert value(store.name("best", 1)) == 1.0
    with pytest.raises(CheckpointError, match="step-00000007"):
        store.name("best", 7)


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
