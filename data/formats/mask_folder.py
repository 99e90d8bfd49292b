"""Folders of pictures, and of masks with a class for each pixel, for segmentation."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from regimen.data.decode import Channels, Range, read_levels
from regimen.data.errors import DataError, UnreadableError
from regimen.data.image_folder import Pictures, find_pictures
from regimen.data.splits import NAMES, Split, is_cut, rows_of_train
from regimen.data.transforms import Transform

logger = logging.getLogger(__name__)
_MOST = 2**16  # values that a pixel of a mask may have
_LOSSY = (".jpg", ".jpeg", ".webp")


class MaskFolder(Pictures):
    """Pictures and their masks: samples are (image, mask), masks int64 [H, W] of class numbers.

    `size`: height and width that both are brought to, masks by the nearest pixel; None: as they
    are. `values`: the value of a mask's pixel for each class; None: class numbers. Transforms get
    the image alone, but for those of whole batches that say `masks`.
    """

    def __init__(
        self,
        images: Sequence[str],
        masks: Sequence[str],
        num_classes: int,
        channels: Channels = 3,
        size: Sequence[int] | None = None,
        transform: Transform = None,
        values: Sequence[int] | None = None,
        ignore_index: int = 255,
        classes: Sequence[str] | None = None,
        value_range: Range = None,
    ) -> None:
        super().__init__(images, channels, size, transform, value_range=value_range)
        self.mask_names = np.array([*map(os.fsencode, masks)], np.bytes_)
        self.ignore_index = ignore_index
        known = list(range(num_classes)) if values is None else list(values)
        if len(known) != num_classes or not all(0 <= value < _MOST for value in known):
            raise DataError(f"data.values={known}: give one for each of {num_classes} classes")
        self._class_of = np.full(_MOST, -1, np.int64)
        if 0 <= ignore_index < _MOST:
            self._class_of[ignore_index] = ignore_index
        self._class_of[known] = np.arange(num_classes)  # of a value that is both: the class
        if classes is not None:
            if len(classes) != num_classes:
                raise DataError(f"data.classes has {len(classes)} names for {num_classes} classes")
            self.classes = list(classes)

    def input_form(self) -> dict[str, Any]:
        """Return what a picture is brought to before the transforms."""
        return {**super().input_form(), "size": None if self.size is None else list(self.size)}

    def mask(self, index: int) -> Tensor:
        """Return a mask as int64 [H, W], in the size of its file. Raises DataError."""
        path = os.fsdecode(self.mask_names[index])
        levels = read_levels(path)
        outside = (levels < 0) | (levels >= _MOST)
        found = self._class_of[np.where(outside, 0, levels)]
        wrong = outside | (found < 0)
        if wrong.any():
            unknown = int(levels[wrong][0])
            known = np.flatnonzero(self._class_of >= 0).tolist()
            raise DataError(
                f"{path}: value {unknown} is none of a class, only {known[:12]} are: raise "
                "data.num_classes, or list the values of the classes in data.values"
            )
        return torch.from_numpy(found)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        image = self.decoded(index)
        mask = self.mask(index)
        if image.shape[-2:] != mask.shape:
            sizes = f"{[*image.shape[-2:]]} pixels, and its mask {[*mask.shape]}"
            raise DataError(f"{self.path(index)} has {sizes}: they must be alike")
        if self.size is not None and list(mask.shape) != list(self.size):
            grown = interpolate(mask[None, None].float(), list(self.size), mode="nearest-exact")
            mask = grown[0, 0].long()
        return self.brought_to_form(image), mask

    def stand_in(self) -> tuple[Any, Tensor]:
        """Return a black sample without a pixel that counts."""
        image = super().stand_in()
        size = self.size or image.shape[-2:]
        return image, torch.full([*size], self.ignore_index)

    def fingerprint(self) -> str:
        """Return a digest of the names of pictures and masks."""
        return sha256(self.names.tobytes() + self.mask_names.tobytes()).hexdigest()[:16]


def mask_folder(
    root: str,
    split: Split,
    num_classes: int,
    image_size: int | Sequence[int] | None = None,
    values: Sequence[int] | None = None,
    ignore_index: int = 255,
    classes: Sequence[str] | None = None,
    mask_suffix: str = "",
    val_fraction: float = 0.1,
    split_seed: int = 0,
    channels: Channels = 3,
    transform: Transform = None,
    fold: int = 0,
    folds: int = 0,
    value_range: Range = None,
) -> MaskFolder | None:
    """Open one split: pictures in `<split>/images`, masks in `<split>/masks`, by the same names.

    `images/<split>` and `masks/<split>` are taken as well. The mask of NAME.jpg is NAME +
    `mask_suffix` in any format without loss. A missing `val` is cut from train: `val_fraction` of
    it, drawn with `split_seed`; with `folds` it is fold number `fold` of train. None where there is
    no such split, which is logged. Raises DataError.
    """
    tree = Path(root).expanduser()
    has_val = not folds and _places(tree, "val") is not None
    cuts = is_cut(split, has_val, val_fraction, folds)
    places = _places(tree, "train" if cuts else split)
    if places is None and split == "train":
        expected = "train/images and train/masks, or images/train and masks/train"
        raise DataError(f"data.root={root} has no folders {expected}")
    if places is None:
        logger.warning("data.root=%s has no images of %r: the run goes without it", tree, split)
        return None
    images, masks = _pairs(*places, mask_suffix)
    if cuts:
        # Masks are not read to split them: one class for all.
        rows = rows_of_train(split, np.zeros(len(images)), val_fraction, split_seed, fold, folds)
        images = [images[row] for row in rows]
        masks = [masks[row] for row in rows]
    size = [image_size, image_size] if isinstance(image_size, int) else image_size
    found = MaskFolder(
        images,
        masks,
        num_classes,
        channels,
        size,
        transform,
        values=values,
        ignore_index=ignore_index,
        classes=classes,
        value_range=value_range,
    )
    if split == "train" and values is None:
        _warn_of_black_and_white(masks[0], ignore_index)
    return found


def _places(tree: Path, split: str) -> tuple[Path, Path] | None:
    """Return the folders of a split's images and masks."""
    for name in NAMES[split]:
        for images in (tree / name / "images", tree / "images" / name):
            if images.is_dir():
                first = images == tree / name / "images"
                return images, tree / name / "masks" if first else tree / "masks" / name
    return None


def _pairs(images: Path, masks: Path, suffix: str) -> tuple[list[str], list[str]]:
    """Return the pictures, sorted, and the mask of each."""
    if not masks.is_dir():
        raise DataError(f"data.root: {images} has no folder of masks beside it: {masks}")
    found = find_pictures(str(images))
    by_name: dict[str, str] = {}
    for path in find_pictures(str(masks)):
        name, ending = os.path.splitext(os.path.relpath(path, masks))
        if ending.lower() in _LOSSY:
            raise DataError(f"{path}: {ending} files do not keep class numbers: store masks as PNG")
        if name in by_name:
            raise DataError(f"two masks of one name: {by_name[name]} and {path}")
        by_name[name] = path
    names = [os.path.splitext(os.path.relpath(path, images))[0] + suffix for path in found]
    if lacking := [path for path, name in zip(found, names, strict=True) if name not in by_name]:
        few = ", ".join(lacking[:3])
        more = f"expected {names[found.index(lacking[0])]}.png in {masks}; see data.mask_suffix"
        raise DataError(f"{len(lacking)} of {len(found)} pictures have no mask ({few}): {more}")
    if unused := len({*by_name} - {*names}):
        logger.warning("%s: %d masks belong to no picture", masks, unused)
    return found, [by_name[name] for name in names]


def _warn_of_black_and_white(path: str, ignore_index: int) -> None:
    """Say where white is ignored in what looks like masks of two classes."""
    with suppress(UnreadableError):  # told where the sample is needed
        if ignore_index == 255 and np.unique(read_levels(path)).tolist() == [0, 255]:
            logger.warning(
                "warning: %s holds 0 and 255 alone, and 255 is ignored: if white is a class, set "
                "data.values=[0,255] data.ignore_index=-100 task.ignore_index=-100",
                path,
            )
