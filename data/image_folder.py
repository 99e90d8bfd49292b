"""Image files: in folders named by their class (root/train/<class>/*), or given by name; cached."""

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
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import PIL
import torch
import torchvision
from torch import Tensor

from regimen.data.decode import Channels, Range, depth_of, open_image, read_content, read_image
from regimen.data.errors import DataError, UnreadableError
from regimen.data.sources import Interrupted, locked, resized
from regimen.data.splits import NAMES, Split, is_cut, name_unused, rows_of_train
from regimen.data.transforms import Transform, acts_on_batches

logger = logging.getLogger(__name__)
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
)
_KNOWN = ", ".join(sorted(EXTENSIONS))
_ANY_SIZE = (256, 256)  # of pictures that the transforms bring to one size
_LAYOUT = 1  # version of a cache: the pixels of all images, then each image's height and width
_PART = 256  # images between two checks whether to stop
_LOOKED_AT = 200  # files of a data set whose depth the plan looks at
_MEASURED = 20  # of them: those that are decoded for it
_EIGHT_BITS = frozenset({".jpg", ".jpeg", ".bmp", ".gif", ".webp"})


@dataclass(eq=False, repr=False)
class Pictures:
    """Picture files, decoded when asked for: samples are images, or with `targets` (image, class).

    `size`: height and width that pictures are resized to before the transforms; None: none.
    `value_range`: of greys of more than 8 bits, the values that become 0 and 255; None: all.
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
        """Return what a picture must be brought to before the transforms: any size will do."""
        form = {"kind": "picture", "channels": self.channels, "size": None}
        return form if self.value_range is None else {**form, "range": list(self.value_range)}

    def decoded(self, index: int) -> Any:
        """Return a picture as uint8 (C, H, W), or what the first transform takes for it."""
        return self.read(index)

    def read(self, index: int) -> Tensor:
        """Return the picture of a file as uint8 (C, H, W). Raises UnreadableError."""
        return read_image(self.path(index), self.channels, self.value_range)

    def content(self, index: int) -> bytes:
        """Return the bytes of a file. Raises DataError."""
        return read_content(self.path(index))

    def explain_depth(self) -> list[str]:
        """Say how many files hold more than the 8 bits that are read, and what is left of them."""
        every = max(1, -(-len(self) // _LOOKED_AT))
        looked_at = range(0, len(self), every)
        greys = 0
        colours = 0
        largest: list[int] = []
        for index in looked_at:
            if os.path.splitext(self.path(index))[1].lower() in _EIGHT_BITS:
                continue
            try:
                depth = depth_of(self.content(index), self.path(index), len(largest) < _MEASURED)
            except DataError:  # told where the sample is needed
                continue
            if depth is None or depth.states_range:
                continue
            if depth.is_grey:
                greys += 1
            else:
                colours += 1
            if depth.largest is not None:
                largest.append(depth.largest)
        of_all = (
            f"of {len(self)}" if len(looked_at) == len(self) else f"of {len(looked_at)} looked at"
        )
        found = []
        if colours:
            found.append(f"{colours} files {of_all} hold 16-bit colours: the upper 8 bits are read")
        if greys and largest:
            found.append(f"{greys} files {of_all} {self._loss_of_greys(max(largest))}")
        return found

    def _loss_of_greys(self, largest: int) -> str:
        if self.value_range is not None:
            low, high = self.value_range
            beyond = f", and values up to {largest} are cut off" if largest > high else ""
            return f"hold 16-bit greys: data.range=[{low}, {high}] becomes 256 levels{beyond}"
        if largest >= 2**15:
            return "hold 16-bit greys: the upper 8 bits are read, 256 levels"
        white = 2 ** max(largest.bit_length(), 8) - 1
        return (
            f"hold 16-bit greys, none above {largest}: as 8 bits {max(largest, 0) // 256 + 1} "
            f"levels of them are left, and with data.range=[0,{white}] 256"
        )

    def __getitem__(self, index: int) -> Any:
        image = self.brought_to_form(self.decoded(index))
        return image if self.targets is None else (image, int(self.targets[index]))

    def stand_in(self) -> Any:
        """Return a black sample, for a batch of which no file can be read."""
        black = torch.zeros(self.channels, *(self.size or _ANY_SIZE), dtype=torch.uint8)
        image = self.brought_to_form(black)
        return image if self.targets is None else (image, 0)

    def brought_to_form(self, image: Any) -> Any:
        """Return a uint8 image (C, H, W), resized and transformed."""
        image = image if self.size is None else resized(image[None], self.size)[0]
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

    def _kept(self, indices: Sequence[int] | None) -> Tensor | None:
        """Return images of the cache, or all; None unless all are there, of one size."""
        images = None if self.cache is None else self.cache.images
        return None if images is None else images.batch(indices)

    def decoded(self, index: int) -> Any:
        """Return the image of the cache; else of its file, or a large JPEG file as it is."""
        if (images := self._kept([index])) is not None:
            return images[0]
        if self.scaled:
            return open_image(self.path(index), self.channels, self.value_range)
        return self.read(index)

    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """Return all samples as one batch, before the transforms, if the cache holds them so."""
        return None if (images := self._kept(None)) is None else (images, self.targets)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return a whole batch from the cache; None where images have to be seen one by one."""
        images = self._kept(indices) if acts_on_batches(self.transform) else None
        if images is None:
            return None
        rows = torch.from_numpy(np.array(indices))
        return self.brought_to_form(images), self.targets.index_select(0, rows)


def memory_file() -> IO[bytes]:
    """Return a file without a name, which goes with its last user; in memory, on Linux."""
    if hasattr(os, "memfd_create"):  # not limited by /dev/shm
        return open(os.memfd_create("regimen"), "w+b")
    return tempfile.TemporaryFile()


class MappedImages:
    """Decoded images in a file that is mapped into memory; a worker maps it itself.

    Raises ValueError for a file of another length.
    """

    def __init__(
        self, path: str, samples: int, channels: int, file: IO[bytes] | None = None
    ) -> None:
        self._place, self._file = (path, samples, channels), file
        # Private pages that are never written: all processes share those of the file.
        content = np.memmap(path, np.uint8, "c")
        pixels = len(content) - samples * 16
        self._sizes = np.frombuffer(content[pixels:].tobytes(), np.int64).reshape(samples, 2)
        lengths = self._sizes.prod(1) * channels
        if lengths.sum() != pixels:
            raise ValueError(f"{path} is not whole")
        self._pixels, self._offsets = torch.from_numpy(content[:pixels]), lengths.cumsum() - lengths

    def __reduce__(self) -> Any:
        return MappedImages, self._place

    def batch(self, indices: Sequence[int] | None) -> Tensor | None:
        """Return images (n, C, H, W), or all; None if sizes differ or one is not there."""
        rows = slice(None) if indices is None else np.asarray(indices)
        sizes, offsets = self._sizes[rows], self._offsets[rows]
        if not sizes[0].all() or (sizes != sizes[0]).any():
            return None
        shape = (self._place[2], *sizes[0].tolist())
        if indices is None:
            return self._pixels.view(-1, *shape)
        length = math.prod(shape)
        every = self._pixels.as_strided((len(self._pixels) - length + 1, length), (1, 1))
        return every.index_select(0, torch.from_numpy(offsets)).view(-1, *shape)


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
    _tried: bool = False

    def fill(self, files: Pictures, interrupted: Interrupted) -> None:
        """Decode all images, once; if interrupted, the next call starts again."""
        if self._tried:
            return
        self._tried, place = True, ""
        try:
            if self.kind == "disk":
                place = f" to data.cache_dir={self.folder}"
                self._in_folder(files, interrupted)
            else:
                file = memory_file()
                self._write(files, file, interrupted)
                path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
                self.images = MappedImages(path, len(files), files.channels, file)
        except InterruptedError:
            self._tried = False
        except OSError as error:
            logger.warning(
                "warning: data.cache=%s: the decoded images cannot be written%s (%s): they are "
                "decoded each time; raise data.cache_bytes, or set data.cache=none",
                *(self.kind, place, error.strerror or error),
            )

    def _in_folder(self, files: Pictures, interrupted: Interrupted) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{_identity(files)}.images"
        part, form = path.with_suffix(".part"), (str(path), len(files), files.channels)
        with locked(path.with_suffix(".lock"), interrupted):
            with contextlib.suppress(FileNotFoundError, ValueError):
                self.images = MappedImages(*form)
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
            self.images = MappedImages(*form)

    def _write(self, files: Pictures, file: IO[bytes], interrupted: Interrupted) -> None:
        """Write all images, decoded by threads without the GIL, and their sizes."""
        logger.info("data.cache=%s: decoding %d images once", self.kind, len(files))

        def decoded(index: int) -> Tensor | None:
            with contextlib.suppress(UnreadableError):
                return files.read(index)
            return None

        sizes = np.zeros((len(files), 2), np.int64)
        left = self.most_bytes - sizes.nbytes
        with ThreadPoolExecutor() as pool:
            for first in range(0, len(files), _PART):
                if interrupted():
                    raise InterruptedError
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


def _identity(files: Pictures) -> str:
    """Return a digest of the files' names, sizes and times, and of the decoders' versions."""
    versions = f"{_LAYOUT} {files.channels} {PIL.__version__} {torchvision.__version__}"
    if files.value_range is not None:
        versions = f"{versions} {list(files.value_range)}"
    digest = hashlib.sha256(versions.encode())
    for path in map(files.path, range(len(files))):
        digest.update(os.fsencode(path) + b"\0")
        with contextlib.suppress(OSError):
            facts = os.stat(path)
            digest.update(f"{facts.st_size} {facts.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def find_pictures(source: str, lines: Iterable[str] = ()) -> list[str]:
    """Return the files that `source` names: a folder, a file, a glob, or `-` for `lines`.

    Of a folder all pictures at any depth, sorted. Raises DataError where there is none.
    """
    path = os.path.expanduser(source)
    if source == "-":
        found = [line.rstrip("\n") for line in lines if line.strip()]
    elif os.path.isdir(path):
        found = [os.path.join(path, name) for name in _files_below(Path(path), "", [])]
    elif os.path.lexists(path):
        found = [path]
    else:
        found = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not found:
        why = f"names no picture ({_KNOWN}): give a folder, a file or a glob"
        why = "no file name came on standard input" if source == "-" else why
        raise DataError(f"source={source}: {why}")
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
    """Open one split of a folder tree; None where there is no such split, which is logged.

    A missing `val` (or `valid`, `validation`) is cut from `train`: `val_fraction` of it, stratified
    by class, drawn with `split_seed`. With `folds` it is fold number `fold` of `train`; a folder
    `val` is left aside. Hidden files and folders are ignored, other folders are named in the log.
    Classes are the sorted names of train's folders; the other splits may lack some of them. A test
    set without a folder `train` beside it has the names of its own folders.
    """
    tree = Path(root).expanduser()
    # A set that is tested alone: whoever opened it numbers its classes as the run does.
    alone = split == "test" and not (tree / "train").is_dir() and _folder_of(tree, split)
    named_by = alone or tree / "train"
    if not named_by.is_dir():
        found = ", ".join(_folders_of(tree)[:5]) if tree.is_dir() else "it is no folder"
        way_out = "put the images into data.root/train/<class>/"
        raise DataError(f"data.root={root} has no folder 'train' ({found}): {way_out}")
    classes = _folders_of(named_by)
    if not classes:
        raise DataError(f"data.root: {named_by} has no class folders: expected <class>/*.jpg")
    alike = [unicodedata.normalize("NFC", name) for name in classes]
    if twice := next((name for name in alike if alike.count(name) > 1), None):
        both = f"two folders of {named_by} look the same (Unicode forms), {twice!r}: merge them"
        raise DataError(f"data.root: {both}")
    places = {name: _folder_of(tree, name) for name in ("train", "val", "test")}
    if folds:
        places["val"] = None
    if split == "train":
        used = [place.name for place in places.values() if place is not None]
        name_unused(tree, tuple(name for name in _folders_of(tree) if name not in used))
    cuts = is_cut(split, places["val"] is not None, val_fraction, folds)
    folder = places["train"] if cuts else places[split]
    if folder is None:
        logger.warning("data.root=%s has no folder %r: the run goes without it", tree, split)
        return None
    if unknown := sorted({*_folders_of(folder)} - {*classes}):
        names = ", ".join(unknown[:5])
        differ = f"{folder} has class folders that train lacks: {names}"
        raise DataError(f"data.root: {differ}; classes are numbered by train's folders")
    paths, targets = _scan(folder, classes)
    if cuts:
        rows = rows_of_train(split, targets, val_fraction, split_seed, fold, folds)
        paths, targets = [paths[row] for row in rows], [targets[row] for row in rows]
    return ImageFolder(folder, paths, targets, classes, channels, transform, value_range)


def _folder_of(tree: Path, split: str) -> Path | None:
    """Return the folder of a split, whichever of its names it has."""
    return next((tree / name for name in NAMES[split] if (tree / name).is_dir()), None)


def _scan(folder: Path, classes: list[str]) -> tuple[list[str], list[int]]:
    """Return the image files below each class folder, sorted, and their class numbers.

    Each class has some in train; what another split lacks is named in the log.
    """
    paths = []
    targets = []
    ignored = list[str]()
    lacking = list[str]()
    for label, name in enumerate(classes):
        found = _files_below(folder, name, ignored) if (folder / name).is_dir() else []
        if not found:
            lacking.append(name)
        paths += found
        targets += [label] * len(found)
    if lacking and (folder.name in NAMES["train"] or not paths):
        empty = f"the class folder {folder / lacking[0]} holds no images ({_KNOWN})"
        raise DataError(f"data.root: {empty}: fill or remove it")
    if lacking:
        few = ", ".join(lacking[:5])
        logger.warning("%s has no images of %d of train's classes: %s", folder, len(lacking), few)
    if ignored:
        few = ", ".join(ignored[:3])
        logger.warning("%s: ignored %d files that are no images: %s", folder, len(ignored), few)
    return paths, targets


def _folders_of(folder: Path) -> list[str]:
    """Return the names of the folders that are not hidden, sorted."""
    _, names, _ = next(os.walk(folder, onerror=_unlisted))
    return sorted(name for name in names if not name.startswith("."))


def _files_below(folder: Path, name: str, ignored: list[str]) -> list[str]:
    """Return the image files at any depth below folder/name, each real folder visited once.

    What carries an image's name is listed even if it is a dangling link: it fails when read.
    """
    found = list[str]()
    visited = set()
    prefix = os.path.join(folder, "")
    for here, folders, files in os.walk(prefix + name, followlinks=True, onerror=_unlisted):
        if (real := os.path.realpath(here)) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(inner for inner in folders if not inner.startswith("."))
        for file in files:
            if not file.startswith("."):
                known = os.path.splitext(file)[1].lower() in EXTENSIONS
                path = os.path.join(here, file).removeprefix(prefix)
                (found if known else ignored).append(path)
    return sorted(found)


def _unlisted(error: OSError) -> None:
    raise DataError(f"data.root: cannot list {error.filename}: {error.strerror}") from error
