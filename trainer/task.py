"""What one step computes: the loss to descend and the sums that metrics are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from trainer.nested import in_format


class Metric(Protocol):
    """A metric with a state of its own; torchmetrics' classes are such, and meet by themselves.

    With several processes any other has either `merge(reduce)`, which replaces its state by that
    of all processes (`reduce` returns the sum of a tensor over them), or `merge_state(others)`,
    which takes in the metrics of the other processes.
    """

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take in a batch."""

    def compute(self) -> Any:
        """Return the value over all batches since `reset`."""

    def reset(self) -> None:
        """Forget all batches."""


class _Sum:
    """Mark a loss term as a sum over the samples: it is divided by nothing."""


SUM: Final = _Sum()


@dataclass(slots=True)
class StepOutput:
    """Carry one micro-batch's results.

    `loss`: the mean over the micro-batch's samples, a scalar, or one value for each sample; or
    such terms by name, which are added up.
    `counts`: for a term whose mean has another denominator than the number of samples (tokens,
    class weights): this micro-batch's part of it, the same that `Task.counts` gives, or `SUM` for
    a sum over the samples: what is logged of it is the sum divided by their number.
    `sums`: for each metric the sum over the micro-batch and the number of things summed.
    """

    loss: Tensor | Mapping[str, Tensor]
    counts: Mapping[str, Tensor | float | _Sum] = field(default_factory=dict)
    sums: Mapping[str, tuple[Tensor, Tensor | int]] = field(default_factory=dict)


class Task:
    """Say what a model is trained for.

    The model is an argument of every step, so that wrapped models (DDP, compiled) never leak in.
    """

    # Optimizers that take turns on each update's batch, by name (a GAN's, say), each with a loss
    # of its own; empty: all step together on one loss.
    turns: Sequence[str] = ()
    # Loss terms whose denominators depend on the data: `counts` gives them.
    count_names: Sequence[str] = ()
    # What `interpret` returns, for who shows predictions: "classes" (probabilities [n, classes]),
    # "labels" (probabilities [n, labels]), "values" ([n] or [n, outputs]), "mask" (class numbers
    # [n, H, W]), or "array", of which nothing is known.
    output_kind: str = "array"

    def metric_names(self) -> Sequence[str]:
        """Name the metrics that an evaluation gives, without the stage: `loss`, `accuracy`."""
        return ["loss"]

    def monitor(self) -> str | None:
        """Name the metric that tells a better model from a worse one; None: no metric does.

        It decides where a callback's `monitor` is `auto`.
        """
        return "accuracy" if "accuracy" in self.metric_names() else "loss"

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute the loss of a micro-batch."""
        raise TypeError(f"{type(self).__name__} defines no training_step")

    def turn_step(self, model: nn.Module, batch: Any, turn: str) -> StepOutput:
        """Compute the loss of a micro-batch for the optimizer whose turn it is."""
        raise TypeError(f"{type(self).__name__} has turns but no turn_step")

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute loss and metrics without gradients."""
        return self.training_step(model, batch)

    def counts(self, batch: Any) -> Mapping[str, Tensor | float]:
        """Return this batch's part of the denominators of `count_names`, on the host if known.

        An update's denominator is the sum over all its micro-batches and devices, so it must be
        known before the first of them is differentiated.
        """
        return {}

    def own_modules(self) -> Mapping[str, nn.Module]:
        """Return the modules that are the task's and not the model's, by name: losses, teachers.

        Their trainable parameters are trained, as `task.<name>.<parameter>`, and their state is
        saved. These are the task's attributes that are modules.
        """
        return {name: part for name, part in vars(self).items() if isinstance(part, nn.Module)}

    def metrics(self) -> Mapping[str, Metric]:
        """Return metrics with a state of their own; `evaluation_step` updates them."""
        return {}

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Move what the task holds to where the batches are; `dtype`: of the run's numbers."""
        for module in self.own_modules().values():
            (module if dtype is None else in_format(module, dtype)).to(device)
        for metric in self.metrics().values():
            if hasattr(metric, "to"):
                metric.to(device)

    def prediction_step(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's answer for a batch."""
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        return model(inputs)

    def interpret(self, output: Any) -> Any:
        """Turn what `prediction_step` returned into what `output_kind` says."""
        return output


def named_modules(task: Task) -> dict[str, nn.Module]:
    """Return a task's own modules by the names that precede their parameters' (`task.loss`)."""
    return {f"task.{name}": module for name, module in task.own_modules().items()}
