"""Folders of pictures, and of masks with a class for each pixel, for segmentation."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from regimen.conf.errors import truncated_list
from regimen.data.decode import Channels, Range, read_mask
from regimen.data.errors import DataError, UnreadableError
from regimen.data.image_folder import Pictures, by_stem, find_pictures, stem_in
from regimen.data.sources import digest_of
from regimen.data.splits import NAMES, Split, part_of_train, source_of_split
from regimen.data.transforms import Transform

logger = logging.getLogger(__name__)
_LEVELS = 2**16  # values that a pixel of a mask may have
_LOSSY = (".jpg", ".jpeg", ".webp")


class MaskFolder(Pictures):
    """Pictures and their masks: samples are (image, mask), masks int64 [H, W] of class numbers.

    size: height and width that both are resized to, masks by the nearest pixel; None: no resizing.
    values: the value of a mask's pixel for each class; None: class numbers.
    Transforms get the image alone, except for those of whole batches with `masks`.
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
        # One byte string instead of many objects: forked workers then share its memory.
        self.mask_names = np.array([*map(os.fsencode, masks)], np.bytes_)
        self.ignore_index = ignore_index
        levels = list(range(num_classes)) if values is None else list(values)
        if len(levels) != num_classes or not all(0 <= level < _LEVELS for level in levels):
            raise DataError(f"data.values={levels}: give one for each of {num_classes} classes")
        self._class_of_level = np.full(_LEVELS, -1, np.int64)  # -1: not allowed
        if 0 <= ignore_index < _LEVELS:
            self._class_of_level[ignore_index] = ignore_index
        # After the line above: a level that is both ignored and a class is the class.
        self._class_of_level[levels] = np.arange(num_classes)
        if classes is not None:
            if len(classes) != num_classes:
                raise DataError(f"data.classes has {len(classes)} names for {num_classes} classes")
            self.classes = list(classes)

    def mask(self, index: int) -> Tensor:
        """Return a mask as int64 [H, W], in the size of its file. Raises DataError."""
        path = os.fsdecode(self.mask_names[index])
        levels = read_mask(path).numpy()
        is_outside = (levels < 0) | (levels >= _LEVELS)
        mask = self._class_of_level[np.where(is_outside, 0, levels)]
        is_wrong = is_outside | (mask < 0)
        if is_wrong.any():
            level = int(levels[is_wrong][0])
            allowed = np.flatnonzero(self._class_of_level >= 0).tolist()
            raise DataError(
                f"{path}: value {level} is none of a class, only {allowed[:12]} are: raise "
                "data.num_classes, or list the values of the classes in data.values"
            )
        return torch.from_numpy(mask)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        image = self.decoded(index)
        mask = self.mask(index)
        if image.shape[-2:] != mask.shape:
            raise DataError(
                f"{self.path(index)} has {list(image.shape[-2:])} pixels, and its mask "
                f"{list(mask.shape)}: they must be alike"
            )
        if self.size is not None and list(mask.shape) != list(self.size):
            batch = mask[None, None].float()
            resized = interpolate(batch, list(self.size), mode="nearest-exact")
            mask = resized[0, 0].long()
        return self.resize_and_transform(image), mask

    def stand_in(self) -> tuple[Any, Tensor]:
        """Return a black sample without a pixel that counts."""
        image = super().stand_in()
        size = self.size or image.shape[-2:]
        return image, torch.full(list(size), self.ignore_index)

    def fingerprint(self) -> str:
        """Return a digest of the names of pictures and masks."""
        return digest_of(self.names, self.mask_names)


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
    it, drawn with `split_seed`; with `folds` it is fold number `fold` of train. Returns None if
    there is no such split, which is logged. Raises DataError.
    """
    tree = Path(root).expanduser()
    find = partial(_split_folders, tree)
    folders, is_part = source_of_split(find, split, val_fraction, folds)
    if folders is None and split == "train":
        raise DataError(
            f"data.root={root} has no folders train/images and train/masks, or images/train and "
            "masks/train"
        )
    if folders is None:
        logger.warning("data.root=%s has no images of %r: the run goes without it", tree, split)
        return None
    pairs = _pairs(*folders, mask_suffix)
    if is_part:  # not stratified: masks are not read to split them
        pairs = part_of_train(split, pairs, val_fraction, split_seed, fold, folds)
    images, masks = zip(*pairs, strict=True)
    dataset = MaskFolder(
        images,
        masks,
        num_classes,
        channels,
        [image_size, image_size] if isinstance(image_size, int) else image_size,
        transform,
        values=values,
        ignore_index=ignore_index,
        classes=classes,
        value_range=value_range,
    )
    if split == "train" and values is None:
        _warn_of_black_and_white(masks[0], ignore_index)
    return dataset


def _split_folders(tree: Path, split: str) -> tuple[Path, Path] | None:
    """Return the folders of a split's images and masks, or None."""
    for name in NAMES[split]:
        for images, masks in (
            (tree / name / "images", tree / name / "masks"),
            (tree / "images" / name, tree / "masks" / name),
        ):
            if images.is_dir():
                return images, masks
    return None


def _pairs(images: Path, masks: Path, suffix: str) -> list[tuple[str, str]]:
    """Return the pictures, sorted, and the mask of each."""
    if not masks.is_dir():
        raise DataError(f"data.root: {images} has no folder of masks beside it: {masks}")
    pictures = find_pictures(str(images))
    masks_by_name = by_stem(masks, "masks")
    for path in masks_by_name.values():
        if path.lower().endswith(_LOSSY):
            raise DataError(
                f"{path}: {', '.join(_LOSSY)} files do not keep class numbers: store masks as PNG"
            )
    names = [stem_in(images, path) + suffix for path in pictures]
    without_mask = [row for row, name in enumerate(names) if name not in masks_by_name]
    if without_mask:
        lacking = truncated_list([pictures[row] for row in without_mask], 3)
        raise DataError(
            f"{len(without_mask)} of {len(pictures)} pictures have no mask ({lacking}): expected "
            f"{names[without_mask[0]]}.png in {masks}; see data.mask_suffix"
        )
    unused = masks_by_name.keys() - set(names)
    if unused:
        logger.warning("%s: %d masks belong to no picture", masks, len(unused))
    return [(path, masks_by_name[name]) for path, name in zip(pictures, names, strict=True)]


def _warn_of_black_and_white(path: str, ignore_index: int) -> None:
    """Warn if white is ignored in what looks like masks of two classes."""
    with suppress(UnreadableError):  # raised again where the sample is needed
        if ignore_index == 255 and np.unique(read_mask(path)).tolist() == [0, 255]:
            logger.warning(
                "warning: %s holds 0 and 255 alone, and 255 is ignored: if white is a class, set "
                "data.values=[0,255] data.ignore_index=-100 task.ignore_index=-100",
                path,
            )
