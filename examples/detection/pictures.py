"""What the detector finds, drawn into the images of a validation."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torchvision.utils import draw_bounding_boxes, make_grid

from regimen import Callback
from regimen.trainer.trainer import Trainer


class Boxes(Callback):
    """Show the first images of each validation as `boxes`, with those surer than `least`."""

    def __init__(self, count: int = 8, least: float = 0.5) -> None:
        self._count, self._least = count, least
        self._shown: list[Tensor] = []

    def on_validation_start(self, trainer: Trainer) -> None:
        """Begin a new sheet."""
        self._shown = []

    def on_validation_batch(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Draw until there are enough."""
        images, room = batch[0], self._count - len(self._shown)
        for image, found in zip(images[:room], output[:room], strict=True):
            sure = found["scores"] >= self._least
            names = [str(int(label)) for label in found["labels"][sure]]
            self._shown.append(draw_bounding_boxes(image.cpu(), found["boxes"][sure].cpu(), names))

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Hand the sheet to TensorBoard, and to whatever else shows images."""
        if self._shown:
            trainer.log_image("boxes", make_grid(self._shown, nrow=4))
