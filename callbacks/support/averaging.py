"""A running average of a model's weights, and the exchange of the two for an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.update.copies import own_part


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
                value = self._loaded.get(name, tensor.detach())
                averages[id(tensor)] = average = _placed(value, tensor)
                follow = id(tensor) in parameters or self._use_buffers
                moves = follow and (tensor.is_floating_point() or tensor.is_complex())
                (self._averaged if moves else self._copied).append((average, tensor))
            self._tensors[name] = averages[id(tensor)]
        self._loaded = {}

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Move towards the model."""
        torch._foreach_lerp_(*_columns(self._averaged), weight)
        if self._copied:
            torch._foreach_copy_(*_columns(self._copied))

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
        """Return the average in the form of the model's own state, in parts where that is."""
        return dict(self._tensors or self._loaded)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over an average; one under way takes its values, else `begin` does."""
        if self._tensors:
            pairs = [(state[name], average) for name, average in self._tensors.items()]
            _copy([(_placed(value, average), average) for value, average in pairs])
        else:
            self._loaded = dict(state)


def _columns(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [own_part(average) for average, _ in pairs], [own_part(model) for _, model in pairs]


def _placed(value: Tensor, like: Any) -> Tensor:
    """Return a copy of `value` where, and in the parts in which, `like` is."""
    if not hasattr(like, "full_tensor") or hasattr(value, "full_tensor"):
        return value.to(like, copy=True)
    from torch.distributed.tensor import distribute_tensor  # 2 s, unless there is one anyway

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the first of each pair into the second."""
    for source, target in pairs:
        target.copy_(source)
