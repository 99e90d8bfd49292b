"""Segmentation: masks of labels and predictions drawn over the images."""

from typing import Any

import torch

from callbacks.pictures.drawing import is_picture, overlay, pixels, sheet
from callbacks.pictures.validation import ValidationPicture
from trainer.trainer import Trainer


class Masks(ValidationPicture):
    """Show the first images of the validation, with label and prediction over them, as `masks/val`.

    Each class but 0, the background, has a color; pixels without a known class are grey.
    """

    kinds = ("mask",)

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the first images with their masks."""
        if not self.kept and is_picture(batch[0]):
            first = slice(self.wanted)
            answers = trainer.task.interpret(output[first])
            self.kept = [(batch[0][first].clone(), batch[1][first].clone(), answers)]

    def show(self, trainer: Trainer) -> None:
        """Log the images."""
        inputs, labels, predicted = (part.cpu() for part in self.kept[0])
        count = getattr(trainer.task, "num_classes", None) or int(labels.max()) + 1
        tiles = []
        for image, label, answer in zip(pixels(inputs), labels, predicted, strict=True):
            tiles += [image, overlay(image, label, count), overlay(image, answer, count)]
        captions = ["image", "label", "prediction"] * len(inputs)
        trainer.log_image("masks/val", sheet(torch.stack(tiles), captions, columns=3))
