"""Semantic segmentation: one class for each pixel."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from regimen.trainer.errors import ModelError
from regimen.trainer.task import StepOutput
from regimen.trainer.tasks.losses import Loss
from regimen.trainer.tasks.metrics import MeanIoU
from regimen.trainer.tasks.supervised import Metrics, Scores, Shape, Supervised, pair_of


class Segmentation(Supervised):
    """Classify pixels; batches are `(images, masks)`, masks [n, H, W] of class indices.

    Pixels of `ignore_index`, which may be one of the classes, and those that the loss ignores are
    excluded from the scores and the metrics as well: the loss is the mean over all other pixels of
    an update, however it is split.
    Reports `pixel_accuracy` and `miou`, the mean intersection over union of the classes.

    aux_weight: for a network that in training returns a dict of two outputs, `out` and `aux`: the
        loss of `aux` is added, times this weight, and logged as `train/loss_aux`.
    """

    output_kind = "mask"
    score_names = ("pixel_accuracy",)

    def __init__(
        self,
        num_classes: int,
        loss: Loss | None = None,
        ignore_index: int = 255,
        metrics: Metrics | None = None,
        aux_weight: float | None = None,
    ) -> None:
        loss = loss or nn.CrossEntropyLoss(ignore_index=ignore_index)
        super().__init__(loss, metrics, ignore_index=ignore_index, miou=MeanIoU(num_classes))
        self.num_classes = num_classes
        if aux_weight is not None and not 0 < aux_weight < math.inf:
            raise ModelError("task.aux_weight", f"expected a number > 0, got {aux_weight}")
        self.aux_weight = aux_weight
        if aux_weight is not None:
            self.count_names = [*self.count_names, *map(_of_aux, self.count_names)]

    def counts(self, batch: Any) -> Mapping[str, Tensor | int]:
        """Return the denominators that depend on the labels, of both outputs alike."""
        counts = super().counts(batch)
        if self.aux_weight is None:
            return counts
        return {**counts, **{_of_aux(name): count for name, count in counts.items()}}

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute loss and scores of `(images, masks)`, and the loss of an auxiliary output.

        Raises ModelError where there is one and `aux_weight` is not given, or the reverse.
        """
        inputs, target = pair_of(batch)
        inputs = self.losses.prepare_inputs(inputs)
        output = model(inputs)
        has_aux = isinstance(output, Mapping) and {"out", "aux"} <= output.keys()
        if self.aux_weight is None:
            if has_aux:
                raise ModelError(
                    "task.aux_weight",
                    "is null, but the network returns an auxiliary output",
                    "set task.aux_weight=0.5, or build the network without it",
                )
            return self._compute(output, target, inputs, model)
        if not has_aux:
            raise ModelError(
                "task.aux_weight",
                f"is {self.aux_weight}, but the network returns no auxiliary output",
                "set it to null, or build one, as model=torchvision +model.aux_loss=true does",
            )

        result = self._compute(output["out"], target, inputs, model)
        aux = self._compute(output["aux"], target, inputs, model)
        terms = dict(result.terms)
        counts = dict(result.counts)
        for name, term in aux.terms.items():
            terms[_of_aux(name)] = term * self.aux_weight
        for name, count in aux.counts.items():
            counts[_of_aux(name)] = count
        return StepOutput(terms, counts, result.sums)

    def monitor(self) -> str:
        """Return the metric that the best checkpoint is chosen by."""
        return "miou"

    def interpret(self, output: Tensor) -> Tensor:
        """Return the predicted class of each pixel."""
        return output.argmax(1)

    def shape(self, target: Tensor) -> Shape:
        """Return [n, classes, H, W]. Raises ModelError for targets that are no masks."""
        if target.ndim < 2:
            raise ModelError(
                f"segmentation takes masks [n, H, W] of class numbers, not {list(target.shape)}: "
                "one class for each sample is task=classification"
            )
        return len(target), self.num_classes, *target.shape[1:]

    def scores(self, output: Tensor, target: Tensor) -> Scores:
        """Count the pixels that are predicted correctly."""
        return {"pixel_accuracy": self._correct(output, target)}


def _of_aux(name: str) -> str:
    """Return the name of a loss term of the auxiliary output; that of the main one may be empty."""
    return f"aux_{name}".rstrip("_")
