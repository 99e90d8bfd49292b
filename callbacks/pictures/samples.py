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

_RIGHT, _WRONG, _UNKNOWN = (0, 120, 0), (190, 0, 0), (0, 0, 0)  # colors of captions


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
        state, batch = trainer.state, micro_batches[0].batch
        if state.position or not trainer.is_main or not is_due(state.epoch + 1, self._every):
            return
        inputs, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
        if is_picture(inputs):
            labels = [t for t in others[:1] if isinstance(t, Tensor) and t.ndim == 1]
            self.kept = [part[: self._count].clone() for part in (inputs, *labels)]

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Show them at the next log line, where waiting for the device is allowed."""
        if not self.kept:
            return
        (images, *labels), self.kept = self.kept, []
        count = getattr(trainer.task, "num_classes", None) or 0
        names = dict(enumerate(class_names(trainer, count)))
        captions = [names.get(x, str(x)) for part in labels for x in part.tolist()]
        trainer.log_image("samples/train", sheet(images, captions))


class ValidationSamples(ValidationPicture):
    """Show the first images of the validation with label and prediction, as `samples/val`."""

    kinds: tuple[str, ...] = ("classes",)

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the first images."""
        if not self.kept and is_picture(batch[0]):
            images, target, answers = (part[: self.wanted] for part in (*batch[:2], output))
            labels = labels_of(trainer, target).clone()
            self.kept = [(images.clone(), labels, trainer.task.interpret(answers))]

    def show(self, trainer: Trainer, *parts: Tensor) -> None:
        """Log the images."""
        trainer.log_image("samples/val", _judged(trainer, *parts))


class Misclassified(ValidationPicture):
    """Show the wrong predictions with the highest probability, as `samples/misclassified`."""

    kinds = ("classes",)
    on_main_only = False

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the worst images so far, without waiting for the device."""
        if is_picture(batch[0]):
            samples = batch[0], labels_of(trainer, batch[1]), trainer.task.interpret(output)
            found = [torch.cat(parts) for parts in zip(*self.kept, samples, strict=True)]
            self.kept = [self._worst(*found)]

    def show(self, trainer: Trainer, *parts: Tensor) -> None:
        """Log the worst images of all processes."""
        images, labels, answers = self._worst(*parts)
        if count := int((_wrongness(labels, answers) > 0).sum()):
            picture = _judged(trainer, images[:count], labels[:count], answers[:count])
            trainer.log_image("samples/misclassified", picture)

    def _worst(self, images: Tensor, labels: Tensor, answers: Tensor) -> Sequence[Tensor]:
        worst = _wrongness(labels, answers).topk(min(self.wanted, len(labels))).indices
        return images[worst], labels[worst], answers[worst]


def _wrongness(labels: Tensor, answers: Tensor) -> Tensor:
    """Return the probability of each wrong prediction; 0 for correct ones and without a label."""
    sure, predicted = answers.max(1)
    return sure * ((predicted != labels) & (labels >= 0))


def _judged(trainer: Trainer, images: Tensor, labels: Tensor, answers: Tensor) -> Any:
    names = class_names(trainer, answers.shape[1])
    sure, predicted = (part.tolist() for part in answers.max(1))
    captions, colors = [], []
    for label, answer, share in zip(labels.tolist(), predicted, sure, strict=True):
        known = 0 <= label < len(names)
        wrong = known and label != answer
        captions.append(f"{names[answer]} {share:.0%}" + f"\nis {names[label]}" * wrong)
        colors.append(_WRONG if wrong else _RIGHT if known else _UNKNOWN)
    return sheet(images, captions, colors)
