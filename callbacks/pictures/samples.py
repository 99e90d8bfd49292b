"""Samples as the network gets them, and its predictions in a validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from callbacks.support.drawing import BLACK, RIGHT, WRONG, is_picture, pixels, sheet
from callbacks.support.watching import (
    KeptSamples,
    check_count,
    check_every,
    class_names,
    is_due,
    labels_of,
)
from trainer.callback import Callback

if TYPE_CHECKING:
    from data.batch import MicroBatch
    from trainer.trainer import Trainer

Samples = Sequence[Tensor]  # images, labels and probabilities
_PARTS = 8  # kept from so many batches before the worst of them are chosen, which costs


class TrainingSamples(Callback):
    """Show the first images of an epoch, augmented, as `samples/train`.

    `every_n_epochs`: null for the 1st, 4th, 16th... The smallest value is black, the
    largest white. Inputs that are not images are not shown.
    """

    def __init__(self, count: int = 16, every_n_epochs: int | None = None) -> None:
        self._count = check_count(count)
        self._every = check_every(every_n_epochs, "every_n_epochs")
        self._kept: tuple[Tensor, Any] | None = None

    def on_update_start(self, trainer: Trainer, micro_batches: Sequence[MicroBatch]) -> None:
        """Keep a copy of the first images, on their device."""
        state = trainer.state
        if state.position or not trainer.is_main or not is_due(state.epoch + 1, self._every):
            return
        batch = micro_batches[0].batch
        parts = batch if isinstance(batch, (tuple, list)) else (batch,)
        inputs, target = parts[0], parts[1] if len(parts) > 1 else None
        if is_picture(inputs):
            is_label = isinstance(target, Tensor) and target.ndim == 1
            labels = target[: self._count] if target is not None and is_label else None
            self._kept = inputs[: self._count].clone(), labels

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Show them at the next log line, where waiting for the device is allowed."""
        if self._kept is None:
            return
        (images, labels), self._kept = self._kept, None
        captions = [] if labels is None else _labels(trainer, labels)
        trainer.log_image("samples/train", sheet(pixels(images), captions))

    def state_dict(self) -> dict[str, Any]:
        """Return the images that wait for a log line, if there are any."""
        return {} if self._kept is None else {"kept": list(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the images that wait."""
        if "kept" in state:
            images, labels = state["kept"]
            self._kept = images, labels


class ValidationSamples(KeptSamples):
    """Show the first images of the validation with label and prediction, as `samples/val`."""

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the task predicts a class of each sample."""
        return trainer.is_main and trainer.task.output_kind == "classes"

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the first images."""
        if self._kept is None and is_picture(batch[0]):
            wanted = self._wanted
            probabilities = trainer.task.interpret(output[:wanted])
            self._kept = batch[0][:wanted].clone(), labels_of(batch[1])[:wanted], probabilities

    def show(self, trainer: Trainer) -> None:
        """Log the images."""
        if self._kept is not None:
            trainer.log_image("samples/val", _judged(trainer, *self._kept))


class Misclassified(KeptSamples):
    """Show the wrong predictions with the highest probability, as `samples/misclassified`."""

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the task predicts a class of each sample."""
        return trainer.task.output_kind == "classes"

    def start(self, trainer: Trainer) -> None:
        """Drop what was kept."""
        self._kept = []

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the worst images so far, without waiting for the device."""
        if not is_picture(batch[0]):
            return
        samples = batch[0], labels_of(batch[1]), trainer.task.interpret(output)
        self._kept.append(_worst([samples], self._wanted))
        if len(self._kept) == _PARTS:
            self._kept = [_worst(self._kept, self._wanted)]

    def show(self, trainer: Trainer) -> None:
        """Log the worst images of all processes."""
        own = [part.cpu() for part in _worst(self._kept, self._wanted)] if self._kept else None
        gathered = [kept for kept in trainer.group.gather(own) if kept is not None]
        if not gathered or not trainer.is_main:
            return
        images, labels, probabilities = _worst(gathered, self._wanted)
        if count := int((_wrongness(probabilities, labels) > 0).sum()):
            picture = _judged(trainer, images[:count], labels[:count], probabilities[:count])
            trainer.log_image("samples/misclassified", picture)


def _worst(parts: Sequence[Samples], count: int) -> Samples:
    """Return the samples that are the most surely wrong of all, in this order."""
    images, labels, probabilities = (
        torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts, strict=True)
    )
    wrongness = _wrongness(probabilities, labels)
    worst = wrongness.topk(min(count, len(labels))).indices
    return images[worst], labels[worst], probabilities[worst]


def _wrongness(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the probability of each wrong prediction; 0 for correct ones and without a label."""
    sure, predicted = probabilities.max(1)
    return sure * ((predicted != labels) & (labels >= 0))


def _judged(trainer: Trainer, images: Tensor, labels: Tensor, probabilities: Tensor) -> Any:
    names = class_names(trainer, probabilities.shape[1])
    sure, predicted = (part.tolist() for part in probabilities.max(1))
    captions, colors = [], []
    for label, answer, share in zip(labels.tolist(), predicted, sure, strict=True):
        known = 0 <= label < len(names)
        wrong = known and label != answer
        truth = f"\nis {names[label]}" if wrong else ""
        captions.append(f"{names[answer]} {share:.0%}{truth}")
        colors.append(WRONG if wrong else RIGHT if known else BLACK)
    return sheet(pixels(images), captions, colors)


def _labels(trainer: Trainer, labels: Tensor) -> list[str]:
    if labels.is_floating_point():  # values to predict
        return [f"{value:.3g}" for value in labels.tolist()]
    count = getattr(trainer.task, "num_classes", None) or 0
    names = class_names(trainer, count)
    return [names[i] if 0 <= i < len(names) else str(i) for i in labels.tolist()]
