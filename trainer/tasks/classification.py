"""One label out of several for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainer.errors import ModelError, SampleError
from trainer.losses import Losses
from trainer.task import Metric, StepOutput, Task


class Classification(Task):
    """Classify; batches are `(inputs, labels)`, labels [n] as indices or [n, classes] as shares.

    Inputs of five dimensions [n, crops, C, H, W] are answered by the mean over the crops.
    """

    def __init__(
        self,
        num_classes: int,
        loss: nn.Module | Mapping[str, nn.Module] | None = None,
        top_k: Sequence[int] = (1,),
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.num_classes = num_classes
        self.losses = Losses.of(loss or nn.CrossEntropyLoss())
        self.count_names = self.losses.count_names
        self._top_k = [k for k in top_k if k <= num_classes]
        self._metrics = dict(metrics or {})

    def metric_names(self) -> list[str]:
        """Name what an evaluation gives."""
        terms = [] if self.losses.single else [f"loss_{name}" for name in self.losses.terms]
        return ["loss", *terms, *(_accuracy(k) for k in self._top_k), *self._metrics]

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics with a state of their own."""
        return self._metrics

    def counts(self, batch: Any) -> dict[str, Tensor]:
        """Return the denominators that depend on the labels."""
        return self.losses.counts(batch[1])

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute loss and accuracy of `(inputs, labels)`."""
        inputs, labels = batch
        return self._output(model(inputs), labels)

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute loss and metrics of `(inputs, labels)`."""
        labels = batch[1]
        logits = self.prediction_step(model, batch)
        for metric in self._metrics.values():
            metric.update(logits, labels)
        return self._output(logits, labels)

    def prediction_step(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the logits [n, classes]."""
        inputs: Tensor = batch[0] if isinstance(batch, (tuple, list)) else batch
        if inputs.ndim != 5:
            logits: Tensor = model(inputs)
            return logits
        crops: Tensor = model(inputs.flatten(0, 1))
        return crops.view(*inputs.shape[:2], -1).mean(1)

    def _output(self, logits: Tensor, labels: Tensor) -> StepOutput:
        if logits.ndim != 2 or logits.shape[1] != self.num_classes:
            raise ModelError(
                f"the model's output has shape {list(logits.shape)}, but {self.num_classes} "
                f"classes ask for [{len(labels)}, {self.num_classes}]: set model.num_classes to "
                f"data.num_classes={self.num_classes}"
            )
        try:
            loss, counts = self.losses(logits, labels)
        except IndexError as error:  # torch's "Target 7 is out of bounds"
            raise SampleError(
                f"labels from {int(labels.min())} to {int(labels.max())}, but data.num_classes="
                f"{self.num_classes}: labels are counted from 0"
            ) from error
        hits = labels.argmax(1) if labels.is_floating_point() else labels
        return StepOutput(loss, counts, {_accuracy(k): _hits(logits, hits, k) for k in self._top_k})


def _accuracy(k: int) -> str:
    return "accuracy" if k == 1 else f"accuracy_top{k}"


def _hits(logits: Tensor, labels: Tensor, k: int) -> tuple[Tensor, int]:
    if k == 1:
        return (logits.detach().argmax(1) == labels).sum(), len(labels)
    best = logits.detach().topk(k, dim=1).indices
    return (best == labels[:, None]).any(1).sum(), len(labels)
