"""One array for all samples, in a .npy or .safetensors file beside the table."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from scripts.prediction.table import fsync, hold
from trainer.errors import CheckpointError
from trainer.files.atomic import sync_folder
from trainer.files.storage import storage_error

_CHUNK = 1 << 24  # bytes that are filled at once
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}  # of safetensors, by numpy's names


class ArrayFile:
    """An array [samples, ...] in a file, written batch by batch, named when it is whole.

    The suffix chooses the format; a .safetensors file holds the array as `name`, and `origin` as
    metadata. Samples that could not be read are NaN, or 0 in an array of integers.
    `written`: the samples of an interrupted command that the file holds already.
    """

    def __init__(
        self, path: Path, name: str, samples: int, origin: Mapping[str, Any], written: int
    ) -> None:
        self.path = path
        self._part = path.with_name(f"{path.name}.part")
        self._name = name
        self._samples = samples
        self._origin = origin
        self._written = written
        self._file: IO[bytes] | None = None
        self._begin = 0  # of the samples, in bytes
        self._lost: Any = None  # the row of a sample that could not be read
        if written and path.exists() and not self._part.exists():  # killed before the table's name
            os.replace(path, self._part)

    def write(self, order: Sequence[int], indices: Sequence[int], values: Tensor) -> None:
        """Set the rows of the samples `order`, which follow each other; those read are `indices`.

        Raises StorageError, and CheckpointError for a file that does not hold what it should.
        """
        if not order or (self._file is None and not indices):
            return  # what a row looks like is not known yet
        rows = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        try:
            if self._file is None:
                self._file = self._opened(rows, order[0])
            block = np.repeat(self._lost, len(order), axis=0)
            block[np.array(indices, dtype=int) - order[0]] = rows
            self._file.seek(self._begin + order[0] * self._lost.nbytes)
            self._file.write(block.tobytes())
            self._file.flush()
        except OSError as error:
            raise storage_error(self._part, error) from error

    def finish(self) -> None:
        """Give the file its name. Raises StorageError."""
        if self._file is None and not (self._written and self._part.exists()):
            return
        try:
            self.close()
            fsync(self._part)
            os.replace(self._part, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise storage_error(self.path, error) from error

    def close(self) -> None:
        """Let go of the file; what it holds stays for `resume=auto`."""
        if self._file is not None:
            self._file.close()

    def _opened(self, rows: Any, first: int) -> IO[bytes]:
        lost = np.nan if np.issubdtype(rows.dtype, np.floating) else 0
        self._lost = np.full((1, *rows.shape[1:]), lost, rows.dtype)
        header = self._header(rows.dtype, (self._samples, *rows.shape[1:]))
        self._begin = len(header)
        if self._written:
            return self._continued(header)
        file = self._held()
        file.truncate(0)
        file.write(header)
        many = np.repeat(self._lost, max(1, _CHUNK // max(1, self._lost.nbytes)), axis=0)
        for start in range(0, first, len(many)):  # batches without a sample that could be read
            file.write(many[: first - start].tobytes())
        file.truncate(len(header) + self._samples * self._lost.nbytes)
        return file

    def _continued(self, header: bytes) -> IO[bytes]:
        wanted = len(header) + self._samples * self._lost.nbytes
        file = self._held()
        if os.fstat(file.fileno()).st_size == wanted and file.read(len(header)) == header:
            return file
        file.close()
        raise CheckpointError(
            f"{self._part} does not hold the first {self._written} samples: leave out resume=auto"
        )

    def _held(self) -> IO[bytes]:
        """Open the file, which need not exist, for reading and writing at any place."""
        descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o666)
        file = open(descriptor, "r+b")  # noqa: SIM115 (closed by `close`)
        hold(file, self._part)
        return file

    def _header(self, dtype: Any, shape: tuple[int, ...]) -> bytes:
        if self.path.suffix == ".npy":
            text = io.BytesIO()
            described = {"descr": dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(text, described)
            return text.getvalue()
        size = int(np.prod(shape)) * dtype.itemsize
        entry = {"dtype": _CODES[dtype.name], "shape": shape, "data_offsets": [0, size]}
        told = {"format": "pt", "regimen": json.dumps(self._origin)}
        content = json.dumps({"__metadata__": told, self._name: entry}).encode()
        content += b" " * (-len(content) % 8)  # the values are aligned
        return len(content).to_bytes(8, "little") + content
