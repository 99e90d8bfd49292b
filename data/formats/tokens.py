"""Token files, memory-mapped: contiguous blocks for language models."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regimen.data.errors import DataError, as_data_error, check_regular
from regimen.data.keys import SPLIT, key
from regimen.data.sources import digest_of
from regimen.data.splits import Split, source_of_split, split_file
from regimen.data.transforms import Transform, acts_on_batches, on_inputs

_SUFFIXES = (".bin", ".npy", ".txt")
Part = tuple[int, int]  # positions in a file: of the first token, and after the last
_HASHED = 1 << 19  # tokens at either end of the file that the fingerprint reads


@dataclass(eq=False)
class TokenBlocks:
    """Blocks of `context` tokens of a file, and the token that follows each of them.

    Samples are `(tokens, following)`, both int64 [context]. Blocks do not overlap within an epoch.
    With `shift` the blocks of each epoch begin at another offset, a function of (seed, epoch). The
    file is memory-mapped: memory does not grow with its size.

    path: `.bin` (numbers of `dtype`), `.npy` or `.txt` (its bytes, 256 classes).
    parts: the parts of the file that are used; None: all of it. No block reaches from one part into
    another.
    """

    path: Path
    context: int
    num_classes: int | None = None
    dtype: Literal["uint16", "uint32"] = "uint16"
    shift: bool = False
    seed: int = 0
    parts: Sequence[Part] | None = None
    transform: Transform = None

    def __post_init__(self) -> None:
        self._tokens = _map_tokens(self.path, self.dtype)
        self._offset = 0
        self._parts = [(0, len(self._tokens))] if self.parts is None else list(self.parts)
        is_text = self.path.suffix == ".txt"
        if self.num_classes is None:
            if not is_text:
                raise DataError(
                    f"data.num_classes is null: set it to the vocabulary's size of {self.path}"
                )
            self.num_classes = 256
        self._max_classes = self.num_classes
        if is_text:
            self.classes = [repr(bytes([n]))[2:-1] for n in range(min(256, self.num_classes))]
        if len(self) < 1:
            tokens = sum(stop - start for start, stop in self._parts)
            raise DataError(
                f"{self.path}: {tokens} tokens are too few for data.context={self.context}"
            )

    def __len__(self) -> int:
        return sum(map(self._num_blocks, self._parts))

    def input_form(self) -> dict[str, Any]:
        """Return what prompts must be brought to; a file of numbers has no text."""
        if self.path.suffix != ".txt":
            return {"kind": "array"}
        return {"kind": "text", "encoding": "bytes", "context": self.context}

    def _num_blocks(self, part: Part) -> int:
        start, stop = part
        # Beyond the blocks: the token that follows the last one, and room for the largest offset.
        spare = self.context if self.shift else 1
        return max(0, stop - start - spare) // self.context

    def _first(self, index: int) -> int:
        """Return the position in the file at which a block begins."""
        for part in self._parts:
            blocks = self._num_blocks(part)
            if index < blocks:
                return part[0] + self._offset + index * self.context
            index -= blocks
        raise IndexError(index)

    def set_epoch(self, epoch: int) -> None:
        """Choose the offset of an epoch's blocks."""
        if self.shift:
            self._offset = key(self.seed, SPLIT, 4, epoch) % self.context

    def __getitem__(self, index: int) -> Any:
        window = self._windows([index])[0]
        return on_inputs(self.transform, (window[:-1], window[1:]))

    def batch(self, indices: Sequence[int]) -> Any:
        """Return a whole batch at once, or None if there are transforms of single samples."""
        if not acts_on_batches(self.transform):
            return None
        windows = self._windows(indices)
        return on_inputs(self.transform, (windows[:, :-1], windows[:, 1:]))

    def fingerprint(self) -> str:
        """Return a digest of the file's size and ends, and of the blocks' position in it."""
        places = f"{len(self._tokens)} {self._parts} {self.context}"
        return digest_of(places, self._tokens[:_HASHED], self._tokens[-_HASHED:])

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the file itself.
        return {**vars(self), "_tokens": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = _map_tokens(self.path, self.dtype)

    def _windows(self, indices: Sequence[int]) -> Tensor:
        """Return the blocks [n, context + 1], each with the token after its last."""
        length = self.context + 1
        firsts = [self._first(index) for index in indices]
        windows = np.stack([self._tokens[first : first + length] for first in firsts])
        if int(windows.max()) >= self._max_classes:
            row, column = np.argwhere(windows >= self._max_classes)[0]
            raise DataError(
                f"{self.path}: token {firsts[row] + column} is {windows[row, column]}, but "
                f"data.num_classes is {self.num_classes} (and data.dtype {self.dtype})"
            )
        return torch.from_numpy(windows.astype(np.int64))


def token_blocks(
    root: str,
    split: Split,
    context: int,
    num_classes: int | None = None,
    dtype: Literal["uint16", "uint32"] = "uint16",
    val_fraction: float = 0.1,
    shift: bool = False,
    split_seed: int = 0,
    transform: Transform = None,
    fold: int = 0,
    folds: int = 0,
) -> TokenBlocks | None:
    """Open one split of `root`: a folder with train, val and test files, or a single file.

    Without a file for `val`, the last `val_fraction` of train's tokens are taken. With `folds` val
    is fold number `fold` of train: a contiguous part, since neighbouring blocks are alike. None if
    there is no such split. Raises DataError.
    """
    find = partial(split_file, Path(root).expanduser(), suffixes=_SUFFIXES)
    path, is_part = source_of_split(find, split, val_fraction, folds)
    if path is None and split == "train":
        raise DataError(f"data.root={root}: no such file, nor a folder with a train.bin")
    if path is None:
        return None
    parts: list[Part] | None = None
    if is_part:
        length = len(_map_tokens(path, dtype))
        if folds:
            start = fold * length // folds
            stop = (fold + 1) * length // folds
        else:
            start = length - round(length * val_fraction)
            stop = length
        parts = [(start, stop)] if split == "val" else [(0, start), (stop, length)]
    return TokenBlocks(path, context, num_classes, dtype, shift, split_seed, parts, transform)


def _map_tokens(path: Path, dtype: str) -> NDArray[Any]:
    """Map a token file. Raises DataError for one that holds no tokens."""
    if path.suffix not in _SUFFIXES:
        raise DataError(f"{path}: expected a file of the kinds {', '.join(_SUFFIXES)}")
    check_regular(path)
    errors = (OSError, ValueError, EOFError, TypeError, OverflowError, MemoryError)
    with as_data_error(f"{path}: cannot be read as tokens", *errors):
        if path.suffix == ".npy":
            tokens: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            if not isinstance(tokens, np.ndarray):  # numpy opens an archive of any name
                raise ValueError(f"holds {type(tokens).__name__}")
        else:
            form = np.dtype("uint8" if path.suffix == ".txt" else dtype).newbyteorder("<")
            size = path.stat().st_size
            if size % form.itemsize or size == 0:
                raise DataError(f"{path}: {size} bytes are no list of {form} (data.dtype)")
            tokens = np.memmap(path, form, mode="r")
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise DataError(f"{path}: holds {tokens.dtype} {list(tokens.shape)}, not a row of integers")
    return tokens
