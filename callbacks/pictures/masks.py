"""Segmentation: masks of labels and predictions drawn over the images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from callbacks.support.drawing import is_picture, overlay, pixels, sheet
from callbacks.support.watching import KeptSamples

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class Masks(KeptSamples):
    """Show the first images of the validation, with label and prediction over them, as `masks/val`.

    Each class but 0, the background, has a color; pixels without a known class are grey.
    """

    def __init__(self, count: int = 4, every_n_validations: int | None = None) -> None:
        super().__init__(count, every_n_validations)

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the task predicts a class of each pixel."""
        return trainer.is_main and trainer.task.output_kind == "mask"

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the first images with their masks."""
        if self._kept is None and is_picture(batch[0]):
            wanted = self._wanted
            predicted = trainer.task.interpret(output[:wanted])
            self._kept = batch[0][:wanted].clone(), batch[1][:wanted].clone(), predicted

    def show(self, trainer: Trainer) -> None:
        """Log the images."""
        if self._kept is None:
            return
        inputs, labels, predicted = (part.cpu() for part in self._kept)
        count = getattr(trainer.task, "num_classes", None) or int(labels.max()) + 1
        tiles, captions = [], []
        for image, label, answer in zip(pixels(inputs), labels, predicted, strict=True):
            tiles += [image, overlay(image, label, count), overlay(image, answer, count)]
            captions += ["image", "label", "prediction"]
        trainer.log_image("masks/val", sheet(tiles, captions, columns=6))
