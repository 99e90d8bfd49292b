"""Images in folders named by their class: root/train/<class>/*, root/val|test/<class>/*."""

import logging
import os
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.decode import CHANNELS, open_image, read_image
from data.errors import DataError
from data.images import Transform
from data.sources import Split
from data.splits import rows_of_train
from data.transforms import acts_on_batches

logger = logging.getLogger(__name__)


class ImageFolder:
    """Image files (paths relative to `folder`) and their classes, decoded when asked for."""

    transforms_in_batches = True

    def __init__(
        self,
        folder: Path,
        paths: list[str],
        targets: list[int],
        classes: list[str],
        channels: int = 3,
        transform: Transform | None = None,
    ) -> None:
        if channels not in CHANNELS:
            raise DataError(f"data.channels={channels}: image files have 1 (grey) or 3 (colour)")
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

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._image(index), int(self.targets[index])

    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """Return all samples as one batch, before the transforms, if the cache holds them so."""
        images = None if self.cache is None else self.cache.whole()
        return None if images is None else (images, self.targets)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return a whole batch from the cache; None where images have to be seen one by one."""
        images = self._batch(indices)
        if images is None:
            return None
        return images, self.targets.index_select(0, torch.from_numpy(np.array(indices)))

    def _image(self, index: int) -> Any:
        image = None if self.cache is None else self.cache.image(index)
        if image is None:
            image = self._read(self.path(index))
        return image if self.transform is None else self.transform(image)

    def _read(self, path: str) -> Any:
        by_part = self.scaled and getattr(self.transform, "takes_files", False)
        return (open_image if by_part else read_image)(path, self.channels)

    def _batch(self, indices: Sequence[int]) -> Any:
        whole = self.transform is None or acts_on_batches(self.transform)
        images = self.cache.batch(indices) if self.cache is not None and whole else None
        return images if images is None or self.transform is None else self.transform(images)


class ImageFiles(ImageFolder):
    """Every image file below a folder, without classes: samples are images, for predictions."""

    def __init__(self, folder: str, channels: int = 3, transform: Transform | None = None) -> None:
        ignored: list[str] = []
        paths = files_below(Path(folder).expanduser(), "", ignored)
        if not paths:
            raise DataError(f"data.predict: {folder} holds no image files")
        super().__init__(Path(folder).expanduser(), paths, [], [], channels, transform)

    def __getitem__(self, index: int) -> Any:
        return self._image(index)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return a whole batch from the cache; None where images have to be seen one by one."""
        return self._batch(indices)


def image_folder(
    root: str,
    split: Split,
    val_fraction: float = 0.1,
    split_seed: int = 0,
    channels: int = 3,
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
    tree = _existing(root)
    classes = _class_names(tree / "train")
    in_folds = folds is not None and split != "test"
    cuts = in_folds or (split != "test" and val_fraction > 0 and not (tree / "val").is_dir())
    if split != "train" and not in_folds and (tree / split).is_dir():
        _check_same_classes(tree, split, classes)
        paths, targets = _scan(tree / split, classes)
        return ImageFolder(tree / split, paths, targets, classes, channels, transform)
    if split != "train" and not cuts:
        logger.warning("data.root=%s has no folder %r: the run goes without it", tree, split)
        return None
    paths, targets = _scan(tree / "train", classes)
    if cuts:
        rows = rows_of_train(split, targets, val_fraction, split_seed, fold, folds)
        if len(rows) == 0:
            raise DataError(
                f"data.root={tree} has too few images to cut a val split of val_fraction="
                f"{val_fraction}: add a folder 'val', or set data.val=null and data.val_fraction=0"
            )
        paths, targets = [paths[row] for row in rows], [targets[row] for row in rows]
    return ImageFolder(tree / "train", paths, targets, classes, channels, transform)


def _existing(root: str) -> Path:
    tree = Path(root).expanduser()
    if not tree.is_dir():
        raise DataError(f"data.root={root} is no folder: set data.root=DIR with DIR/train/<class>/")
    if not (tree / "train").is_dir():
        found = ", ".join(folders_of(tree)[:5]) or "none"
        raise DataError(
            f"data.root={root} has no folder 'train' (folders: {found}): "
            "put the images into data.root/train/<class>/"
        )
    return tree


def _class_names(train: Path) -> list[str]:
    classes = folders_of(train)
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


def _check_same_classes(tree: Path, split: str, classes: list[str]) -> None:
    here = folders_of(tree / split)
    missing, extra = sorted(set(classes) - set(here)), sorted(set(here) - set(classes))
    if missing or extra:
        told = [f"lacks {', '.join(missing[:5])}"] if missing else []
        told += [f"has {', '.join(extra[:5])} that train lacks"] if extra else []
        raise DataError(
            f"data.root: the class folders of {tree / split} and train differ: {split} "
            f"{' and '.join(told)}; both must have the same, or class numbers would shift"
        )


def _scan(folder: Path, classes: list[str]) -> tuple[list[str], list[int]]:
    """Return the image files below each class folder, sorted, and their class numbers."""
    paths: list[str] = []
    targets: list[int] = []
    ignored: list[str] = []
    for label, name in enumerate(classes):
        found = files_below(folder, name, ignored)
        if not found:
            raise DataError(
                f"data.root: the class folder {folder / name} holds no images "
                f"({', '.join(sorted(EXTENSIONS))}): fill or remove it"
            )
        paths += found
        targets += [label] * len(found)
    if ignored:
        few = ", ".join(ignored[:3])
        logger.warning("%s: ignored %d files that are no images: %s", folder, len(ignored), few)
    return paths, targets


EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
)


def folders_of(folder: Path) -> list[str]:
    """Return the names of the folders that are not hidden, sorted."""
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if not e.name.startswith(".") and _is_folder(e)]
    except OSError as error:
        raise DataError(f"data.root: cannot list {folder}: {error.strerror}") from error
    return sorted(names)


def files_below(folder: Path, name: str, ignored: list[str]) -> list[str]:
    """Return the image files at any depth below folder/name, each real folder visited once.

    What carries an image's name is listed even if it is a dangling link: it fails when read.
    """
    found: list[str] = []
    visited: set[str] = set()
    waiting = [name]
    while waiting:
        here = waiting.pop()
        real = os.path.realpath(folder / here)
        if real in visited:
            continue
        visited.add(real)
        for entry in _entries(folder / here):
            relative = os.path.join(here, entry.name)
            if _is_folder(entry):
                waiting.append(relative)
            elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
                found.append(relative)
            else:
                ignored.append(relative)
    return sorted(found)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle
        return False


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                (entry for entry in entries if not entry.name.startswith(".")),
                key=lambda entry: entry.name,
            )
    except OSError as error:
        raise DataError(f"data.root: cannot list {folder}: {error.strerror}") from error
