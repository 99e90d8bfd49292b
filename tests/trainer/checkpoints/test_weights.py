"""Weights of other programs are read, and what is no such file is refused."""

import contextlib
import json
import random
import struct

import pytest
import safetensors.torch
import torch

from trainer.checkpoints.archive import DamagedCheckpointError, read_safetensors, write_safetensors
from trainer.checkpoints.store import model_only
from trainer.errors import CheckpointError, StorageError

WEIGHTS = {
    "a": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).T,
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 2),
    "half": torch.randn(5).bfloat16(),
    "flags": torch.tensor([True, False]),
    "double": torch.randn(2, dtype=torch.float64, requires_grad=True),
}


def file_of(header, values=b""):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + values


def test_weights_come_back(tmp_path):
    write_safetensors(tmp_path / "best.safetensors", WEIGHTS)
    plain = safetensors.torch.load_file(tmp_path / "best.safetensors")
    for loaded in (model_only(tmp_path / "best.safetensors"), plain):
        assert loaded.keys() == WEIGHTS.keys()
        for name, tensor in WEIGHTS.items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)


def test_tied_weights_have_all_their_names(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    write_safetensors(tmp_path / "best.safetensors", model.state_dict())
    loaded = safetensors.torch.load_file(tmp_path / "best.safetensors")
    model.load_state_dict(loaded)
    assert torch.equal(loaded["0.weight"], loaded["1.weight"])


def test_what_is_read_outlives_its_file(tmp_path):
    path = tmp_path / "best.safetensors"
    write_safetensors(path, {"a": torch.ones(1000)})
    loaded = read_safetensors(path)
    path.write_bytes(b"")
    assert loaded["a"].sum() == 1000


def test_a_file_that_cannot_be_written_is_absent(tmp_path):
    with pytest.raises(StorageError, match="does not exist"):
        write_safetensors(tmp_path / "no" / "w.safetensors", {"a": torch.ones(1)})
    with pytest.raises(StorageError, match=r"w\.safetensors: the format does not.*complex128"):
        write_safetensors(tmp_path / "w.safetensors", {"a": torch.ones(1, dtype=torch.complex128)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(bytes(20), id="zeros"),
        pytest.param(b"<html></html>", id="html"),
        pytest.param(file_of(b"{"), id="broken-json"),
        pytest.param(file_of([1]), id="a-list"),
        pytest.param(file_of({"a": 1}), id="no-description"),
        pytest.param(
            file_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), id="cut-off"
        ),
        pytest.param(
            file_of({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}, bytes(4)),
            id="shape",
        ),
        pytest.param(
            file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, bytes(4)),
            id="negative",
        ),
        pytest.param(
            file_of({"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
            id="dtype",
        ),
    ],
)
def test_damage_is_named(tmp_path, content):
    path = tmp_path / "best.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"best\.safetensors: damaged"):
        read_safetensors(path)


def test_no_damage_raises_anything_else(tmp_path):
    path = tmp_path / "best.safetensors"
    write_safetensors(path, {"a": torch.randn(20)})
    original, generator = path.read_bytes(), random.Random(0)
    for _ in range(300):
        content = bytearray(original[: generator.randrange(len(original) + 1)])
        for _ in range(generator.randrange(4)):
            if content:
                content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(content)
        with contextlib.suppress(CheckpointError):
            read_safetensors(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.safetensors"):
        read_safetensors(tmp_path / "none.safetensors")
