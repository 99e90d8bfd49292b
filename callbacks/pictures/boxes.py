"""Boxes of labels and answers over the images of a validation, for detectors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.utils import draw_bounding_boxes

from regimen.callbacks.pictures.picture import (
    ValidationPicture,
    class_names,
    enlarged,
    is_picture,
    pixels,
    sheet,
)
from regimen.callbacks.support import require
from regimen.data.batch import map_tensors
from regimen.trainer.media import Image
from regimen.trainer.trainer import Trainer

_LEAST_SIDE = 256  # pixels: smaller images are enlarged, so that captions can be read
_GAP = 8  # pixels between two images
# Colors of the classes, by their numbers in turn.
_COLORS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#46f0f0", "#f032e6", "#bcf60c")


class Boxes(ValidationPicture):
    """Show the first images of the validation, true boxes and answers side by side, as `boxes/val`.

    Boxes with a score below `score_threshold` are not shown.
    """

    kinds = ("boxes",)

    def __init__(
        self,
        count: int = 4,
        score_threshold: float = 0.5,
        every_n_validations: int | None = None,
    ) -> None:
        super().__init__(count, every_n_validations)
        require(
            0 <= score_threshold <= 1, f"score_threshold={score_threshold}: choose one of 0 to 1"
        )
        self._threshold = score_threshold

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the first images, with what is true of each and what was answered."""
        if self.kept or not is_picture(batch[0]):
            return
        first = slice(self.wanted)
        images, truths = batch
        self.kept = map_tensors(Tensor.clone, [(images[first], truths[first], output[first])])

    def finish(self, trainer: Trainer) -> None:
        """Log the images. Waits for the device."""
        for images, truths, answers in map_tensors(Tensor.cpu, self.kept):
            self._show(trainer, images, truths, answers)

    def _show(
        self, trainer: Trainer, images: Tensor, truths: Sequence[Any], answers: Sequence[Any]
    ) -> None:
        names = class_names(trainer, getattr(trainer.task, "num_classes", 0))
        tiles = []
        for image, truth, answer in zip(pixels(images), truths, answers, strict=True):
            numbers = truth["labels"].tolist()
            captions = [_name(names, number) for number in numbers]
            tiles.append(with_boxes(image, truth["boxes"], captions, numbers))

            is_sure = answer["scores"] >= self._threshold
            scores = answer["scores"][is_sure].tolist()
            numbers = answer["labels"][is_sure].tolist()
            captions = []
            for number, score in zip(numbers, scores, strict=True):
                captions.append(f"{_name(names, number)} {score:.2f}")
            tiles.append(with_boxes(image, answer["boxes"][is_sure], captions, numbers))
        captions = ["label", "answer"] * len(images)
        trainer.log_image("boxes/val", sheet(torch.stack(tiles), captions, columns=2))


def _name(names: Sequence[str], number: int) -> str:
    return names[number] if number < len(names) else str(number)


def with_boxes(
    image: Tensor, boxes: Tensor, captions: Sequence[str], numbers: Sequence[int]
) -> Tensor:
    """Return an image with boxes and a caption for each, as uint8 [3, H, W].

    `image`: uint8 [1 or 3, H, W]; a small one is enlarged by a whole number. `boxes`: [n, 4], x1 y1
    x2 y2 in its pixels. `numbers`: of their classes, which choose the colors. On the host.
    """
    large = enlarged(image.expand(3, -1, -1), _LEAST_SIDE)
    if not len(boxes):
        return large
    factor = large.shape[1] // image.shape[1]
    drawn: Tensor = draw_bounding_boxes(
        large,
        boxes.double() * factor,
        list(captions),
        [_COLORS[number % len(_COLORS)] for number in numbers],
        width=2,
    )
    return drawn


def side_by_side(tiles: Sequence[Tensor]) -> Image:
    """Return images [3, H, W] of one size as one [H, W, 3], with a gap between them."""
    gap = torch.full((3, tiles[0].shape[1], _GAP), 255, dtype=torch.uint8)
    joined = [tiles[0]]
    for tile in tiles[1:]:
        joined += [gap, tile]
    picture: Image = torch.cat(joined, 2).movedim(0, -1).contiguous().numpy()
    return picture
