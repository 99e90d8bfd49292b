"""A cache of decoded images, in memory or in a file."""

import fcntl
import hashlib
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
import numpy.typing as npt
import PIL
import torch
import torchvision
from torch import Tensor

from data.decode import read_image
from data.errors import UnreadableError

logger = logging.getLogger(__name__)

_LAYOUT = 1  # version of the file: the pixels of all images, then each image's height and width
_PART = 256  # images between two checks whether to stop
_SUFFIX = ".images"


class Files(Protocol):
    """The image files that are cached."""

    channels: int

    def __len__(self) -> int: ...
    def path(self, index: int) -> str:
        """Return the file of a sample."""


class ImageCache:
    """Keep the decoded images (uint8) of a data set of files; filled once, by the main process.

    kind: "ram" is memory of this process, "disk" a file of `folder`; workers share either with it.
    "device" is "ram", from which a device gets its copy.
    The file is named by a digest of the names, sizes and times of the image files. The processes
    of a machine share it; one of them fills it while the others wait.
    most_bytes: limit of the cache, and of all files in `folder`, whose oldest are removed.

    Images that cannot be decoded are not cached: reading them fails as without a cache.
    """

    def __init__(
        self, kind: Literal["ram", "disk", "device"], folder: Path, most_bytes: int
    ) -> None:
        self.kind = kind
        self.folder = folder
        self.most_bytes = most_bytes
        self._tried = False
        self._place: tuple[str, int, int] | None = None  # where workers find it: path, n, channels
        self._pixels: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pixels": None, "_file": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._place is not None:
            with Path(self._place[0]).open("rb") as file:
                self._map(file, *self._place)

    def fill(self, files: Files, interrupted: Callable[[], bool]) -> None:
        """Decode all images, once; if interrupted, the next call starts again."""
        if self._tried:
            return
        self._tried = True
        try:
            if self.kind == "disk":
                self._in_folder(files, interrupted)
            else:
                self._in_memory(files, interrupted)
        except OSError as error:
            place = f" to data.cache_dir={self.folder}" if self.kind == "disk" else ""
            self._without(f"cannot be written{place} ({error.strerror or error})")
        except _Stopped:
            self._tried = False

    def image(self, index: int) -> Tensor | None:
        """Return an image (C, H, W), or None if it is not cached."""
        images = self.batch([index])
        return None if images is None else images[0]

    def batch(self, indices: Sequence[int]) -> Tensor | None:
        """Return images (n, C, H, W); None if sizes differ or one is not cached."""
        if self._pixels is None or self._place is None:
            return None
        rows = np.asarray(indices)
        sizes = self._sizes[rows]
        if (sizes != sizes[0]).any() or not sizes[0].any():
            return None
        height, width = sizes[0].tolist()
        shape = (self._place[2], height, width)
        length = shape[0] * height * width
        every = self._pixels.as_strided((len(self._pixels) - length + 1, length), (1, 1))
        return every.index_select(0, torch.from_numpy(self._offsets[rows])).view(-1, *shape)

    def whole(self) -> Tensor | None:
        """Return all images (n, C, H, W); None if sizes differ or one is not cached."""
        if self._pixels is None or self._place is None:
            return None
        if (self._sizes != self._sizes[0]).any() or not self._sizes[0].any():
            return None
        height, width = self._sizes[0].tolist()
        return self._pixels.view(-1, self._place[2], height, width)

    def _in_memory(self, files: Files, interrupted: Callable[[], bool]) -> None:
        # A file without a name: not limited by /dev/shm, and removed with its processes.
        self._file = os.fdopen(os.memfd_create("images"), "w+b")
        if self._written(files, self._file, interrupted):
            path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
            self._map(self._file, path, len(files), files.channels)

    def _in_folder(self, files: Files, interrupted: Callable[[], bool]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{_identity(files)}{_SUFFIX}"
        with _locked(path.with_suffix(".lock"), interrupted):
            if not self._opened(path, files) and self._made(path, files, interrupted):
                self._opened(path, files)

    def _opened(self, path: Path, files: Files) -> bool:
        try:
            with path.open("rb") as file:
                os.utime(path)
                return self._map(file, str(path), len(files), files.channels)
        except FileNotFoundError:
            return False

    def _made(self, path: Path, files: Files, interrupted: Callable[[], bool]) -> bool:
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                if not self._written(files, file, interrupted):
                    return False
                os.fsync(file.fileno())
            self._make_room(part.stat().st_size)
            part.replace(path)
            return True
        finally:
            part.unlink(missing_ok=True)

    def _make_room(self, needed: int) -> None:
        kept = sorted(self.folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
        while kept and needed + sum(path.stat().st_size for path in kept) > self.most_bytes:
            kept.pop(0).unlink(missing_ok=True)  # processes that have it open keep it

    def _written(self, files: Files, file: BinaryIO, interrupted: Callable[[], bool]) -> bool:
        """Write all images and their sizes; return False, with a warning, if they are too large."""
        logger.info("data.cache=%s: decoding %d images once", self.kind, len(files))
        sizes = np.zeros((len(files), 2), np.int64)
        left = self.most_bytes - sizes.nbytes
        for index, image in enumerate(_decoded(files, interrupted)):
            if image is None:
                continue
            sizes[index] = image.shape[-2:]
            left -= image.numel()
            if left < 0:
                self._without(f"would take more than data.cache_bytes={self.most_bytes}")
                return False
            file.write(image.contiguous().numpy().data)
        file.write(sizes.data)
        file.flush()
        return True

    def _map(self, file: BinaryIO, path: str, samples: int, channels: int) -> bool:
        """Map a file into memory; return False if its length is wrong."""
        whole, tail = os.fstat(file.fileno()).st_size, samples * 16
        if whole <= tail:
            return False
        # Private pages that are never written: all processes share those of the file.
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        sizes: npt.NDArray[np.int64] = np.frombuffer(content[whole - tail :].tobytes(), np.int64)
        self._sizes = sizes.reshape(samples, 2)
        lengths = self._sizes.prod(1) * channels
        if lengths.sum() != whole - tail:
            return False
        self._offsets = np.cumsum(lengths) - lengths
        self._pixels = torch.from_numpy(content[: whole - tail])
        self._place = (path, samples, channels)
        return True

    def _without(self, why: str) -> None:
        logger.warning(
            "warning: data.cache=%s: the decoded images %s: they are decoded each time; raise "
            "data.cache_bytes, or set data.cache=none",
            self.kind,
            why,
        )


class _Stopped(Exception):  # noqa: N818 (nothing went wrong)
    """The run ends, so the cache is not needed."""


def _decoded(files: Files, interrupted: Callable[[], bool]) -> Iterator[Tensor | None]:
    """Yield all images in order, None for a broken one; threads decode without the GIL."""

    def decoded(index: int) -> Tensor | None:
        try:
            return read_image(files.path(index), files.channels)
        except UnreadableError:
            return None

    with ThreadPoolExecutor() as pool:
        for first in range(0, len(files), _PART):
            if interrupted():
                raise _Stopped
            yield from pool.map(decoded, range(first, min(first + _PART, len(files))))


def _identity(files: Files) -> str:
    """Return a digest of the files' names, sizes and times, and of the decoders' versions."""
    versions = f"{_LAYOUT} {files.channels} {PIL.__version__} {torchvision.__version__}"
    digest = hashlib.sha256(versions.encode())
    for index in range(len(files)):
        path = files.path(index)
        try:
            found = os.stat(path)
            told = f"{found.st_size} {found.st_mtime_ns}"
        except OSError:
            told = "absent"
        digest.update(os.fsencode(path) + f"\0{told}\0".encode())
    return digest.hexdigest()[:32]


@contextmanager
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
