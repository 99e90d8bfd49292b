import json
import struct
from pathlib import Path

import pytest
import torch

from callbacks.support.weights_file import write_weights
from trainer.checkpoints.weights import read_safetensors
from trainer.errors import StorageError


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    tensors = {
        "weight": torch.randn(3, 4).t(),  # not contiguous
        "half": torch.randn(5).bfloat16(),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
        "none": torch.empty(0, 2),
        "double": torch.randn(2, dtype=torch.float64, requires_grad=True),
    }
    write_weights(tmp_path / "w.safetensors", tensors)
    read = read_safetensors(tmp_path / "w.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_layout(tmp_path: Path) -> None:
    write_weights(tmp_path / "w.safetensors", {"a": torch.tensor([1.0, 2.0])})
    content = (tmp_path / "w.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    assert header["a"] == {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert content[8 + length :] == struct.pack("<2f", 1.0, 2.0)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not exist"):
        write_weights(tmp_path / "no" / "w.safetensors", {"a": torch.ones(1)})
