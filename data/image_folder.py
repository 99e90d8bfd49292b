"""Image files: in folders named by their class (root/train/<class>/*), or given by name."""

import glob
import logging
import os
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.decode import Channels, open_image, read_image
from data.errors import DataError
from data.sources import resized
from data.splits import Split, is_cut, rows_of_train
from data.transforms import Transform, acts_on_batches

logger = logging.getLogger(__name__)
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
)
_KNOWN = ", ".join(sorted(EXTENSIONS))
_ANY_SIZE = (256, 256)  # of pictures that the transforms bring to one size


class ImageFolder:
    """Image files (paths relative to `folder`) and their classes, decoded when asked for."""

    transforms_in_batches = True

    def __init__(
        self,
        folder: Path | str,
        paths: Sequence[str],
        targets: Sequence[int],
        classes: list[str],
        channels: Channels = 3,
        transform: Transform | None = None,
    ) -> None:
        self._prefix = str(folder)
        # One byte string instead of many objects: forked workers then share its memory.
        self.names = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)
        self.targets = torch.tensor(targets, dtype=torch.int64)
        self.classes = classes
        self.channels = channels
        self.transform = transform
        self.cache: Any = None  # a `data.loading.cache.ImageCache`
        self.scaled = False  # whether large JPEG files go to the first transform undecoded

    def __len__(self) -> int:
        return len(self.names)

    def fill_cache(self, interrupted: Callable[[], bool]) -> None:
        """Decode all images into the cache, if there is one; called before the first batch."""
        if self.cache is not None:
            self.cache.fill(self, interrupted)

    def path(self, index: int) -> str:
        """Return the file of a sample."""
        return os.path.join(self._prefix, os.fsdecode(self.names[index]))

    def input_form(self) -> dict[str, Any]:
        """Return what a picture must be brought to before the transforms: any size will do."""
        return {"kind": "picture", "channels": self.channels, "size": None}

    def __getitem__(self, index: int) -> Any:
        image = None if self.cache is None else self.cache.image(index)
        if image is None:
            by_part = self.scaled and getattr(self.transform, "takes_files", False)
            image = (open_image if by_part else read_image)(self.path(index), self.channels)
        image = image if self.transform is None else self.transform(image)
        return image, int(self.targets[index])

    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """Return all samples as one batch, before the transforms, if the cache holds them so."""
        images = None if self.cache is None else self.cache.whole()
        return None if images is None else (images, self.targets)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return a whole batch from the cache; None where images have to be seen one by one."""
        if self.cache is None or not acts_on_batches(self.transform):
            return None
        if (images := self.cache.batch(indices)) is None:
            return None
        images = images if self.transform is None else self.transform(images)
        return images, self.targets.index_select(0, torch.from_numpy(np.array(indices)))


class Pictures(ImageFolder):
    """Picture files without labels, as a trained network expects them: samples are images.

    `size`: height and width that pictures are resized to before the transforms; None: none.
    """

    def __init__(
        self,
        paths: Sequence[str],
        channels: Channels = 3,
        size: Sequence[int] | None = None,
        transform: Transform | None = None,
    ) -> None:
        super().__init__("", paths, [], [], channels, transform)
        self.size = size

    def __getitem__(self, index: int) -> Any:
        return self.brought_to_form(read_image(self.path(index), self.channels))

    def stand_in(self) -> Any:
        """Return a black sample, for a batch of which no file can be read."""
        side = self.size or _ANY_SIZE
        return self.brought_to_form(torch.zeros(self.channels, *side, dtype=torch.uint8))

    def brought_to_form(self, image: Tensor) -> Any:
        """Return a uint8 image (C, H, W), resized and transformed."""
        image = resized(image[None], self.size)[0]
        return image if self.transform is None else self.transform(image)


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
    if not found and source == "-":
        raise DataError("source=-: no file name came on standard input")
    if not found:
        way_out = "give a folder, a file or a glob"
        raise DataError(f"source={source} names no picture ({_KNOWN}): {way_out}")
    return found


def image_folder(
    root: str,
    split: Split,
    val_fraction: float = 0.1,
    split_seed: int = 0,
    channels: Channels = 3,
    transform: Transform | None = None,
    fold: int | None = None,
    folds: int | None = None,
) -> ImageFolder | None:
    """Open one split of a folder tree; None where there is no such split, which is logged.

    A missing `val` is cut from `train`: `val_fraction` of it, stratified by class, drawn with
    `split_seed`. With `folds` it is fold number `fold` of `train`; a folder `val` is left aside.
    Hidden files and folders are ignored. Classes are the sorted names of train's folders; the other
    splits must have the same.
    """
    tree = Path(root).expanduser()
    if not tree.is_dir():
        raise DataError(f"data.root={root} is no folder: set data.root=DIR with DIR/train/<class>/")
    if not (tree / "train").is_dir():
        found = ", ".join(_folders_of(tree)[:5]) or "none"
        raise DataError(
            f"data.root={root} has no folder 'train' (folders: {found}): "
            "put the images into data.root/train/<class>/"
        )
    classes = _class_folders(tree / "train")
    cuts = is_cut(split, (tree / "val").is_dir(), val_fraction, folds)
    folder = tree / ("train" if cuts else split)
    if not folder.is_dir():
        logger.warning("data.root=%s has no folder %r: the run goes without it", tree, split)
        return None
    here = _folders_of(folder)
    missing, extra = sorted(set(classes) - set(here)), sorted(set(here) - set(classes))
    if missing or extra:
        told = [f"lacks {', '.join(missing[:5])}"] if missing else []
        told += [f"has {', '.join(extra[:5])} that train lacks"] if extra else []
        raise DataError(
            f"data.root: the class folders of {folder} and train differ: {split} "
            f"{' and '.join(told)}; both must have the same, or class numbers would shift"
        )
    paths, targets = _scan(folder, classes)
    if cuts:
        rows = rows_of_train(split, targets, val_fraction, split_seed, fold, folds)
        paths, targets = [paths[row] for row in rows], [targets[row] for row in rows]
    return ImageFolder(folder, paths, targets, classes, channels, transform)


def _class_folders(train: Path) -> list[str]:
    classes = _folders_of(train)
    if not classes:
        raise DataError(f"data.root: {train} has no class folders: expected {train}/<class>/*.jpg")
    seen: dict[str, str] = {}
    for name in classes:
        earlier = seen.setdefault(unicodedata.normalize("NFC", name), name)
        if earlier != name:
            raise DataError(
                f"data.root: two folders of {train} have names that look the same, "
                f"{earlier!r} and {name!r} (Unicode forms): merge them"
            )
    return classes


def _scan(folder: Path, classes: list[str]) -> tuple[list[str], list[int]]:
    """Return the image files below each class folder, sorted, and their class numbers."""
    paths: list[str] = []
    targets: list[int] = []
    ignored: list[str] = []
    for label, name in enumerate(classes):
        found = _files_below(folder, name, ignored)
        if not found:
            raise DataError(
                f"data.root: the class folder {folder / name} holds no images ({_KNOWN}): "
                "fill or remove it"
            )
        paths += found
        targets += [label] * len(found)
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
    found: list[str] = []
    visited: set[str] = set()
    for here, folders, files in os.walk(folder / name, followlinks=True, onerror=_unlisted):
        real = os.path.realpath(here)
        new = real not in visited
        visited.add(real)
        folders[:] = sorted(inner for inner in folders if new and not inner.startswith("."))
        within = os.path.relpath(here, folder) if name or here != str(folder) else ""
        for file in files if new else ():
            if not file.startswith("."):
                known = os.path.splitext(file)[1].lower() in EXTENSIONS
                (found if known else ignored).append(os.path.join(within, file))
    return sorted(found)


def _unlisted(error: OSError) -> None:
    raise DataError(f"data.root: cannot list {error.filename}: {error.strerror}") from error
