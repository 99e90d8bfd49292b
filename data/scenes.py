"""Scenes of several real digits on one canvas, with exact labels and masks."""

from typing import Any, Literal

import torch
from torch import Tensor

from data.errors import DataError
from data.images import Transform, picture_form
from data.keys import SPLIT, random_state
from data.sources import Digits, Split

UNSURE = 255  # in a mask: pixels at the edge of a stroke, which are ignored
_SURE, _FAINT = 96, 32  # of 255: from here on ink; below this background


class DigitScenes:
    """Scenes of 1 to `most` of scikit-learn's digits, without overlap, in one of the four quarters.

    Scene i shows digit i of the split, and others of the same split; all is drawn once, from
    `split_seed`. Transforms get the image alone.

    target: "mask" gives [size, size] numbers, 0 for paper, 1 + digit for ink and 255 for pixels
    that are neither; "present" gives [10] floats, 1 for each digit that is shown.
    """

    transforms_in_batches = True

    def __init__(
        self,
        split: Split,
        target: Literal["mask", "present"] = "mask",
        image_size: int = 32,
        most: int = 3,
        split_seed: int = 0,
        transform: Transform | None = None,
        fold: int | None = None,
        folds: int | None = None,
    ) -> None:
        if image_size % 2 or not 1 <= most <= 4:
            raise DataError(f"scenes of {image_size} pixels and {most} digits: even, and 1 to 4")
        if target not in ("mask", "present"):
            raise DataError(f"target is {target!r}, neither mask nor present")
        digits = Digits(split, image_size // 2, split_seed, fold=fold, folds=folds)
        self.transform = transform
        self.images = torch.zeros(len(digits), 1, image_size, image_size, dtype=torch.uint8)
        self._masks = torch.zeros(len(digits), image_size, image_size, dtype=torch.long)
        self._present = torch.zeros(len(digits), 10)
        self._draw(digits, most, split_seed)
        self.target = self._masks if target == "mask" else self._present
        names = digits.classes
        self.classes = ["paper", *names] if target == "mask" else names

    def _draw(self, digits: Digits, most: int, seed: int) -> None:
        half = self.images.shape[-1] // 2
        draws = random_state(seed, SPLIT, 1, len(digits))
        for i in range(len(digits)):
            places = draws.permutation(4)[: draws.randint(1, most + 1)]
            shown = [i, *draws.randint(len(digits), size=len(places) - 1)]
            for place, digit in zip(places, shown, strict=True):
                window = (
                    i,
                    slice(half * (place // 2), half * (place // 2 + 1)),
                    slice(half * (place % 2), half * (place % 2 + 1)),
                )
                ink, label = digits.images[digit, 0], int(digits.targets[digit])
                self.images[:, 0][window] = ink
                self._masks[window] = _mask(ink, label + 1)
                self._present[i, label] = 1.0

    def __len__(self) -> int:
        return len(self.images)

    def input_form(self) -> dict[str, Any]:
        """Return what a picture must be brought to before the transforms."""
        return picture_form(self.images)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all samples as one batch, before the transforms."""
        return self.images, self.target

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        image = self.images[index]
        if self.transform is not None:
            image = self.transform(image)
        return image, self.target[index]


def _mask(ink: Tensor, number: int) -> Tensor:
    unsure = (ink >= _FAINT) & (ink < _SURE)
    return torch.where(unsure, UNSURE, torch.where(ink >= _SURE, number, 0))
