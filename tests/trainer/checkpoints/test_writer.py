"""A save that fails (disk, memory, an interrupt) leaves the earlier checkpoints as they are."""

import errno
import os
import re
import resource
import subprocess
import sys
import textwrap

import pytest
import torch

from toy_checkpoints import files, in_a_child, payload, value
from trainer.checkpoints.hashing import HashingFile
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import ResourceError, StorageError


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
    from trainer.checkpoints import store as checkpoint
    from trainer.checkpoints.store import CheckpointStore
    from trainer.errors import StorageError

    store = CheckpointStore(Path(sys.argv[1]) / "checkpoints")
    payload = {"model": {"weight": torch.ones(1_250_000)}}
    store.save(payload, step=1)
    for attempt in ("foreseen", "while writing"):
        try:
            store.save(payload, step=2)
        except StorageError as error:
            print(error, error.exit_code)
        print(*sorted(os.listdir(store.folder)))
        checkpoint.check_room = lambda *_: None
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
    foreseen, listing, while_writing, listing_2, newest = result.stdout.splitlines()
    path = tmp_path / "checkpoints" / "step-00000002.pt"
    start = f"cannot write {path}: no space left (need "
    assert re.fullmatch(re.escape(start) + r"6\.0 MB, free 3\.\d MB\) 7", foreseen)
    assert re.fullmatch(re.escape(start) + r"5\.0 MB, free 3\.\d MB\) 7", while_writing)
    assert listing == listing_2 == "index.json last.pt step-00000001.pt"
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


def test_what_was_written_is_not_read_again(store, monkeypatch):
    opened = []
    original = open

    def recorded(path, *arguments, **options):
        opened.append(str(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr("builtins.open", recorded)
    path = store.save(payload(size=10), step=1)
    assert str(path) not in opened


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(MemoryError(), id="python"),
        pytest.param(RuntimeError("can't start new thread"), id="thread"),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), id="torch"),
    ],
)
@pytest.mark.parametrize("after", [0, 3000])
def test_memory_that_gives_out_within_a_save_is_named(store, monkeypatch, error, after):
    store.save(payload(1.0), step=1)
    before = files(store)
    write = HashingFile.write

    def failing(self, data):
        if self.size > after:
            raise error
        return write(self, data)

    monkeypatch.setattr(HashingFile, "write", failing)
    with pytest.raises(ResourceError, match=r"step-00000002.pt: no memory left") as caught:
        store.save(payload(2.0), step=2)
    assert caught.value.exit_code == 8
    assert files(store) == before
    monkeypatch.undo()
    found = store.newest()
    assert found is not None
    assert found[0] == store.path_of(1)
    store.save(payload(2.0), step=2)
    assert value(store.path_of(2)) == 2.0
