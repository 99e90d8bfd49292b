"""Folders of pictures with a box around each object, for detection."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from regimen.conf.errors import truncated_list
from regimen.data.decode import Channels, Range
from regimen.data.errors import DataError
from regimen.data.formats.coco import (
    BoxArrays,
    InvalidBoxes,
    Picture,
    find_annotations,
    have_boxes,
    read_annotations,
)
from regimen.data.image_folder import Pictures
from regimen.data.sources import digest_of
from regimen.data.splits import Split, part_of_train, source_of_split
from regimen.data.transforms import Transform

logger = logging.getLogger(__name__)
Target = dict[str, Tensor]
_CORNERS = tv_tensors.BoundingBoxFormat.XYXY
_OF_BOXES = ("labels", "iscrowd")  # what a target holds for each of its boxes


class DetectionFolder(Pictures):
    """Pictures and their boxes: samples are (image, target).

    image: float32 (C, `image_size`, `image_size`) in [0, 1]. The picture is scaled until its longer
    side fits, and padded with black at the right and below.
    target: `boxes`, `tv_tensors.BoundingBoxes` (n, 4) as x1 y1 x2 y2 in pixels of that image,
    `labels` int64 (n), and `image_id`, the number of the sample.

    `for_training=False`: the target also has `iscrowd` (n), boxes around groups, which an
    evaluation ignores and a training leaves out; and what brings an answer back to the picture:
    its `size` (height, width), and `frame` (2, 2), the corners 0, 0 and width, height in the image.

    Transforms are given the pair (uint8 image, target) before the image is scaled, so that those of
    `torchvision.transforms.v2` move the boxes. A box that they leave without area, as a crop does
    with one outside of it, is left out.
    """

    transforms_in_batches = False  # a sample does not begin with what the transforms return

    def __init__(
        self,
        pictures: Sequence[Picture],
        classes: Sequence[str],
        image_size: int,
        channels: Channels = 3,
        transform: Transform = None,
        for_training: bool = True,
        category_ids: Sequence[int] | None = None,
        value_range: Range = None,
    ) -> None:
        paths = [picture.path for picture in pictures]
        super().__init__(paths, channels, None, transform, value_range=value_range)
        self.classes = list(classes)
        self.image_size = image_size
        self._for_training = for_training
        # The numbers of classes and pictures in the files of annotations, for answers in their
        # format: without any, those that they have here.
        self.category_ids = list(category_ids or range(len(self.classes)))
        self._numbers = [picture.number for picture in pictures]
        self._sizes = [picture.size for picture in pictures]
        self._boxes = [picture.arrays() for picture in pictures]

    def input_form(self) -> dict[str, Any]:
        """Return the form of an image before the transforms, and the side that it is fitted to."""
        return {**super().input_form(), "fitted": self.image_size}

    def number(self, index: int) -> int:
        """Return the id of a picture in COCO's file, else the number of the sample."""
        number = self._numbers[index]
        return index if number is None else number

    def boxes(self, index: int, height: int, width: int) -> Target:
        """Return the target of a sample, for its picture of that size. Raises DataError."""
        found = self._boxes[index]
        stated = self._sizes[index]
        if stated is None:
            found = found._replace(boxes=found.boxes * [width, height, width, height])
        elif stated != (width, height):
            raise DataError(
                f"{self.path(index)} has {width} x {height} pixels, and its annotations are for "
                f"{stated[0]} x {stated[1]}: mend width and height (does the file have an EXIF "
                "rotation?)"
            )
        return self._target(found, index, (height, width))

    def __getitem__(self, index: int) -> tuple[Any, Target]:
        image = self.decoded(index)
        return self._finished(image, self.boxes(index, *image.shape[-2:]))

    def resize_and_transform(self, image: Any) -> tuple[Any, Target]:
        """Return the sample of a picture, uint8 (C, H, W), without annotations."""
        height, width = image.shape[-2:]
        no_boxes = Picture("").arrays()
        return self._finished(image, self._target(no_boxes, -1, (height, width)))

    def stand_in(self) -> tuple[Any, Target]:
        """Return a black sample without a box."""
        side = self.image_size
        return self.resize_and_transform(torch.zeros(self.channels, side, side, dtype=torch.uint8))

    def fingerprint(self) -> str:
        """Return a digest of the names of the pictures, the classes and the boxes."""
        parts = [self.names, "\0".join(self.classes)]
        for arrays in self._boxes:
            parts += [*arrays, "\n"]
        return digest_of(*parts)

    def _target(self, found: BoxArrays, index: int, size: tuple[int, int]) -> Target:
        rows = np.arange(len(found.crowds))
        if self._for_training:
            rows = np.flatnonzero(~found.crowds)
        boxes = torch.from_numpy(found.boxes[rows]).float()
        target: Target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format=_CORNERS, canvas_size=size),
            "labels": torch.from_numpy(found.labels[rows]),
            "image_id": torch.tensor(index),
        }
        if not self._for_training:
            target["iscrowd"] = torch.from_numpy(found.crowds[rows].astype(np.int64))
        return target

    def _finished(self, picture: Tensor, target: Target) -> tuple[Any, Target]:
        image: Any = tv_tensors.Image(picture)
        if not self._for_training:
            size = (int(picture.shape[-2]), int(picture.shape[-1]))
            corners = torch.tensor([[0.0, 0.0], [size[1], size[0]]])
            target["frame"] = tv_tensors.KeyPoints(corners, canvas_size=size)
            target["size"] = torch.tensor(size)
        if self.transform is not None:
            image, target = self.transform((image, target))
            target = _checked(image, target)
        # The boxes and the frame are scaled as the image is.
        fitted_target = dict(target)
        for name in ("boxes", "frame"):
            if name in target:
                fitted_target[name] = fitted(self.image_size, image, target[name])
        _leave_out_empty(fitted_target)
        image = fitted(self.image_size, image, image)
        if not image.is_floating_point():
            image = F.to_dtype(image, torch.float32, scale=True)
        return image, fitted_target


def _checked(image: Any, target: Target) -> Target:
    """Return what transforms made of a target, its boxes as x1 y1 x2 y2. Raises DataError."""
    boxes = target["boxes"]
    for name in _OF_BOXES:
        if name in target and len(target[name]) != len(boxes):
            raise DataError(
                f"the transforms left {len(boxes)} boxes, but {len(target[name])} {name}: a step "
                "that leaves out boxes has to leave out their labels, and in an evaluation their "
                "iscrowd; boxes without area need no such step"
            )
    if isinstance(boxes, tv_tensors.BoundingBoxes):
        boxes = F.convert_bounding_box_format(boxes, new_format=_CORNERS)
    else:  # operations on them return plain tensors
        boxes = tv_tensors.BoundingBoxes(boxes, format=_CORNERS, canvas_size=image.shape[-2:])
    return {**target, "boxes": boxes}


def _leave_out_empty(target: Target) -> None:
    """Leave out boxes without area, which detectors refuse, and what belongs to them."""
    boxes = target["boxes"]
    has_area = (boxes[:, 2:] > boxes[:, :2]).all(1)
    if has_area.all():
        return
    target["boxes"] = tv_tensors.wrap(boxes[has_area], like=boxes)
    for name in _OF_BOXES:
        if name in target:
            target[name] = target[name][has_area]


def fitted(side: int, image: Any, part: Any) -> Any:
    """Scale an image (C, H, W), or boxes or points in it, into a square.

    It is padded at the right and below. `image`, `part`: tensors of torchvision's `tv_tensors`;
    `part` is the image, or lies in it.
    """
    height, width = image.shape[-2:]
    scale = side / max(height, width)
    inner_height = max(1, round(height * scale))
    inner_width = max(1, round(width * scale))
    padding = [0, 0, side - inner_width, side - inner_height]
    return F.pad(F.resize(part, [inner_height, inner_width]), padding)


def collate_boxes(samples: Sequence[tuple[Tensor, Target]]) -> tuple[Tensor, list[Target]]:
    """Return images (n, C, H, W) and a list of targets: each has its own number of boxes.

    Raises DataError for samples without targets.
    """
    if not isinstance(samples[0], tuple):
        raise DataError(
            "a picture came without a target: collate_boxes takes the samples (image, target) of "
            "a data set such as data=detection"
        )
    images = []
    targets = []
    for image, target in samples:
        # Plain tensors: `tv_tensors` would run torchvision's code in each operation on them.
        images.append(image.as_subclass(Tensor))
        targets.append({name: value.as_subclass(Tensor) for name, value in target.items()})
    return torch.stack(images), targets


def detection_folder(
    root: str,
    split: Split,
    image_size: int,
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
    invalid_boxes: InvalidBoxes = "raise",
    channels: Channels = 3,
    val_fraction: float = 0.1,
    split_seed: int = 0,
    transform: Transform = None,
    fold: int = 0,
    folds: int = 0,
    value_range: Range = None,
) -> DetectionFolder | None:
    """Open one split of a folder in COCO's or YOLO's layout (`regimen.data.formats.coco`).

    A missing `val` is cut from train: `val_fraction` of it, drawn with `split_seed`; with `folds`
    it is fold number `fold` of train. None where there is no such split, which is logged.
    Raises DataError.
    """
    tree = Path(root).expanduser()
    find = partial(find_annotations, tree)
    place, is_part = source_of_split(find, split, val_fraction, folds)
    if place is None and split == "train":
        raise DataError(
            f"data.root={root} has no training set in COCO's or YOLO's layout: expected a JSON "
            "file in train/ or annotations/instances_train.json, or train/images and "
            "train/labels, or images/train and labels/train"
        )
    if place is None:
        logger.warning("data.root=%s has no pictures of %r: the run goes without it", tree, split)
        return None
    found = read_annotations(tree, place, classes, invalid_boxes)
    if num_classes is not None and num_classes != len(found.classes):
        raise DataError(
            f"data.num_classes is {num_classes}, but {place.annotations} has "
            f"{len(found.classes)} classes, {truncated_list(found.classes, 10)}: set "
            "data.num_classes=null; the background is none of them"
        )
    pictures = found.pictures
    if is_part:  # not stratified: a picture has any number of classes
        pictures = part_of_train(split, pictures, val_fraction, split_seed, fold, folds)
        if not have_boxes(pictures):
            raise DataError(
                f"data.root={root}: none of {len(pictures)} pictures of {split!r}, a part of "
                "train, has a box: set another data.split_seed or data.val_fraction, or add a "
                "split val"
            )
    return DetectionFolder(
        pictures,
        found.classes,
        image_size,
        channels,
        transform,
        split == "train",
        found.category_ids,
        value_range,
    )
