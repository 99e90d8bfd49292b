"""A running average of a model's weights, which can be swapped into the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.update.copies import own_part


class WeightAverage:
    """Keep `average += weight * (model - average)` over a model's parameters.

    Floating-point buffers (BatchNorm's statistics) are averaged as well if `use_buffers`, and
    copied otherwise, as integer buffers always are. torch's `AveragedModel` computes the same, but
    reads its counter from the device at every update; here the host never waits.
    """

    def __init__(self, use_buffers: bool = True) -> None:
        self._use_buffers = use_buffers
        self._loaded: Mapping[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}  # the average, by name; empty before `begin`
        self._averaged: list[tuple[Tensor, Tensor]] = []  # pairs of average and model
        self._copied: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Start from a loaded average or from the model's weights; later calls do nothing."""
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
        """Move the average towards the model's weights by a factor of `weight`."""
        torch._foreach_lerp_(*_columns(self._averaged), weight)
        if self._copied:
            torch._foreach_copy_(*_columns(self._copied))

    def take_buffers(self) -> None:
        """Copy the model's buffers that are not averaged."""
        _copy([(model, average) for average, model in self._copied])

    @contextmanager
    def exchanged(self, model: nn.Module) -> Iterator[None]:
        """Copy the average into the model within the context; do nothing without an average.

        The tensors of the model stay the same objects, which wrappers, compiled graphs and
        optimizers refer to.
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
        """Return the average as a state dict of the model, sharded as the model is."""
        return dict(self._tensors or self._loaded)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load an average: into the current one, or to be used by `begin`."""
        if self._tensors:
            pairs = [(state[name], average) for name, average in self._tensors.items()]
            _copy([(_placed(value, average), average) for value, average in pairs])
        else:
            self._loaded = dict(state)


def _columns(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [own_part(average) for average, _ in pairs], [own_part(model) for _, model in pairs]


def _placed(value: Tensor, like: Any) -> Tensor:
    """Return a copy of `value` with the device and the sharding of `like`."""
    if not hasattr(like, "full_tensor") or hasattr(value, "full_tensor"):
        return value.to(like, copy=True)
    from torch.distributed.tensor import distribute_tensor  # an import of 2 s

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the first of each pair into the second."""
    for source, target in pairs:
        target.copy_(source)
