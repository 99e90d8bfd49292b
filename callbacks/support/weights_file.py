"""Write a .safetensors file, for other programs; `trainer.checkpoints.weights` reads it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainer.files.atomic import replacing

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace `path` by a file of these tensors. Raises StorageError."""
    values = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    head = _header(values)
    with replacing(path, need=len(head) + sum(value.nbytes for value in values.values())) as file:
        file.write(struct.pack("<Q", len(head)))
        file.write(head)
        for value in values.values():
            file.write(value.reshape(-1).view(torch.uint8).numpy().data)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    content = json.dumps(header).encode()
    return content + b" " * (-len(content) % 8)  # the values begin aligned
