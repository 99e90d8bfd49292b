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
        images, labels, predictions = parts
        count = getattr(trainer.task, "num_classes", None)
        if not count:
            count = int(labels.max()) + 1
        tiles = []
        for image, label, predicted in zip(pixels(images), labels, predictions, strict=True):
            tiles += [image, overlay(image, label, count), overlay(image, predicted, count)]
        captions = ["image", "label", "prediction"] * len(images)
        trainer.log_image("masks/val", sheet(torch.stack(tiles), captions, columns=3))


def overlay(image: Tensor, mask: Tensor, classes: int) -> Tensor:
    """Return an image with each class but the first in a color over it; unknown ones are grey.

    `image`: uint8 [3, H, W]. `mask`: the class of each pixel, [H, W].
    """
    layers = []
    colors = []
    for index in range(1, classes):
        red, green, blue = colorsys.hsv_to_rgb(index / classes, 1, 1)
        colors.append((int(255 * red), int(255 * green), int(255 * blue)))
        layers.append(mask == index)
    colors.append((128, 128, 128))
    layers.append((mask < 0) | (mask >= classes))
    painted: Tensor = draw_segmentation_masks(image, torch.stack(layers), 0.6, colors)
    return painted
