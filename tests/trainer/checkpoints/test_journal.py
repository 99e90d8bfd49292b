"""The index of many checkpoints: bounded writing, and whole at every instant of a kill."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from toy_checkpoints import payload
from trainer.checkpoints import journal
from trainer.checkpoints.index import Entry, Index
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import StorageError

LAYOUT = {f"layer{n}.weight": "float32[64, 64, 3, 3]" for n in range(60)}


def entry(step: int) -> Entry:
    facts = {"torch": "2.15", "threads": 2, "device": "cpu", "world_size": 1, "saved": "now"}
    return Entry(f"step-{step:08d}.pt", step, 10, f"{step:064x}", {"val/loss": 0.5}, facts, "")


def save(folder: Path, step: int, removed: int | None = None) -> None:
    """Do to the index what a save does, and then retention."""
    index = Index.read(folder)
    index.names["last"] = index.add(entry(step), LAYOUT)
    index.write(folder)
    if removed is not None:
        index = Index.read(folder)
        del index.files[entry(removed).file]
        index.write(folder)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No disk is waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each write to an index."""
    sizes: list[int] = []
    replace, append = journal.write_json, journal._append

    def noting_replace(path: Path, content: Any) -> None:
        replace(path, content)
        sizes.append(path.stat().st_size)

    def noting_append(path: Path, line: str) -> int:
        sizes.append(len(line))
        return append(path, line)

    monkeypatch.setattr(journal, "write_json", noting_replace)
    monkeypatch.setattr(journal, "_append", noting_append)
    return sizes


def test_what_is_written_grows_with_the_checkpoints_and_not_with_their_square(
    tmp_path: Path, written: list[int]
) -> None:
    sums = []
    for step in range(1, 121):
        save(tmp_path, step)
        if step in (60, 120):
            sums.append(sum(written))
    assert sums[1] < 2 * sums[0]  # a whole index each time: more than three times as much
    index = Index.read(tmp_path)
    assert [e.step for e in index.files.values()] == list(range(1, 121))
    assert index.names["last"].step == 120
    assert list(index.layouts.values()) == [LAYOUT]


def test_a_small_index_is_one_file_that_says_all(tmp_path: Path) -> None:
    index = Index()
    for step in (1, 2):
        index.names["last"] = index.add(entry(step), {"weight": "float32[3]"})
        index.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]
    assert json.loads((tmp_path / "index.json").read_text())["names"]["last"]["step"] == 2


def state(folder: Path) -> tuple[list[int], dict[str, int]]:
    index = Index.read(folder)
    steps = sorted(e.step for e in index.files.values())
    return steps, {name: e.step for name, e in index.names.items()}


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("function", ["fsync", "replace", "unlink", "ftruncate", "write"])
def test_a_kill_at_any_instant_leaves_the_old_index_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Checkpoints come and go, and each write is broken off at one of its system calls."""
    monkeypatch.setattr(journal, "_SMALL", 0)
    for step in range(1, 9):
        save(tmp_path, step)
    plain = getattr(os, function)
    met = 0
    for step in range(9, 60):
        before = state(tmp_path)
        calls = 0

        def failing(
            *args: Any, moment: int = step % 2 if function == "fsync" else 0, **options: Any
        ) -> Any:
            nonlocal calls, met
            calls += 1
            if calls > moment:
                met += 1
                if function == "write":
                    plain(args[0], bytes(args[1])[:20])  # a torn line
                raise Killed
            return plain(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, function, failing)
            with contextlib.suppress(Killed):
                save(tmp_path, step)
        after = state(tmp_path)
        grown = (sorted({*before[0], step}), {"last": step})
        assert after in (before, grown)
        save(tmp_path, step, removed=min(after[0]))  # the next process does it again
        assert state(tmp_path) == (sorted({*after[0], step} - {min(after[0])}), {"last": step})
    assert met > 0


def test_a_full_disk_leaves_the_index_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 41):
        save(tmp_path, step)
    before, write = state(tmp_path), os.write
    log = (tmp_path / "index.jsonl").read_bytes()

    def full(descriptor: int, content: Any) -> int:
        if len(content) > 500:
            return write(descriptor, content[: len(content) - 500])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError, match="no space left"):
            save(tmp_path, 41)
    assert state(tmp_path) == before
    assert (tmp_path / "index.jsonl").read_bytes() == log
    save(tmp_path, 41)
    assert state(tmp_path) == ([*before[0], 41], {"last": 41})


def test_changes_without_their_index_count_for_nothing(tmp_path: Path, caplog: Any) -> None:
    for step in range(1, 41):
        save(tmp_path, step)
    assert (tmp_path / "index.jsonl").exists()
    kept = (tmp_path / "index.json").read_bytes()
    (tmp_path / "index.json").unlink()
    assert state(tmp_path) == ([], {})
    (tmp_path / "index.json").write_bytes(kept)
    (tmp_path / "index.jsonl").write_text("3\n[]\n")
    assert state(tmp_path) == ([], {})
    assert "damaged" in caplog.text
    save(tmp_path, 50)
    assert state(tmp_path) == ([50], {"last": 50})


def test_what_is_read_does_not_grow_with_the_saves(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_SMALL", 1000)
    reads, plain = [], Index.read
    monkeypatch.setattr(Index, "read", lambda folder: reads.append(folder) or plain(folder))

    def go_on(steps: range) -> int:
        del reads[:]
        for step in steps:
            store.save(payload(step), step=step, metrics={"val/loss": float(step)})
            store.prune(range(step))
        return len(reads)

    first = go_on(range(1, 4))
    assert first <= 3  # what a killed process left is looked for once
    assert go_on(range(4, 40)) == 0
    assert state(store.folder) == (list(range(1, 40)), {"last": 39})
    assert CheckpointStore(store.folder).entries() == store.entries()


def test_what_another_process_wrote_is_kept(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.save(payload(step), step=step)
    CheckpointStore(store.folder).name("mine", 2)
    store.save(payload(4), step=4)
    assert state(store.folder) == ([1, 2, 3, 4], {"last": 4, "mine": 2})


def test_a_failed_save_is_not_remembered(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(payload(1), step=1)
    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoints.store.link_or_copy", lambda *paths: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.save(payload(2), step=2)
    store.save(payload(3), step=3)
    assert state(store.folder) == ([1, 3], {"last": 3})
