"""`data.cache`: decoded images in memory or in a file, and whole data sets on the device."""

import contextlib
import fcntl
import hashlib
import logging
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
import PIL
import torch
import torchvision
from torch import Tensor

from data.batch import least_of, map_leaves, map_tensors, note_least, sent, to_device
from data.decode import read_image
from data.errors import UnreadableError
from data.loading.fetch import offers

logger = logging.getLogger(__name__)

_LAYOUT = 1  # version of the file: the pixels of all images, then each image's height and width
_PART = 256  # images between two checks whether to stop


def memory_file() -> IO[bytes]:
    """Return a file without a name, which goes with its last user; in memory, on Linux."""
    if hasattr(os, "memfd_create"):  # not limited by /dev/shm
        return open(os.memfd_create("regimen"), "w+b")
    return tempfile.TemporaryFile()


@dataclass(eq=False)
class ImageCache:
    """Keep the decoded images (uint8) of a data set of files; filled once, by the main process.

    kind: "ram" is memory of this process, "disk" a file of `folder`; workers share either with it.
    "device" is "ram", from which a device gets its copy.
    The file is named by a digest of the names, sizes and times of the image files. The processes
    of a machine share it; one of them fills it while the others wait.
    most_bytes: limit of the cache, and of all files in `folder`, whose oldest are removed.

    Images that cannot be decoded are not cached: reading them fails as without a cache. `files` has
    `channels`, a length, and `path(index)`.
    """

    kind: Literal["ram", "disk", "device"]
    folder: Path
    most_bytes: int
    _tried: bool = False
    _place: tuple[str, int, int] | None = None  # where workers find it: path, samples, channels
    _pixels: Tensor | None = None
    _file: IO[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pixels": None, "_file": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._place is not None:
            self._map(*self._place)

    def fill(self, files: Any, interrupted: Callable[[], bool]) -> None:
        """Decode all images, once; if interrupted, the next call starts again."""
        if self._tried:
            return
        self._tried = True
        try:
            if self.kind == "disk":
                self._in_folder(files, interrupted)
            else:
                self._file = memory_file()
                self._write(files, self._file, interrupted)
                path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
                self._map(path, len(files), files.channels)
        except _Stopped:
            self._tried = False
        except OSError as error:
            place = f" to data.cache_dir={self.folder}" if self.kind == "disk" else ""
            logger.warning(
                "warning: data.cache=%s: the decoded images cannot be written%s (%s): they are "
                "decoded each time; raise data.cache_bytes, or set data.cache=none",
                self.kind,
                place,
                error.strerror or error,
            )

    def image(self, index: int) -> Tensor | None:
        """Return an image (C, H, W), or None if it is not cached."""
        images = self.batch([index])
        return None if images is None else images[0]

    def batch(self, indices: Sequence[int]) -> Tensor | None:
        """Return images (n, C, H, W); None if sizes differ or one is not cached."""
        rows = np.asarray(indices)
        if self._pixels is None or (shape := self._shape(self._sizes[rows])) is None:
            return None
        length = math.prod(shape)
        every = self._pixels.as_strided((len(self._pixels) - length + 1, length), (1, 1))
        return every.index_select(0, torch.from_numpy(self._offsets[rows])).view(-1, *shape)

    def whole(self) -> Tensor | None:
        """Return all images (n, C, H, W); None if sizes differ or one is not cached."""
        if self._pixels is None or (shape := self._shape(self._sizes)) is None:
            return None
        return self._pixels.view(-1, *shape)

    def _shape(self, sizes: npt.NDArray[np.int64]) -> tuple[int, int, int] | None:
        height, width = sizes[0].tolist()
        return (self._channels, height, width) if height and (sizes == sizes[0]).all() else None

    def _in_folder(self, files: Any, interrupted: Callable[[], bool]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{_identity(files)}.images"
        part = path.with_suffix(".part")
        with _locked(path.with_suffix(".lock"), interrupted):
            if path.exists() and self._map(str(path), len(files), files.channels):
                os.utime(path)
                return
            try:
                with part.open("wb") as file:
                    self._write(files, file, interrupted)
                    os.fsync(file.fileno())
                kept = sorted(self.folder.glob("*.images"), key=lambda file: file.stat().st_mtime)
                while kept and sum(f.stat().st_size for f in (part, *kept)) > self.most_bytes:
                    kept.pop(0).unlink(missing_ok=True)  # processes that have it open keep it
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            self._map(str(path), len(files), files.channels)

    def _write(self, files: Any, file: IO[bytes], interrupted: Callable[[], bool]) -> None:
        """Write all images, decoded by threads without the GIL, and their sizes."""
        logger.info("data.cache=%s: decoding %d images once", self.kind, len(files))

        def decoded(index: int) -> Tensor | None:
            with contextlib.suppress(UnreadableError):
                return read_image(files.path(index), files.channels)
            return None

        sizes = np.zeros((len(files), 2), np.int64)
        left = self.most_bytes - sizes.nbytes
        with ThreadPoolExecutor() as pool:
            for first in range(0, len(files), _PART):
                if interrupted():
                    raise _Stopped
                part = range(first, min(first + _PART, len(files)))
                for index, image in zip(part, pool.map(decoded, part), strict=True):
                    if image is None:
                        continue
                    sizes[index] = image.shape[-2:]
                    left -= image.numel()
                    if left < 0:
                        raise OSError(f"they take more than data.cache_bytes={self.most_bytes}")
                    file.write(image.contiguous().numpy().data)
        file.write(sizes.data)
        file.flush()

    def _map(self, path: str, samples: int, channels: int) -> bool:
        """Map a file into memory; return False if its length is wrong."""
        with open(path, "rb") as file:
            pixels = os.fstat(file.fileno()).st_size - samples * 16
            if pixels <= 0:
                return False
            # Private pages that are never written: all processes share those of the file.
            content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        self._sizes = np.frombuffer(content[pixels:].tobytes(), np.int64).reshape(samples, 2)
        lengths = self._sizes.prod(1) * channels
        if lengths.sum() != pixels:
            return False
        self._channels, self._offsets = channels, np.cumsum(lengths) - lengths
        self._pixels = torch.from_numpy(content[:pixels])
        self._place = (path, samples, channels)
        return True


class _Stopped(Exception):  # noqa: N818 (nothing went wrong)
    """The run ends, so the cache is not needed."""


def _identity(files: Any) -> str:
    """Return a digest of the files' names, sizes and times, and of the decoders' versions."""
    versions = f"{_LAYOUT} {files.channels} {PIL.__version__} {torchvision.__version__}"
    digest = hashlib.sha256(versions.encode())
    for index in range(len(files)):
        told, path = "absent", files.path(index)
        with contextlib.suppress(OSError):
            found = os.stat(path)
            told = f"{found.st_size} {found.st_mtime_ns}"
        digest.update(os.fsencode(path) + f"\0{told}\0".encode())
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _locked(path: Path, interrupted: Callable[[], bool]) -> Iterator[None]:
    """Hold a lock file; waiting processes poll it ten times a second."""
    with path.open("w") as lock:
        while True:
            if interrupted():
                raise _Stopped
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield


def can_be_kept(kind: type) -> bool:
    """Return whether a data set has `tensors()`, and no subclass another way to a sample."""
    return offers(kind, "tensors", "__getitem__", "batch")


@dataclass(eq=False)
class Kept:
    """All samples of a data set on a device: what travels to it are the numbers of samples.

    `dataset.tensors()` returns all samples as one batch, before any transform: tensors with a row
    for each sample; None if they cannot be one.
    most_bytes: a larger data set stays in host memory, with a warning.
    """

    dataset: Any
    device: torch.device
    most_bytes: int
    _tried: bool = False
    _samples: Any = None

    @property
    def ready(self) -> bool:
        """Whether the data set is on the device."""
        return self._samples is not None

    def fill(self) -> None:
        """Copy the data set to the device, once."""
        if self._tried:
            return
        self._tried = True
        samples, why = self.dataset.tensors(), None
        size = bytes_of(samples)
        if samples is None:
            name = type(self.dataset).__name__
            why = f"{name} holds images of several sizes, or that cannot be decoded"
        elif size > self.most_bytes:
            asked = f"data.cache_bytes={self.most_bytes}"
            why = f"{len(self.dataset)} samples take {size} bytes, more than {asked}"
        if why is not None:
            logger.warning("warning: data.cache=device: %s: they stay in host memory", why)
            return
        self._samples = to_device(samples, self.device, non_blocking=False)
        logger.info("data.cache=device: %d bytes on %s", size, self.device)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return samples as a batch on the device, without waiting for it."""
        rows = sent(torch.from_numpy(np.array(indices)), self.device)

        def gathered(tensor: Tensor) -> Tensor:
            found = tensor.index_select(0, rows)
            if (least := least_of(tensor)) is not None and found.device.type != "cpu":
                note_least(found, least)  # it is not more than this
            return found

        return map_tensors(gathered, self._samples)


def bytes_of(samples: Any) -> int:
    """Return the bytes of all tensors of a nested batch."""
    sizes: list[int] = []
    map_leaves(lambda leaf: sizes.append(leaf.nbytes if isinstance(leaf, Tensor) else 0), samples)
    return sum(sizes)
