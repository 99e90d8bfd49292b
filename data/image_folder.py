"""Image files: in folders named by their class (root/train/<class>/*), or given by name."""

import contextlib
import glob
import hashlib
import logging
import math
import os
import tempfile
import unicodedata
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import PIL
import torch
import torchvision
from torch import Tensor

from regimen.conf.errors import truncated_list
from regimen.data.decode import (
    Channels,
    Depth,
    Range,
    decode_image,
    open_image,
    read_content,
    read_depth,
)
from regimen.data.errors import DataError, UnreadableError
from regimen.data.sources import Interrupted, file_lock, resize_images
from regimen.data.splits import NAMES, Split, rows_of_train, source_of_split, warn_unused
from regimen.data.transforms import Transform, acts_on_batches

logger = logging.getLogger(__name__)
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
)
_LISTED_EXTENSIONS = ", ".join(sorted(EXTENSIONS))
_DEFAULT_SIZE = (256, 256)  # of a stand-in, if the transforms bring images to one size
# Version of the cache's layout: the pixels of all images, then each image's height and width.
_LAYOUT = 1
_IMAGES_BETWEEN_STOP_CHECKS = 256
_DEPTH_SAMPLE = 200  # files of a data set whose depth is reported
_DEPTH_MEASURED = 20  # of them: files that are decoded for it
_EIGHT_BIT_EXTENSIONS = frozenset({".jpg", ".jpeg", ".bmp", ".gif", ".webp"})


def picture_form(
    channels: int, value_range: Range = None, size: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the form of images before the transforms, as plain values; `size` None: any."""
    sides = None if size is None else list(size)
    form: dict[str, Any] = {"kind": "picture", "channels": channels, "size": sides}
    if value_range is not None:
        form["range"] = list(value_range)
    return form


@dataclass(eq=False, repr=False)
class Pictures:
    """Image files, decoded on access: samples are images, or with `targets` (image, class).

    size: height and width that images are resized to before the transforms; None: as they are.
    value_range: of greys of more than 8 bits, the values that become 0 and 255; None: all.
    """

    transforms_in_batches = True

    names: Any
    channels: Channels = 3
    size: Sequence[int] | None = None
    transform: Transform = None
    targets: Tensor | None = None
    value_range: Range = None

    def __post_init__(self) -> None:
        # One byte string instead of many objects: forked workers then share its memory.
        self.names = np.array([*map(os.fsencode, self.names)], np.bytes_)

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        """Return the file of a sample."""
        return os.fsdecode(self.names[index])

    def input_form(self) -> dict[str, Any]:
        """Return the form of an image before the transforms."""
        return picture_form(self.channels, self.value_range, self.size)

    def decoded(self, index: int) -> Any:
        """Return an image as uint8 (C, H, W), or undecoded if the first transform takes that."""
        return self.read(index)

    def read(self, index: int) -> Tensor:
        """Return the image of a file as uint8 (C, H, W). Raises UnreadableError."""
        content = self.content(index)
        return decode_image(content, self.path(index), self.channels, self.value_range)

    def content(self, index: int) -> bytes:
        """Return the bytes of a file. Raises DataError."""
        return read_content(self.path(index))

    def explain_depth(self) -> list[str]:
        """Report how many files hold more than the 8 bits that are read, and what is left of them.

        At most 200 files, evenly spaced, are looked at.
        """
        files = range(0, len(self), max(1, -(-len(self) // _DEPTH_SAMPLE)))
        depths = self._unscaled_depths(files)
        greys = [depth for depth in depths if depth.is_grey]
        colours = len(depths) - len(greys)
        largest = [depth.largest for depth in greys if depth.largest is not None]

        of_all = f"of {len(self)}"
        if len(files) != len(self):
            of_all = f"of {len(files)} looked at"
        remarks = []
        if colours:
            remarks.append(
                f"{colours} files {of_all} hold 16-bit colours: the upper 8 bits are read"
            )
        if largest:
            remarks.append(f"{len(greys)} files {of_all} {self._loss_of_greys(max(largest))}")
        return remarks

    def _unscaled_depths(self, indices: Iterable[int]) -> list[Depth]:
        """Return the depths of files of more than 8 bits that do not state their own range."""
        depths = []
        measured = 0
        for index in indices:
            path = self.path(index)
            if os.path.splitext(path)[1].lower() in _EIGHT_BIT_EXTENSIONS:
                continue
            try:
                depth = read_depth(self.content(index), path, measured < _DEPTH_MEASURED)
            except DataError:  # reported when the sample is needed
                continue
            if depth is None or depth.states_range:
                continue
            depths.append(depth)
            if depth.largest is not None:
                measured += 1
        return depths

    def _loss_of_greys(self, largest: int) -> str:
        if self.value_range is not None:
            low, high = self.value_range
            loss = f"hold 16-bit greys: data.range=[{low}, {high}] becomes 256 levels"
            if largest > high:
                loss += f", and values up to {largest} are cut off"
            return loss
        if largest >= 2**15:
            return "hold 16-bit greys: the upper 8 bits are read, 256 levels"
        white = 2 ** max(largest.bit_length(), 8) - 1
        return (
            f"hold 16-bit greys, none above {largest}: as 8 bits {max(largest, 0) // 256 + 1} "
            f"levels of them are left, and with data.range=[0,{white}] 256"
        )

    def __getitem__(self, index: int) -> Any:
        image = self.resize_and_transform(self.decoded(index))
        return image if self.targets is None else (image, int(self.targets[index]))

    def stand_in(self) -> Any:
        """Return a black sample, for a batch of which no file can be read."""
        black = torch.zeros(self.channels, *(self.size or _DEFAULT_SIZE), dtype=torch.uint8)
        image = self.resize_and_transform(black)
        return image if self.targets is None else (image, 0)

    def resize_and_transform(self, image: Any) -> Any:
        """Return a uint8 image (C, H, W), resized and transformed."""
        if self.size is not None:
            image = resize_images(image[None], self.size)[0]
        return image if self.transform is None else self.transform(image)


class ImageFolder(Pictures):
    """Image files (paths relative to `folder`) and their classes."""

    targets: Tensor

    def __init__(
        self,
        folder: Path | str,
        paths: Sequence[str],
        targets: Sequence[int],
        classes: list[str],
        channels: Channels = 3,
        transform: Transform = None,
        value_range: Range = None,
    ) -> None:
        labels = torch.tensor(targets, dtype=torch.int64)
        super().__init__(paths, channels, None, transform, labels, value_range)
        self._prefix = str(folder)
        self.classes = classes
        self.cache: ImageCache | None = None
        self.scaled = False  # whether large JPEG files go to the first transform undecoded

    def fill_cache(self, interrupted: Interrupted) -> None:
        """Decode all images into the cache, if there is one; called before the first batch."""
        if self.cache is not None:
            self.cache.fill(self, interrupted)

    def path(self, index: int) -> str:
        """Return the file of a sample."""
        return os.path.join(self._prefix, super().path(index))

    def _cached(self, indices: Sequence[int] | None) -> Tensor | None:
        """Return images of the cache, all if `indices` is None; None if the cache cannot."""
        if self.cache is None or self.cache.images is None:
            return None
        return self.cache.images.batch(indices)

    def decoded(self, index: int) -> Any:
        """Return the image of the cache, else of its file; a large JPEG may stay undecoded."""
        images = self._cached([index])
        if images is not None:
            return images[0]
        if self.scaled:
            return open_image(self.path(index), self.channels, self.value_range)
        return self.read(index)

    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """Return all samples as one batch, before the transforms, if the cache holds them so."""
        images = self._cached(None)
        return None if images is None else (images, self.targets)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return a whole batch from the cache; None if images have to be transformed singly."""
        if not acts_on_batches(self.transform):
            return None
        images = self._cached(indices)
        if images is None:
            return None
        rows = torch.from_numpy(np.array(indices))
        return self.resize_and_transform(images), self.targets.index_select(0, rows)


def memory_file() -> IO[bytes]:
    """Return a file without a name, which goes with its last user; in memory, on Linux."""
    if hasattr(os, "memfd_create"):  # not limited by /dev/shm
        return open(os.memfd_create("regimen"), "w+b")
    return tempfile.TemporaryFile()


class MappedImages:
    """Decoded images in a file that is mapped into memory; a worker maps it itself.

    The file holds the pixels of all images, and then the height and width of each (int64); an image
    that could not be decoded has size 0 x 0. Raises ValueError for a file of another length.
    """

    def __init__(
        self, path: str, samples: int, channels: int, file: IO[bytes] | None = None
    ) -> None:
        self._arguments = (path, samples, channels)
        self._file = file  # a file in memory exists while it is open
        self._channels = channels
        # Private pages that are never written: all processes share those of the file.
        content = np.memmap(path, np.uint8, "c")
        pixels = len(content) - samples * 16
        self._sizes = np.frombuffer(content[pixels:].tobytes(), np.int64).reshape(samples, 2)
        lengths = self._sizes.prod(1) * channels
        if lengths.sum() != pixels:
            raise ValueError(f"{path} is not whole")
        self._pixels = torch.from_numpy(content[:pixels])
        self._offsets = lengths.cumsum() - lengths

    def __reduce__(self) -> Any:
        return MappedImages, self._arguments

    def batch(self, indices: Sequence[int] | None) -> Tensor | None:
        """Return images (n, C, H, W), or all; None if sizes differ or one is missing."""
        rows = slice(None) if indices is None else np.asarray(indices)
        sizes = self._sizes[rows]
        if not sizes[0].all() or (sizes != sizes[0]).any():
            return None
        # Arrays of the host: nothing waits for a device.
        shape = (self._channels, *sizes[0].tolist())
        if indices is None:
            return self._pixels.view(-1, *shape)
        # Row i of this view is the image that begins at pixel i, so one gather copies the batch.
        length = math.prod(shape)
        runs = self._pixels.as_strided((len(self._pixels) - length + 1, length), (1, 1))
        return runs.index_select(0, torch.from_numpy(self._offsets[rows])).view(-1, *shape)


@dataclass(eq=False)
class ImageCache:
    """Keep the decoded images (uint8) of a folder; filled once, by the main process.

    kind: "ram" is memory of this process, "disk" a file of `folder`; workers share either with it.
    "device" is "ram", from which a device gets its copy.
    The file is named by a digest of the names, sizes and times of the image files. The processes
    of a machine share it; one of them fills it while the others wait.
    most_bytes: limit of the cache, and of all files in `folder`, whose oldest are removed.

    Images that cannot be decoded are not cached: reading them fails as without a cache.
    """

    kind: Literal["ram", "disk", "device"]
    folder: Path
    most_bytes: int
    images: MappedImages | None = None
    _filled: bool = False

    def fill(self, files: Pictures, interrupted: Interrupted) -> None:
        """Decode all images, once; if interrupted, the next call starts again."""
        if self._filled:
            return
        self._filled = True
        destination = ""
        try:
            if self.kind == "disk":
                destination = f" to data.cache_dir={self.folder}"
                self._fill_on_disk(files, interrupted)
            else:
                self._fill_in_memory(files, interrupted)
        except InterruptedError:
            self._filled = False
        except OSError as error:
            logger.warning(
                "warning: data.cache=%s: the decoded images cannot be written%s (%s): they are "
                "decoded each time; raise data.cache_bytes, or set data.cache=none",
                self.kind,
                destination,
                error.strerror or error,
            )

    def _fill_in_memory(self, files: Pictures, interrupted: Interrupted) -> None:
        file = memory_file()
        self._write(files, file, interrupted)
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        self.images = MappedImages(path, len(files), files.channels, file)

    def _fill_on_disk(self, files: Pictures, interrupted: Interrupted) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{_identity(files)}.images"
        part = path.with_suffix(".part")
        arguments = (str(path), len(files), files.channels)
        with file_lock(path.with_suffix(".lock"), interrupted):
            with contextlib.suppress(FileNotFoundError, ValueError):
                self.images = MappedImages(*arguments)
                os.utime(path)  # the files that were not used for longest are removed first
                return
            try:
                with part.open("wb") as file:
                    self._write(files, file, interrupted)
                    os.fsync(file.fileno())
                self._make_room(part)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            self.images = MappedImages(*arguments)

    def _make_room(self, part: Path) -> None:
        """Remove the oldest files until all of them, with the new one, take `most_bytes`."""
        oldest_first = sorted(self.folder.glob("*.images"), key=lambda file: file.stat().st_mtime)
        while oldest_first:
            used = sum(file.stat().st_size for file in (part, *oldest_first))
            if used <= self.most_bytes:
                break
            oldest_first.pop(0).unlink(missing_ok=True)  # processes that have it open keep it

    def _write(self, files: Pictures, file: IO[bytes], interrupted: Interrupted) -> None:
        """Write all images, decoded by threads without the GIL, and their sizes."""
        logger.info("data.cache=%s: decoding %d images once", self.kind, len(files))

        def decode(index: int) -> Tensor | None:
            with contextlib.suppress(UnreadableError):
                return files.read(index)
            return None

        sizes = np.zeros((len(files), 2), np.int64)
        bytes_left = self.most_bytes - sizes.nbytes
        with ThreadPoolExecutor() as pool:
            for first in range(0, len(files), _IMAGES_BETWEEN_STOP_CHECKS):
                if interrupted():
                    raise InterruptedError
                part = range(first, min(first + _IMAGES_BETWEEN_STOP_CHECKS, len(files)))
                for index, image in zip(part, pool.map(decode, part), strict=True):
                    if image is None:
                        continue
                    sizes[index] = image.shape[-2:]
                    bytes_left -= image.numel()
                    if bytes_left < 0:
                        raise OSError(f"they take more than data.cache_bytes={self.most_bytes}")
                    file.write(image.contiguous().numpy().data)
        file.write(sizes.data)
        file.flush()


def _identity(files: Pictures) -> str:
    """Return a digest of the files' names, sizes and times, and of the decoders' versions."""
    versions = f"{_LAYOUT} {files.channels} {PIL.__version__} {torchvision.__version__}"
    if files.value_range is not None:
        versions = f"{versions} {list(files.value_range)}"
    digest = hashlib.sha256(versions.encode())
    for path in map(files.path, range(len(files))):
        digest.update(os.fsencode(path) + b"\0")
        with contextlib.suppress(OSError):
            status = os.stat(path)
            digest.update(f"{status.st_size} {status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def find_pictures(source: str, lines: Iterable[str] = ()) -> list[str]:
    """Return the files that `source` names: a folder, a file, a glob, or `-` for `lines`.

    A folder stands for all images in it at any depth, sorted. Raises DataError if there is none.
    """
    path = os.path.expanduser(source)
    if source == "-":
        files = [line.rstrip("\n") for line in lines if line.strip()]
    elif os.path.isdir(path):
        files = [os.path.join(path, name) for name in _files_below(Path(path), "", [])]
    elif os.path.lexists(path):
        files = [path]
    else:
        files = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not files:
        if source == "-":
            raise DataError(f"source={source}: no file name came on standard input")
        raise DataError(
            f"source={source}: names no picture ({_LISTED_EXTENSIONS}): "
            "give a folder, a file or a glob"
        )
    return files


def stem_in(folder: Path, path: str) -> str:
    """Return the path of a file within a folder, without its ending."""
    return os.path.splitext(os.path.relpath(path, folder))[0]


def by_stem(folder: Path, what: str) -> dict[str, str]:
    """Return the images of a folder by `stem_in`. Raises DataError, also for two of one name."""
    found: dict[str, str] = {}
    for path in find_pictures(str(folder)):
        name = stem_in(folder, path)
        if name in found:
            raise DataError(f"two {what} of one name: {found[name]} and {path}")
        found[name] = path
    return found


def image_folder(
    root: str,
    split: Split,
    val_fraction: float = 0.1,
    split_seed: int = 0,
    channels: Channels = 3,
    transform: Transform = None,
    fold: int = 0,
    folds: int = 0,
    value_range: Range = None,
) -> ImageFolder | None:
    """Open one split of a folder tree; None, with a log line, if it has no such split.

    A missing `val` (or `valid`, `validation`) is cut from `train`: `val_fraction` of it, stratified
    by class, drawn with `split_seed`. With `folds` it is fold number `fold` of `train`, and a
    folder `val` is ignored. Hidden files and folders are skipped; other folders are logged.
    Classes are the sorted names of train's folders; the other splits may lack some of them. A test
    set without a folder `train` beside it has the names of its own folders.
    """
    tree = Path(root).expanduser()
    classes = _class_folders(tree, root, split)
    find = partial(_folder_of, tree)
    if split == "train":
        used = {find(name) for name in NAMES if name != "val" or not folds}
        unused = [name for name in _folders_of(tree) if tree / name not in used]
        warn_unused(tree, tuple(unused))

    folder, is_part = source_of_split(find, split, val_fraction, folds)
    if folder is None:
        logger.warning("data.root=%s has no folder %r: the run goes without it", tree, split)
        return None
    unknown = sorted(set(_folders_of(folder)) - set(classes))
    if unknown:
        raise DataError(
            f"data.root: {folder} has class folders that train lacks: "
            f"{truncated_list(unknown, 5)}; classes are numbered by train's folders"
        )

    paths, targets = _scan(folder, classes)
    if is_part:
        rows = rows_of_train(split, targets, val_fraction, split_seed, fold, folds)
        paths = [paths[row] for row in rows]
        targets = [targets[row] for row in rows]
    return ImageFolder(folder, paths, targets, classes, channels, transform, value_range)


def _class_folders(tree: Path, root: str, split: str) -> list[str]:
    """Return the names of the class folders of train, or of a test set that stands alone."""
    folder = tree / "train"
    if split == "test" and not folder.is_dir():
        # A set that is tested alone: whoever opens it numbers its classes as the run does.
        folder = _folder_of(tree, split) or folder
    if not folder.is_dir():
        existing = "it is no folder"
        if tree.is_dir():
            existing = truncated_list(_folders_of(tree), 5) or "it holds none"
        raise DataError(
            f"data.root={root} has no folder 'train' ({existing}): "
            "put the images into data.root/train/<class>/"
        )
    classes = _folders_of(folder)
    if not classes:
        raise DataError(f"data.root: {folder} has no class folders: expected <class>/*.jpg")
    normalised = [unicodedata.normalize("NFC", name) for name in classes]
    for name in normalised:
        if normalised.count(name) > 1:
            raise DataError(
                f"data.root: two folders of {folder} look the same (Unicode forms), {name!r}: "
                "merge them"
            )
    return classes


def _folder_of(tree: Path, split: str) -> Path | None:
    """Return the folder of a split, by the first of its names that exists."""
    return next((tree / name for name in NAMES[split] if (tree / name).is_dir()), None)


def _scan(folder: Path, classes: list[str]) -> tuple[list[str], list[int]]:
    """Return the image files below each class folder, sorted, and their class numbers.

    Each class needs images in train. Classes that another split lacks are logged.
    """
    paths = []
    targets = []
    ignored = list[str]()
    empty_classes = list[str]()
    for label, name in enumerate(classes):
        files = list[str]()
        if (folder / name).is_dir():
            files = _files_below(folder, name, ignored)
        if not files:
            empty_classes.append(name)
        paths += files
        targets += [label] * len(files)

    if empty_classes and (folder.name in NAMES["train"] or not paths):
        raise DataError(
            f"data.root: the class folder {folder / empty_classes[0]} holds no images "
            f"({_LISTED_EXTENSIONS}): fill or remove it"
        )
    if empty_classes:
        logger.warning(
            "%s has no images of %d of train's classes: %s",
            folder,
            len(empty_classes),
            truncated_list(empty_classes, 5),
        )
    if ignored:
        logger.warning(
            "%s: ignored %d files that are no images: %s",
            folder,
            len(ignored),
            truncated_list(ignored, 3),
        )
    return paths, targets


def _folders_of(folder: Path) -> list[str]:
    """Return the names of the folders that are not hidden, sorted."""
    _, names, _ = next(os.walk(folder, onerror=_unlisted))
    return sorted(name for name in names if not name.startswith("."))


def _files_below(folder: Path, name: str, ignored: list[str]) -> list[str]:
    """Return the image files at any depth below folder/name, each real folder visited once.

    Other files are added to `ignored`. A dangling link with an image's name is listed: it fails
    when it is read.
    """
    images = list[str]()
    visited = set()
    prefix = os.path.join(folder, "")
    for here, folders, files in os.walk(prefix + name, followlinks=True, onerror=_unlisted):
        real = os.path.realpath(here)
        if real in visited:  # a loop of links
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(inner for inner in folders if not inner.startswith("."))
        for file in files:
            if file.startswith("."):
                continue
            path = os.path.join(here, file).removeprefix(prefix)
            if os.path.splitext(file)[1].lower() in EXTENSIONS:
                images.append(path)
            else:
                ignored.append(path)
    return sorted(images)


def _unlisted(error: OSError) -> None:
    raise DataError(f"data.root: cannot list {error.filename}: {error.strerror}") from error
