"""Several digits in one image, for segmentation and for several labels an image."""

from typing import Literal

import torch

from regimen.data.errors import DataError
from regimen.data.keys import SPLIT, random_state
from regimen.data.sources import Digits, TensorSamples
from regimen.data.splits import Split
from regimen.data.transforms import Transform

UNSURE = 255  # in a mask: pixels at the edge of a stroke, which are ignored
_SURE, _FAINT = 96, 32  # of 255: from here on ink; below this background


class DigitScenes(TensorSamples):
    """Scenes of 1 to `most` of scikit-learn's digits, without overlap, in one of the four quarters.

    Scene i shows digit i of the split, and others of the same split; all is drawn once, from
    `split_seed`. Transforms get the image alone.

    target: "mask" gives [size, size] numbers, 0 for paper, 1 + digit for ink and 255 for pixels
    that are neither; "present" gives [10] floats, 1 for each digit that is shown.
    """

    def __init__(
        self,
        split: Split,
        target: Literal["mask", "present"] = "mask",
        image_size: int = 32,
        most: int = 3,
        split_seed: int = 0,
        transform: Transform = None,
        fold: int = 0,
        folds: int = 0,
    ) -> None:
        if image_size % 2 or not 1 <= most <= 4:
            raise DataError(f"scenes of {image_size} pixels and {most} digits: even, and 1 to 4")
        half = image_size // 2
        digits = Digits(split, half, split_seed, fold=fold, folds=folds)
        images = torch.zeros(len(digits), 1, image_size, image_size, dtype=torch.uint8)
        masks = torch.zeros(len(digits), image_size, image_size, dtype=torch.long)
        present = torch.zeros(len(digits), 10)
        draws = random_state(split_seed, SPLIT, 1, len(digits))
        for i in range(len(digits)):
            places = draws.permutation(4)[: draws.randint(1, most + 1)]
            shown = [i, *draws.randint(len(digits), size=len(places) - 1)]
            for place, digit in zip(places, shown, strict=True):
                top, left = half * (place // 2), half * (place % 2)
                window = i, slice(top, top + half), slice(left, left + half)
                ink, label = digits.inputs[digit, 0], digits[digit][1]
                images[:, 0][window] = ink
                masks[window] = torch.where(ink >= _SURE, label + 1, 0)
                masks[window][(ink >= _FAINT) & (ink < _SURE)] = UNSURE
                present[i, label] = 1.0
        super().__init__(images, masks if target == "mask" else present, transform)
        self.classes = ["paper", *digits.classes] if target == "mask" else digits.classes
