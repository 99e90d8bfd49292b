"""Read a .safetensors file: a JSON header and raw values, nothing that could run.

Format: 8 bytes, the header's length (little endian); the header, `{name: {dtype, shape,
data_offsets}}`; the values, contiguous and little endian.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoints.archive import DamagedCheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of `path` by name, on the CPU. Raises CheckpointError."""
    try:
        content = bytearray(path.read_bytes())
        start = 8 + int(struct.unpack("<Q", content[:8])[0])
        header = json.loads(content[8:start])
        values = memoryview(content)[start:]
        return {name: _tensor(d, values) for name, d in header.items() if name != "__metadata__"}
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{path}: damaged, or no .safetensors file") from error


def _tensor(description: dict[str, Any], values: memoryview) -> torch.Tensor:
    begin, end = description["data_offsets"]
    dtype, shape = _DTYPES[description["dtype"]], description["shape"]
    if not 0 <= begin <= end <= len(values) or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("its offsets do not fit its shape")
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(values[begin:end], dtype=dtype).reshape(shape).clone()
