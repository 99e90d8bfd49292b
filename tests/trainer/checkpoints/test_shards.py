"""Sharded checkpoints: whole or absent at every moment, checked when read, free of code."""

import errno
import hashlib
import importlib
import itertools
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
    group = strategy.group
    store = CheckpointStore(folder)
    mesh = init_device_mesh("cpu", (group.world_size,))
    sharded_weight = distribute_tensor(weight(step), mesh, [Shard(0)])
    sharded_moment = distribute_tensor(weight(step + 1), mesh, [Shard(0)])
    payload = {
        "model": {"weight": sharded_weight, "plain": torch.tensor(float(step))},
        "optimizer": {"state": [{"weight": {"moment": sharded_moment}}]},
    }
    group.run_on_main(store.prepare)
    outline = checkpoint_shards.write(payload, store.path_of(step), group)
    group.run_on_main(lambda: store.save(outline, step=step, names=names))
    group.run_on_main(lambda: store.prune([]))


def in_group(function, *arguments):
    of_group = partial(toys.in_group, kind=FSDP, sharded_checkpoint=True)
    return of_group(lambda strategy: function(strategy, *arguments))


def whole_steps(folder):
    """Return the steps whose checkpoint is whole, with every value as it was saved."""
    steps = []
    for path in sorted(folder.glob("step-*.pt")):
        step = int(path.stem.removeprefix("step-"))
        payload = read_whole(path)
        moment = payload["optimizer"]["state"][0]["weight"]["moment"]
        assert torch.equal(payload["model"]["weight"], weight(step))
        assert torch.equal(moment, weight(step + 1))
        assert payload["model"]["plain"] == step
        steps.append(step)
    return steps


def shard_folders(folder):
    """Return the steps whose shards are there: their folders are called step-00000001-..."""
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("*.shards"))


def metadata_of(saved):
    """Return the description of the shards of the one checkpoint, as torch reads it."""
    (written,) = saved.glob("*.shards/.metadata")
    return pickle.loads(written.read_bytes())


@pytest.fixture
def saved(ranks, tmp_path):
    """A folder with the checkpoint of step 1, saved by two processes."""
    folder = tmp_path / "checkpoints"
    ranks(2, in_group(save, folder, 1))
    return folder


def test_what_is_not_kept_goes_with_its_shards(ranks, tmp_path):
    folder = tmp_path / "checkpoints"

    def run(strategy):
        save(strategy, folder, 1, names=("last", "best"))
        for step in (2, 3, 4):
            save(strategy, folder, step, names=())

    ranks(2, in_group(run))

    last = model_only(folder / "last.pt")

    assert torch.equal(last["weight"], weight(1))
    assert whole_steps(folder) == [1, 3, 4]  # the best and the newest two
    assert shard_folders(folder) == [1, 3, 4]


def dying(strategy, folder, module, name, occurrence):
    """Save, and be killed at the given call of a function."""
    original = getattr(module, name)
    calls = itertools.count(1)

    def fatal(*arguments, **options):
        if next(calls) == occurrence:
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
    newest_two = [*survivors, 3][-2:]
    assert whole_steps(saved) == newest_two
    assert shard_folders(saved) == newest_two
    assert list(saved.glob(".tmp*")) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_damage_is_noticed_and_passed_over(ranks, saved, damage, name):
    ranks(2, in_group(save, saved, 2))
    (folder,) = saved.glob("step-00000002-*.shards")
    file = folder / name
    content = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

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
        place = folder / shards["folder"] / ".metadata"
        place.write_bytes(metadata)
        shards["files"][".metadata"] = hashlib.sha256(metadata).hexdigest()
    if files is not None:
        shards["files"] = files
    (folder / "index.json").unlink(missing_ok=True)
    torch.save(payload, path)
    return path


def refusal_of(path):
    """Return the one line with which a checkpoint is refused."""
    with pytest.raises(CheckpointError) as caught:
        read_whole(path)
    assert caught.type is CheckpointError  # no damage, over which an older one would be taken
    message = str(caught.value)
    assert "\n" not in message
    assert "refused: " in message
    return message


def test_no_code_of_a_description_is_run(saved, tmp_path):
    canary = tmp_path / "canary"
    code = pickle.dumps(Call(os.system, f"touch {canary}"))
    assert "contains code (posix.system" in refusal_of(forge(saved, code))
    assert not canary.exists()


def test_values_that_torch_would_unpickle_are_refused(saved):
    metadata = metadata_of(saved)
    metadata.state_dict_metadata["model/weight"] = BytesStorageMetadata()
    assert "BytesStorage" in refusal_of(forge(saved, pickle.dumps(metadata)))


def test_no_file_elsewhere_is_reached(saved, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    for name in ("../../secret", str(secret), "../secret"):
        with pytest.raises(CheckpointError, match="refused"):
            read_whole(forge(saved, files={name: "0"}))


def test_shards_without_a_description_are_refused(saved):
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        read_whole(forge(saved, files={"__0_0.distcp": "0"}))


def pickled(value):
    """Return the instructions that make a value, without the header and the stop."""
    content = pickle.dumps(value, 2)
    return content.removeprefix(pickle.PROTO + b"\x02").removesuffix(pickle.STOP)


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
    """The pickled state of a class would set its attributes: by a dict, or by its slots."""
    module, thing = of.split()
    named = getattr(importlib.import_module(module), thing)
    before = getattr(named, name, None)
    state = {name: ("changed",)}
    push_class = pickle.GLOBAL + f"{module}\n{thing}\n".encode()
    push_state = pickled((None, state) if slots else state)
    change = push_class + push_state + pickle.BUILD + pickle.POP
    header = pickle.PROTO + b"\x02"
    whole = header + pickled(metadata_of(saved)) + change + pickle.STOP
    path = forge(saved, whole)

    with pytest.raises(CheckpointError, match=r"^[^\n]*\.metadata[^\n]*$"):
        read_whole(path)
    assert getattr(named, name, None) == before


@pytest.mark.parametrize("kind", ["above", "absolute", "a pipe", "not listed"])
def test_shards_lie_in_their_folder(saved, tmp_path, kind):
    (folder,) = saved.glob("*.shards")
    shard = (folder / "__0_0.distcp").read_bytes()
    secret = tmp_path / "secret"
    secret.write_bytes(shard)
    if kind == "above":
        name = "../../secret"
    elif kind == "absolute":
        name = str(secret)
    else:
        name = "other.distcp"
    if kind == "a pipe":
        os.mkfifo(folder / name)
    elif kind == "not listed":
        (folder / name).write_bytes(shard)
    metadata = metadata_of(saved)
    for place in metadata.storage_data.values():
        place.relative_path = name
    path = forge(saved, pickle.dumps(metadata))

    with pytest.raises(CheckpointError, match=f"refused: '{name}' is none of its files"):
        read_whole(path)


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
    metadata = metadata_of(saved)
    metadata = change(metadata) or metadata
    path = forge(saved, pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError):
        read_whole(path)


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
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail(strategy):
        if strategy.group.rank == rank:
            FileSystemWriter.write_data = refuse
        with pytest.raises(StorageError, match=r"step-00000002.pt: no space left"):
            save(strategy, saved, 2)

    ranks(2, in_group(fail))

    assert whole_steps(saved) == [1]
    assert list(saved.glob(".tmp*")) == []
