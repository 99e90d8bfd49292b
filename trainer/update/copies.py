"""Copies of what an update changes before it is known to be finite, to be restored."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim import Optimizer

_OF_WORDS = (torch.float32, torch.float64, torch.int32, torch.int64)
_same_memory = torch._C._is_alias_of  # type: ignore[attr-defined]
_Owner = dict[str, Tensor | None]  # the buffers of one module


class Backup:
    """The buffers of modules, and optimizers that step early, as they were before an update.

    A forward pass writes to buffers (BatchNorm's statistics), or replaces them
    (`self.centre = new`), before a NaN is detected. The same tensors stay the buffers throughout a
    run: averages and wrappers refer to them.
    """

    def __init__(self, parts: Iterable[nn.Module], early: Sequence[Optimizer] = ()) -> None:
        self._owners = [m._buffers for part in parts for m in part.modules() if m._buffers]
        self._early = early
        self._copies = Copies()
        self._kept: list[tuple[_Owner, str, Tensor]] = []
        self._states: list[dict[Any, Any]] = []  # of each early optimizer
        self._look()

    def _look(self) -> None:
        self._seen = _buffers(self._owners)
        self._held = list(_moving(self._owners))

    def settle(self) -> None:
        """Make the known tensors the buffers again, with the values of the assigned ones.

        A buffer of another shape or dtype than before replaces the known one.
        """
        if not self._owners:
            return
        now = _buffers(self._owners)
        if len(now) == len(self._seen) and all(map(is_, now, self._seen)):
            return
        with torch.no_grad():
            for owner, name, known in self._held:
                new = owner.get(name)
                if new is not None and new is not known and _kind(new) == _kind(known):
                    known.copy_(new)
                    owner[name] = known
        self._look()

    def take(self, unless: Tensor | None = None) -> None:
        """Copy everything, unless the boolean `unless` is true on the device."""
        self.settle()  # buffers assigned since the last update, as by an evaluation
        if not self._held and not self._early:
            return
        states = [{k: _structure(s) for k, s in o.state.items()} for o in self._early]
        tensors = [*(b for _, _, b in self._held), *_parameters(self._early), *_tensors(states)]
        tensors = [own_part(t) for t in tensors]
        # State that the last update created has no copy yet: the host checks for it.
        if unless is not None and not self._copies.fit(tensors) and unless.item():
            return
        self._kept, self._states = self._held, states
        self._copies.take(tensors, unless)

    def restore(self) -> None:
        """Restore everything; state that did not exist is dropped."""
        for owner, name, buffer in self._kept:
            owner[name] = buffer
        self._look()
        self._copies.restore()
        for optimizer, states in zip(self._early, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update({k: _structure(s) for k, s in states.items()})


class Copies:
    """Copies of tensors, made by few kernels: one flat tensor for each device and group of dtypes.

    Tensors of 4 or 8 bytes an element are copied as words, whatever their dtype.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._parts: list[Tensor] = []  # the tensors, or views of their words
        self._groups: list[list[Tensor]] = []  # the same by device and dtype
        self._flat: list[Tensor] = []

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the devices, dtypes and shapes are those of the tensors copied before."""
        known = self._tensors
        return len(tensors) == len(known) and all(
            a is b or _kind(a) == _kind(b) for a, b in zip(tensors, known, strict=True)
        )

    @torch.no_grad()
    def take(self, tensors: list[Tensor], unless: Tensor | None = None) -> None:
        """Copy, unless the boolean `unless` is true on the device: former copies are then kept."""
        former = self._flat if self.fit(tensors) else []
        if not self._knows(tensors):
            self._tensors, self._parts = tensors, [_words(t) for t in tensors]
            self._groups = list(_by_type(self._parts))
        self._flat = [_flat(group) for group in self._groups]
        if unless is not None and former:
            stays = {device: unless.to(device) for device in {f.device for f in former}}
            pairs = zip(former, self._flat, strict=True)
            self._flat = [torch.where(stays[then.device], then, now) for then, now in pairs]

    def _knows(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these tensors were copied last, and still have the same memory."""
        return (
            len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and all(map(_same_memory, tensors, self._parts))
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back to the tensors that were copied last."""
        for group, flat in zip(self._groups, self._flat, strict=True):
            values = _unflatten_dense_tensors(flat, group)  # type: ignore[no-untyped-call]
            torch._foreach_copy_(group, list(values))


def _flat(group: Sequence[Tensor]) -> Tensor:
    flat: Tensor = _flatten_dense_tensors(group)  # type: ignore[no-untyped-call]
    return flat if len(group) > 1 else flat.clone()  # of a single tensor it is a view


def _words(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's memory as integers of 4 bytes; itself where there is none."""
    if tensor.dtype not in _OF_WORDS or not tensor.is_contiguous():
        return tensor
    return tensor.detach().view(-1).view(torch.int32)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _by_type(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    def key(tensor: Tensor) -> tuple[str, str]:
        return str(tensor.device), str(tensor.dtype)

    for _, members in groupby(sorted(tensors, key=key), key=key):
        yield list(members)


def _buffers(owners: Iterable[_Owner]) -> list[Tensor | None]:
    return [buffer for owner in owners for buffer in owner.values()]


def _moving(owners: Iterable[_Owner]) -> Iterator[tuple[_Owner, str, Tensor]]:
    for owner in owners:
        for name, b in owner.items():
            # Sparse ones (a graph, say) are constants; they have no flat copy.
            if b is not None and b.numel() and b.layout is torch.strided:
                yield owner, name, b


def _structure(values: Any) -> Any:
    """Return one parameter's state: its tensors themselves, copies of all other values."""
    if not isinstance(values, Mapping):
        return copy.deepcopy(values)
    return {k: v if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in values.items()}


def _tensors(states: Iterable[Mapping[Any, Any]]) -> Iterator[Tensor]:
    for state in states:
        for values in state.values():
            if isinstance(values, Mapping):
                yield from (v for v in values.values() if isinstance(v, Tensor))


def _parameters(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor; other tensors unchanged."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
