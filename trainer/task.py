"""The interface of tasks: what a step computes, its loss and the sums for metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from trainer.nested import in_format


class Metric(Protocol):
    """A metric that keeps a state, such as a class of torchmetrics.

    The metrics of torchmetrics synchronize over processes by themselves. With several processes any
    other metric needs either `merge(reduce)`, which replaces its state by that of all processes
    (`reduce` returns the sum of a tensor over them), or `merge_state(others)`, which adds the state
    of the metrics of the other processes.
    """

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch to the state."""

    def compute(self) -> Any:
        """Return the value over all batches since `reset`."""

    def reset(self) -> None:
        """Reset the state."""


class _Sum:
    """Marks a loss term as a sum over the samples, which is not divided by a denominator."""


SUM: Final = _Sum()


@dataclass(slots=True)
class StepOutput:
    """The results of one micro-batch.

    `loss`: a scalar, the mean over the samples of the micro-batch, or one value for each sample; or
    a dict of such terms by name, which are added.
    `counts`: the denominators of terms whose mean is not over the samples (but over tokens, or with
    class weights): the part of this micro-batch, as `Task.counts` returns it; or `SUM` for a sum
    over the samples, which is logged divided by their number.
    `sums`: for each metric the sum over the micro-batch and the number of summands.
    """

    loss: Tensor | Mapping[str, Tensor]
    counts: Mapping[str, Tensor | float | _Sum] = field(default_factory=dict)
    sums: Mapping[str, tuple[Tensor, Tensor | int]] = field(default_factory=dict)


class Task:
    """Base class of tasks: the loss and the metrics that a model is trained with.

    The model is an argument of every step, so that a task never holds a wrapped model (DDP,
    compiled).
    """

    # Names of the optimizers that take turns on each update's batch (for example those of a GAN),
    # each with its own loss. Empty: all step together on one loss.
    turns: Sequence[str] = ()
    # Names of the loss terms whose denominators depend on the data; `counts` returns these.
    count_names: Sequence[str] = ()
    # The kind of values that `interpret` returns: "classes" (probabilities [n, classes]),
    # "labels" (probabilities [n, labels]), "values" ([n] or [n, outputs]), "mask" (class indices
    # [n, H, W]), "text" (logits of the next token, [n, vocabulary, length]), or "array" (anything
    # else).
    output_kind: str = "array"

    def metric_names(self) -> Sequence[str]:
        """Return the names of the metrics of an evaluation, without the stage: `loss`, ..."""
        return ["loss"]

    def monitor(self) -> str | None:
        """Return the metric that the best checkpoint is chosen by; None if there is none.

        Callbacks use it where their `monitor` is `auto`.
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

        The denominator of an update is the sum over all its micro-batches and devices, so it must
        be known before the first backward pass.
        """
        return {}

    def own_modules(self) -> Mapping[str, nn.Module]:
        """Return the modules of the task by name, such as losses and teachers.

        The default is all attributes that are modules. Their trainable parameters are trained under
        the name `task.<name>.<parameter>`, and their state is saved.
        """
        return {name: part for name, part in vars(self).items() if isinstance(part, nn.Module)}

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics that keep a state; `evaluation_step` updates them."""
        return {}

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Move modules and metrics to the device of the batches, and modules to `dtype`."""
        for module in self.own_modules().values():
            (module if dtype is None else in_format(module, dtype)).to(device)
        for metric in self.metrics().values():
            if hasattr(metric, "to"):
                metric.to(device)

    def prediction_step(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output for a batch."""
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        return model(inputs)

    def interpret(self, output: Any) -> Any:
        """Convert the result of `prediction_step` to the values that `output_kind` describes."""
        return output


def named_modules(task: Task) -> dict[str, nn.Module]:
    """Return a task's own modules by the prefix of their parameters' names (`task.loss`)."""
    return {f"task.{name}": module for name, module in task.own_modules().items()}
