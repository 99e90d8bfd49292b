"""A running average of a model's weights, and the exchange of the two for an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Keep `average += weight * (model - average)` over a model's parameters.

    Buffers of floating point (BatchNorm's statistics) are averaged alike where `use_buffers`, and
    else are the model's own, as counts always are. This is what torch's `AveragedModel` computes;
    that one asks the device for its counter at every update, here the host never waits.
    """

    def __init__(self, use_buffers: bool = True) -> None:
        self._use_buffers = use_buffers
        self._loaded: Mapping[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}  # the average, by name; empty before `begin`
        self._averaged: list[tuple[Tensor, Tensor]] = []  # pairs of average and model
        self._copied: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Start from a loaded average, or else from the model's weights; once."""
        if self._tensors:
            return
        parameters = {id(p) for p in model.parameters()}
        averages: dict[int, Tensor] = {}  # tied weights have several names and one average
        for name, tensor in _state(model).items():
            if id(tensor) not in averages:
                average = self._loaded.get(name, tensor).to(tensor, copy=True)
                averages[id(tensor)] = average
                follow = id(tensor) in parameters or self._use_buffers
                moves = follow and tensor.is_floating_point()
                (self._averaged if moves else self._copied).append((average, tensor))
            self._tensors[name] = averages[id(tensor)]
        self._loaded = {}

    @torch.no_grad()
    def update(self, weight: float | Tensor) -> None:
        """Move towards the model; a `weight` of 0 on the device changes nothing."""
        averages, current = [a for a, _ in self._averaged], [m for _, m in self._averaged]
        if isinstance(weight, Tensor):
            steps = torch._foreach_sub(current, averages)
            torch._foreach_mul_(steps, weight)
            torch._foreach_add_(averages, steps)
        else:
            torch._foreach_lerp_(averages, current, weight)
        if self._copied:
            torch._foreach_copy_([a for a, _ in self._copied], [m for _, m in self._copied])

    def take_buffers(self) -> None:
        """Take the model's buffers as they are."""
        _copy([(model, average) for average, model in self._copied])

    @contextmanager
    def exchanged(self, model: nn.Module) -> Iterator[None]:
        """Give the model the average while the context lasts; without one, leave it alone.

        Values move, tensors stay: wrappers, compiled graphs and optimizers hold the same ones.
        """
        if self._loaded:
            self.begin(model)
        pairs = self._averaged + self._copied
        kept = [model.detach().clone() for _, model in pairs]
        _copy([(average, model) for average, model in pairs])
        try:
            yield
        finally:
            _copy([(value, model) for value, (_, model) in zip(kept, pairs, strict=True)])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average, in the form of the model's own state."""
        return dict(self._tensors) or dict(self._loaded)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over an average; one under way takes its values, else `begin` does."""
        if self._tensors:
            _copy([(state[name], average) for name, average in self._tensors.items()])
        else:
            self._loaded = dict(state)


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the first of each pair into the second."""
    for source, target in pairs:
        target.copy_(source)
