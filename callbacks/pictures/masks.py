"""Label and prediction over the images of a validation, for networks that answer for each pixel."""

import colorsys

import torch
from torch import Tensor
from torchvision.utils import draw_segmentation_masks

from regimen.callbacks.pictures.picture import pixels, sheet
from regimen.callbacks.pictures.samples import ValidationSamples
from regimen.trainer.trainer import Trainer


class Masks(ValidationSamples):
    """Show the first images of the validation, with label and prediction over them, as `masks/val`.

    Each class but 0, the background, has a color; pixels without a known class are grey.
    """

    kinds = ("mask",)

    def show(self, trainer: Trainer, *parts: Tensor) -> None:
        """Log the images."""
        images, labels, answers = parts
        count = getattr(trainer.task, "num_classes", None) or int(labels.max()) + 1
        tiles = []
        for image, label, answer in zip(pixels(images), labels, answers, strict=True):
            tiles += [image, overlay(image, label, count), overlay(image, answer, count)]
        captions = ["image", "label", "prediction"] * len(images)
        trainer.log_image("masks/val", sheet(torch.stack(tiles), captions, columns=3))


def overlay(image: Tensor, mask: Tensor, classes: int) -> Tensor:
    """Return an image with each class but the first in a color over it; unknown ones are grey."""
    hues = [colorsys.hsv_to_rgb(index / classes, 1, 1) for index in range(1, classes)]
    colors = [(int(255 * r), int(255 * g), int(255 * b)) for r, g, b in hues]
    layers = [mask == index for index in range(1, classes)] + [(mask < 0) | (mask >= classes)]
    painted: Tensor = draw_segmentation_masks(
        image, torch.stack(layers), 0.6, [*colors, (128, 128, 128)]
    )
    return painted
