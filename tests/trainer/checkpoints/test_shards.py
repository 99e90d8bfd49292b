"""Sharded checkpoints: whole or absent at every moment, checked when read, free of code."""

import errno
import hashlib
import importlib
import os
import pickle
import signal
from functools import partial

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import toys
from regimen.trainer.checkpoints import shards as checkpoint_shards
from regimen.trainer.checkpoints.archive import DamagedCheckpointError
from regimen.trainer.checkpoints.reader import model_only, read_whole
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import CheckpointError, StorageError
from regimen.trainer.strategies.fsdp import FSDP
from toy_runs import Call

ROWS = 7  # which no number of processes divides


def weight(value):
    return torch.arange(ROWS * 3.0).reshape(ROWS, 3) + value


def save(strategy, folder, step, names=("last",)):
    """Save a checkpoint of two sharded tensors and a plain one as the callback does."""
    store = CheckpointStore(folder)
    mesh = init_device_mesh("cpu", (strategy.group.world_size,))
    shards = [distribute_tensor(weight(step + i), mesh, [Shard(0)]) for i in range(2)]
    payload = {
        "model": {"weight": shards[0], "plain": torch.tensor(float(step))},
        "optimizer": {"state": [{"weight": {"moment": shards[1]}}]},
    }
    strategy.group.run_on_main(store.prepare)
    outline = checkpoint_shards.write(payload, store.path_of(step), strategy.group)
    strategy.group.run_on_main(lambda: store.save(outline, step=step, names=names))
    strategy.group.run_on_main(lambda: store.prune([]))


def in_group(function, *arguments):
    of_group = partial(toys.in_group, kind=FSDP, sharded_checkpoint=True)
    return of_group(lambda strategy: function(strategy, *arguments))


def whole_steps(folder):
    """Return the steps whose checkpoint is whole, with every value as it was saved."""
    steps = []
    for path in sorted(folder.glob("step-*.pt")):
        step, payload = int(path.stem[5:]), read_whole(path)
        assert torch.equal(payload["model"]["weight"], weight(step))
        assert torch.equal(payload["optimizer"]["state"][0]["weight"]["moment"], weight(step + 1))
        assert float(payload["model"]["plain"]) == step
        steps.append(step)
    return steps


def shard_folders(folder):
    return sorted(int(path.name[5:13]) for path in folder.glob("*.shards"))


@pytest.fixture
def saved(ranks, tmp_path):
    """A folder with the checkpoint of step 1, saved by two processes."""
    folder = tmp_path / "checkpoints"
    ranks(2, in_group(save, folder, 1))
    return folder


def test_what_is_not_kept_goes_with_its_shards(ranks, tmp_path):
    def run(strategy):
        for step in range(1, 5):
            save(strategy, tmp_path / "checkpoints", step, ("last", "best") if step == 1 else ())

    ranks(2, in_group(run))
    assert torch.equal(model_only(tmp_path / "checkpoints" / "last.pt")["weight"], weight(1))
    assert whole_steps(tmp_path / "checkpoints") == [1, 3, 4]  # the best and the newest two
    assert shard_folders(tmp_path / "checkpoints") == [1, 3, 4]


def dying(strategy, folder, module, name, occurrence):
    original, calls = getattr(module, name), []

    def fatal(*arguments, **options):
        calls.append(1)
        if len(calls) == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(module, name, fatal)
    save(strategy, folder, 2)


@pytest.mark.parametrize(
    ("module", "name", "occurrence", "survivors"),
    [
        pytest.param(FileSystemWriter, "write_data", 1, [1], id="before its files"),
        pytest.param(FileSystemWriter, "finish", 1, [1], id="before their description"),
        pytest.param(checkpoint_shards, "sync_folder", 1, [1], id="before they have their name"),
        pytest.param(checkpoint_shards, "sync_folder", 2, [1], id="before the outline"),
        pytest.param(CheckpointStore, "_point", 1, [1, 2], id="before its names"),
    ],
)
def test_a_kill_at_any_point_leaves_whole_ones(ranks, saved, module, name, occurrence, survivors):
    with pytest.raises(EOFError):
        ranks(1, in_group(dying, saved, module, name, occurrence))
    assert whole_steps(saved) == survivors
    ranks(1, in_group(save, saved, 3))  # the first save of a process cleans up
    assert whole_steps(saved) == [*survivors, 3][-2:]
    assert shard_folders(saved) == [*survivors, 3][-2:]
    assert not list(saved.glob(".tmp*"))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_damage_is_noticed_and_passed_over(ranks, saved, damage, name):
    ranks(2, in_group(save, saved, 2))
    file = next(saved.glob("step-00000002-*.shards")) / name
    content = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content[:-1] if damage == "cut" else content)
    with pytest.raises(DamagedCheckpointError, match=f"its shard .*{name}"):
        read_whole(saved / "last.pt")
    path, _, passed = CheckpointStore(saved).newest()
    assert path.name == "step-00000001.pt"
    assert len(passed) == 1


def forge(folder, metadata=None, files=None):
    """Replace the description of the newest shards, with digests to match, or their list."""
    path = folder / "last.pt"
    payload = torch.load(path, weights_only=True)
    shards = payload["shards"]
    if metadata is not None:
        (folder / shards["folder"] / ".metadata").write_bytes(metadata)
        shards["files"][".metadata"] = hashlib.sha256(metadata).hexdigest()
    shards["files"] = files or shards["files"]
    (folder / "index.json").unlink(missing_ok=True)
    torch.save(payload, path)
    return path


def test_no_code_is_run_and_no_file_elsewhere_reached(saved, tmp_path):
    canary, secret = tmp_path / "canary", tmp_path / "secret"
    (written,) = saved.glob("*.shards/.metadata")
    with_bytes = pickle.loads(written.read_bytes())  # which torch would unpickle
    with_bytes.state_dict_metadata["model/weight"] = BytesStorageMetadata()
    code = Call(os.system, f"touch {canary}")
    for metadata, told in ((code, r"contains code \(posix\.system"), (with_bytes, "BytesStorage")):
        with pytest.raises(CheckpointError, match=rf"^[^\n]*refused: .*{told}[^\n]*$") as caught:
            read_whole(forge(saved, pickle.dumps(metadata)))
        assert caught.type is CheckpointError  # no damage, over which an older one would be taken
    assert not canary.exists()
    secret.write_text("x")
    for name in ("../../secret", str(secret), "../secret"):
        with pytest.raises(CheckpointError, match="refused"):
            read_whole(forge(saved, files={name: "0"}))
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        read_whole(forge(saved, files={"__0_0.distcp": "0"}))


@pytest.mark.parametrize(
    ("of", "name"),
    [
        pytest.param("pathlib PosixPath", "_str", id="paths"),
        pytest.param("torch.distributed.checkpoint.metadata Metadata", "version", id="its kinds"),
        pytest.param("torch.serialization _get_layout", "__defaults__", id="a function"),
        pytest.param("torch Size", "numel", id="a type of torch"),
        pytest.param("torch float32", "itemsize", id="a number format"),
    ],
)
@pytest.mark.parametrize("slots", [True, False], ids=["by slots", "by dict"])
def test_a_description_changes_no_class(saved, of, name, slots):
    module, thing = of.split()
    named = getattr(importlib.import_module(module), thing)
    before = getattr(named, name, None)
    (written,) = saved.glob("*.shards/.metadata")
    whole = pickle.dumps(pickle.loads(written.read_bytes()), 2).removesuffix(pickle.STOP)
    state = {name: ("changed",)}
    told = pickle.dumps((None, state) if slots else state, 2).removesuffix(pickle.STOP)[2:]
    change = pickle.GLOBAL + f"{module}\n{thing}\n".encode() + told + pickle.BUILD + pickle.POP
    with pytest.raises(CheckpointError, match=r"^[^\n]*\.metadata[^\n]*$"):
        read_whole(forge(saved, whole + change + pickle.STOP))
    assert getattr(named, name, None) == before


@pytest.mark.parametrize("kind", ["above", "absolute", "a pipe", "not listed"])
def test_shards_lie_in_their_folder(saved, tmp_path, kind):
    (written,) = saved.glob("*.shards/.metadata")
    metadata = pickle.loads(written.read_bytes())
    folder = written.parent
    places = {"above": "../../secret", "absolute": str(tmp_path / "secret")}
    name = places.get(kind, "other.distcp")
    (tmp_path / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    if kind == "a pipe":
        os.mkfifo(folder / name)
    else:
        (folder / "other.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name
    with pytest.raises(CheckpointError, match=f"refused: '{name}' is none of its files"):
        read_whole(forge(saved, pickle.dumps(metadata)))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_pipe_instead_of_a_shard_is_not_read(saved, name):
    (folder,) = saved.glob("*.shards")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(DamagedCheckpointError, match=f"cannot read its shard .*{name}"):
        read_whole(saved / "last.pt")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: ["a list"], id="a list"),
        pytest.param(lambda m: setattr(m, "storage_data", [1]), id="places as a list"),
        pytest.param(lambda m: setattr(m, "state_dict_metadata", None), id="no tensors"),
        pytest.param(lambda m: next(iter(m.storage_data)).__dict__.pop("fqn"), id="no name"),
        pytest.param(lambda m: m.storage_data.popitem()[1].__dict__.clear(), id="a place less"),
        pytest.param(lambda m: set_all(m.storage_data, "offset", "x"), id="offset as text"),
        pytest.param(lambda m: set_all(m.storage_data, "length", -1), id="negative length"),
        pytest.param(lambda m: set_all(m.state_dict_metadata, "size", (1,)), id="plain size"),
        pytest.param(lambda m: set_all(m.state_dict_metadata, "chunks", 3), id="chunks"),
    ],
)
def test_a_description_of_another_form_is_refused(saved, change):
    (written,) = saved.glob("*.shards/.metadata")
    metadata = pickle.loads(written.read_bytes())
    metadata = change(metadata) or metadata
    with pytest.raises(DamagedCheckpointError):
        read_whole(forge(saved, pickle.dumps(metadata)))


def set_all(values, name, value):
    for each in values.values():
        setattr(each, name, value)


def test_tensors_larger_than_their_files_are_refused_before_memory_is_asked_for(saved):
    path = forge(saved)
    payload = torch.load(path, weights_only=True)
    payload["model"]["weight"] = torch.empty(10**7, 10**7, device="meta")
    torch.save(payload, path)
    with pytest.raises(CheckpointError, match=r"400000000000\d+ bytes of tensors cannot be"):
        read_whole(path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_cannot_write_fails_all(ranks, saved, rank):
    def fail(strategy):
        def refuse(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        if strategy.group.rank == rank:
            FileSystemWriter.write_data = refuse
        with pytest.raises(StorageError, match=r"step-00000002.pt: no space left"):
            save(strategy, saved, 2)

    ranks(2, in_group(fail))
    assert whole_steps(saved) == [1]
    assert sorted(path.name for path in saved.glob(".tmp*")) == []
