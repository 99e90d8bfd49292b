"""Samples as the network gets them, and its predictions in a validation."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regimen.callbacks.pictures.picture import (
    ValidationPicture,
    class_names,
    is_picture,
    labels_of,
    sheet,
)
from regimen.callbacks.support import check_least, is_due
from regimen.data.batch import MicroBatch
from regimen.trainer.callback import Callback
from regimen.trainer.trainer import Trainer

# Colors of captions.
_RIGHT = (0, 120, 0)
_WRONG = (190, 0, 0)
_UNKNOWN = (0, 0, 0)  # without a label


class TrainingSamples(Callback):
    """Show the first images of an epoch, augmented, as `samples/train`.

    `every_n_epochs`: null for the 1st, 4th, 16th... The smallest value is black, the
    largest white. Inputs that are not images are not shown.
    """

    persistent = ("kept",)

    def __init__(self, count: int = 16, every_n_epochs: int | None = None) -> None:
        check_least(count=count, every_n_epochs=every_n_epochs)
        self._count = count
        self._every = every_n_epochs
        self.kept = list[Tensor]()  # images that wait for a log line, and their labels

    def on_update_start(self, trainer: Trainer, micro_batches: Sequence[MicroBatch]) -> None:
        """Keep a copy of the first images, on their device."""
        state = trainer.state
        if state.position or not trainer.is_main or not is_due(state.epoch + 1, self._every):
            return
        batch = micro_batches[0].batch
        if not isinstance(batch, tuple | list):
            batch = [batch]
        if not is_picture(batch[0]):
            return
        parts = batch[:1]
        if len(batch) > 1 and isinstance(batch[1], Tensor) and batch[1].ndim == 1:
            parts = batch[:2]
        self.kept = [part[: self._count].clone() for part in parts]

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Show them at the next log line, where waiting for the device is allowed."""
        if not self.kept:
            return
        images, *labels = self.kept
        self.kept = []
        count = getattr(trainer.task, "num_classes", None) or 0
        names = dict(enumerate(class_names(trainer, count)))
        captions = []
        if labels:
            # The host waits here, at a log line.
            captions = [names.get(label, str(label)) for label in labels[0].tolist()]
        trainer.log_image("samples/train", sheet(images, captions))


class ValidationSamples(ValidationPicture):
    """Show the first images of the validation with label and prediction, as `samples/val`."""

    kinds: tuple[str, ...] = ("classes",)

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the first images."""
        if self.kept or not is_picture(batch[0]):
            return
        count = self.wanted
        images = batch[0][:count].clone()
        labels = labels_of(trainer, batch[1][:count]).clone()
        self.kept = [(images, labels, trainer.task.interpret(output[:count]))]

    def show(self, trainer: Trainer, *parts: Tensor) -> None:
        """Log the images."""
        trainer.log_image("samples/val", _captioned(trainer, *parts))


class Misclassified(ValidationPicture):
    """Show the wrong predictions with the highest probability, as `samples/misclassified`."""

    kinds = ("classes",)
    on_main_only = False

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the worst images so far, without waiting for the device."""
        if is_picture(batch[0]):
            samples = (batch[0], labels_of(trainer, batch[1]), trainer.task.interpret(output))
            candidates = [torch.cat(parts) for parts in zip(*self.kept, samples, strict=True)]
            self.kept = [self._worst(*candidates)]

    def show(self, trainer: Trainer, *parts: Tensor) -> None:
        """Log the worst images of all processes."""
        images, labels, probabilities = self._worst(*parts)
        count = int((_wrongness(labels, probabilities) > 0).sum())
        if count:
            picture = _captioned(trainer, images[:count], labels[:count], probabilities[:count])
            trainer.log_image("samples/misclassified", picture)

    def _worst(self, images: Tensor, labels: Tensor, probabilities: Tensor) -> Sequence[Tensor]:
        count = min(self.wanted, len(labels))
        worst = _wrongness(labels, probabilities).topk(count).indices
        return images[worst], labels[worst], probabilities[worst]


def _wrongness(labels: Tensor, probabilities: Tensor) -> Tensor:
    """Return the probability of each wrong prediction; 0 for correct ones and without a label."""
    probability, predicted = probabilities.max(1)
    return probability * ((predicted != labels) & (labels >= 0))


def _captioned(trainer: Trainer, images: Tensor, labels: Tensor, probabilities: Tensor) -> Any:
    """Return images above their predictions, and their labels where these differ.

    All tensors are on the host: nothing waits for a device.
    """
    names = class_names(trainer, probabilities.shape[1])
    largest, predictions = probabilities.max(1)
    captions = []
    colors = []
    samples = zip(labels.tolist(), predictions.tolist(), largest.tolist(), strict=True)
    for label, predicted, probability in samples:
        caption = f"{names[predicted]} {probability:.0%}"
        color = _RIGHT
        if not 0 <= label < len(names):
            color = _UNKNOWN
        elif label != predicted:
            caption += f"\nis {names[label]}"
            color = _WRONG
        captions.append(caption)
        colors.append(color)
    return sheet(images, captions, colors)
