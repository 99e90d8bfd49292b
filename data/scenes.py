"""Several digits in one image, for segmentation, detection and several labels an image."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from regimen.data.errors import DataError
from regimen.data.formats.coco import Picture
from regimen.data.formats.detection_folder import DetectionFolder
from regimen.data.keys import SPLIT, random_state
from regimen.data.sources import Digits, TensorSamples, digest_of
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


class DigitBoxes(DetectionFolder):
    """Scenes of 1 to `most` of scikit-learn's digits of several sizes, with a box around each.

    Scene i shows digit i of the split, and others of it, without overlap. Digits are scaled to
    squares of `sides` pixels; a box encloses the ink of one. The scenes are drawn once, with
    `split_seed`. `scenes`: how many, at most one a digit of the split; None: so many.
    """

    concurrent = True  # nothing is prepared: processes may open it at once

    def __init__(
        self,
        split: Split,
        scenes: int | None = None,
        image_size: int = 64,
        sides: tuple[int, int] = (16, 28),
        most: int = 3,
        split_seed: int = 0,
        transform: Transform = None,
        fold: int = 0,
        folds: int = 0,
    ) -> None:
        least, largest = sides
        if not 8 <= least <= largest <= image_size or most < 1:
            raise DataError(
                f"data.sides=[{least}, {largest}] and data.most={most}: digits of at least 8 and "
                f"at most data.image_size={image_size} pixels, and at least one in a scene"
            )
        if scenes is not None and scenes < 1:
            raise DataError(f"data.scenes={scenes}: give at least 1, or null for one a digit")
        digits = Digits(split, 8, split_seed, fold=fold, folds=folds)
        count = min(len(digits), scenes or len(digits))
        draws = random_state(split_seed, SPLIT, 2, len(digits))
        self._images = torch.zeros(count, 3, image_size, image_size, dtype=torch.uint8)
        pictures = []
        for i in range(count):
            picture = Picture(f"scene {i}", (image_size, image_size))
            shown = [i, *draws.randint(len(digits), size=draws.randint(most))]
            for digit in shown:
                side = draws.randint(least, largest + 1)
                left, top = draws.randint(image_size - side + 1, size=2)
                place = self._images[i, :, top : top + side, left : left + side]
                if place.any():  # there is a digit already
                    continue
                glyph = digits.inputs[digit][None].float()
                ink = interpolate(glyph, (side, side), mode="bilinear")[0]
                place.copy_(ink.expand(3, -1, -1))
                rows, columns = (ink[0] >= _PAPER).nonzero(as_tuple=True)
                x1 = left + int(columns.min())
                y1 = top + int(rows.min())
                x2 = left + int(columns.max()) + 1
                y2 = top + int(rows.max()) + 1
                picture.add((x1, y1, x2, y2), int(digits.targets[digit]))
            pictures.append(picture)
        is_train = split == "train"
        super().__init__(pictures, digits.classes, image_size, 3, transform, is_train)

    def read(self, index: int) -> Tensor:
        """Return a scene as uint8 (3, H, W)."""
        return self._images[index]

    def explain_depth(self) -> list[str]:
        """Return nothing: there are no files."""
        return []

    def fingerprint(self) -> str:
        """Return a digest of the scenes and their boxes."""
        return digest_of(self._images.numpy(), super().fingerprint())
