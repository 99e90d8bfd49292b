"""Several digits in one image, for segmentation and for several labels an image."""

from typing import Literal

import torch

from regimen.data.errors import DataError
from regimen.data.keys import SPLIT, random_state
from regimen.data.sources import Digits, TensorSamples
from regimen.data.splits import Split
from regimen.data.transforms import Transform

UNSURE = 255  # in a mask: pixels at the edge of a stroke, which are ignored
_INK = 96  # of 255: the least brightness of ink
_PAPER = 32  # of 255: paper is darker


class DigitScenes(TensorSamples):
    """Scenes of 1 to `most` of scikit-learn's digits, without overlap, in one of the four quarters.

    Scene i shows digit i of the split, and others of the same split. The scenes are drawn once,
    with `split_seed`. Transforms get the image alone.

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
            quarters = draws.permutation(4)[: draws.randint(1, most + 1)]
            shown = [i, *draws.randint(len(digits), size=len(quarters) - 1)]
            for quarter, digit in zip(quarters, shown, strict=True):
                top = half * (quarter // 2)
                left = half * (quarter % 2)
                image = digits.inputs[digit, 0]
                label = digits.targets[digit]
                mask = torch.where(image >= _INK, label + 1, 0)
                mask[(image >= _PAPER) & (image < _INK)] = UNSURE
                images[i, 0, top : top + half, left : left + half] = image
                masks[i, top : top + half, left : left + half] = mask
                present[i, label] = 1.0
        if target == "mask":
            super().__init__(images, masks, transform)
            self.classes = ["paper", *digits.classes]
        else:
            super().__init__(images, present, transform)
            self.classes = digits.classes
