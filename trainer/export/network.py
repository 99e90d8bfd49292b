"""The network to export, with or without the preprocessing that can be part of a graph."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from data.transforms import Pipeline, Standardize, ToFloat
from trainer.errors import ModelError
from trainer.task import Task

Preprocessing = Literal["outside", "inside"]


class ToUnitRange(nn.Module):
    """Turn bytes into floats from 0 to 1; leave floats as they are."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to the same shape."""
        return x if x.is_floating_point() else x.to(torch.float32) / 255


class Normalize(nn.Module):
    """Subtract the mean and divide by the standard deviation, channel by channel."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to the same shape."""
        return (x - self.mean) / self.std


class Network(nn.Module):
    """A model as its task calls it, after `steps` and, if asked for, before `interpret`."""

    def __init__(self, model: nn.Module, task: Task, steps: nn.Module, interprets: bool) -> None:
        super().__init__()
        self.steps = steps
        self.model = model
        self._task = task
        self._interprets = interprets

    def with_model(self, model: nn.Module) -> Network:
        """Return the same around another model."""
        return Network(model, self._task, self.steps, self._interprets)

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch of inputs to outputs (logits), or to their interpretation by the task."""
        output = self._task.prediction_step(self.model, self.steps(x))
        return self._task.interpret(output) if self._interprets else output  # type: ignore[no-any-return]


def build_network(
    model: nn.Module, task: Task, pipeline: Pipeline, preprocessing: Preprocessing
) -> tuple[Network, list[str]]:
    """Return the network to export, and the names of the transforms that callers must apply.

    `inside`: bytes in, interpreted outputs (probabilities) out; it has the transforms after the
    last one that changes sizes. `outside`: floats in, outputs (logits) out. Raises ModelError for a
    transform after that one which cannot be part of a graph.
    """
    names = list(pipeline.steps)
    if preprocessing == "outside":
        return Network(model, task, nn.Sequential(), interprets=False), names
    inside: list[nn.Module] = []
    while names and (module := _as_module(pipeline.steps[names[-1]])) is not None:
        inside.insert(0, module)
        names.pop()
    if not inside or not isinstance(inside[0], ToUnitRange):
        last = f"transforms.eval.{names[-1]}" if names else "transforms.eval"
        raise ModelError(
            f"{last} cannot be part of a graph that takes bytes: only data.transforms.ToFloat and "
            "Standardize at the end of the transforms can; use preprocessing=outside"
        )
    return Network(model, task, nn.Sequential(*inside), interprets=True), names


def _as_module(step: Any) -> nn.Module | None:
    if isinstance(step, ToFloat):
        return ToUnitRange()
    if isinstance(step, Standardize):
        like = torch.zeros(1)
        return Normalize(step.mean.beside(like).clone(), step.std.beside(like).clone())
    return None
