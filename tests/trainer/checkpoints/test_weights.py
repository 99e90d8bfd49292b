"""Weights of other programs are read, and what is no such file is refused."""

import contextlib
import json
import random
import struct

import pytest
import torch

from callbacks.support.weights_file import write_weights
from trainer.checkpoints.archive import DamagedCheckpointError
from trainer.checkpoints.store import model_only
from trainer.checkpoints.weights import read_safetensors
from trainer.errors import CheckpointError

WEIGHTS = {
    "a": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).T,
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 2),
    "half": torch.randn(5).bfloat16(),
    "flags": torch.tensor([True, False]),
}


def file_of(header, values=b""):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + values


def test_weights_come_back(tmp_path):
    write_weights(tmp_path / "best.safetensors", WEIGHTS)
    loaded = model_only(tmp_path / "best.safetensors")
    assert list(loaded) == list(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


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
    write_weights(path, {"a": torch.randn(20)})
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
