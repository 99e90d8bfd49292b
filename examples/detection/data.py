"""Images with boxes: several digits on a canvas, and how such samples become a batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision import tv_tensors

from regimen.data.sources import Digits
from regimen.data.splits import Split

Target = dict[str, Tensor]  # boxes (n, 4) as x1 y1 x2 y2 in pixels, labels (n)
Sample = tuple[Tensor, Target]


class DigitBoxes:
    """Scenes of 1 to 3 of scikit-learn's digits, of 12 to 24 pixels, that do not overlap.

    Scene i shows digit i of the split, and others of it; where, is drawn from `split_seed`, the
    same in every epoch. `augment` gets image and target, as the transforms of torchvision's v2 do;
    it draws from torch's generator, which the loader sets anew for each sample.
    """

    def __init__(
        self,
        split: Split,
        image_size: int = 64,
        split_seed: int = 0,
        augment: Callable[[Tensor, Any], tuple[Tensor, Any]] | None = None,
    ) -> None:
        digits = Digits(split, 8, split_seed)
        self.classes = digits.classes
        self.augment = augment
        self._scenes = [_scene(digits, i, image_size, split_seed) for i in range(len(digits))]

    def __len__(self) -> int:
        return len(self._scenes)

    def __getitem__(self, index: int) -> Sample:
        image, target = self._scenes[index]
        size = tuple(image.shape[-2:])
        boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=size)
        both: tuple[Any, Any] = tv_tensors.Image(image), {**target, "boxes": boxes}
        if self.augment is not None:
            both = self.augment(*both)
        image, target = both
        return image.as_subclass(Tensor).float() / 255, {
            "boxes": target["boxes"].as_subclass(Tensor),
            "labels": target["labels"],
        }


def _scene(digits: Digits, index: int, size: int, seed: int) -> Sample:
    draws = torch.Generator().manual_seed(seed * 10_000 + index)

    def drawn(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=draws))

    image = torch.zeros(3, size, size, dtype=torch.uint8)
    boxes: list[list[float]] = []
    labels: list[int] = []
    for number in [index, *(drawn(0, len(digits) - 1) for _ in range(drawn(0, 2)))]:
        side = drawn(12, 24)
        left, top = drawn(0, size - side), drawn(0, size - side)
        place = image[:, top : top + side, left : left + side]
        if place.any():  # there is a digit already
            continue
        ink = interpolate(digits.inputs[number][None].float(), (side, side), mode="bilinear")[0]
        place.copy_(ink.expand(3, -1, -1))
        boxes.append([left, top, left + side, top + side])
        labels.append(int(digits.targets[number]))
    return image, {"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels)}


def collate(samples: Sequence[Sample]) -> tuple[list[Tensor], list[Target]]:
    """Return images and targets as lists: each sample has its own number of boxes."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)
