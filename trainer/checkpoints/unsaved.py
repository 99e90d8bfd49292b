"""State that the model's state dict lacks: the task's modules and non-persistent buffers."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.task import Task

_log = logging.getLogger(__name__)


class Unsaved:
    """Save state that the model's state dict lacks, and name what cannot be saved.

    Saved are the state of the task's own modules (the weights of a loss, moving centres), and
    buffers with `persistent=False` that differ from their initial value: constants, such as masks,
    are not saved. Plain attributes (numbers, tensors, generators) are not saved; those that change
    are named once in the log.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        self._task = dict(task.own_modules())
        self._parts = {"": model, **{f"task.{name}": part for name, part in self._task.items()}}
        self._built = {name: b.detach().cpu().clone() for name, (_, _, b) in self._passing()}
        self._marks = dict(self._attributes())
        self._told: set[str] = set()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return this process's state on the host; warn about attributes that changed."""
        self._warn()
        buffers = {
            name: b.detach().cpu().clone()
            for name, (_, _, b) in self._passing()
            if not _same(b.detach().cpu(), self._built.get(name))
        }
        task = {
            f"{part}.{name}": value.detach().cpu().clone()
            for part, module in self._task.items()
            for name, value in module.state_dict().items()
            if isinstance(value, Tensor)
        }
        return {"buffers": buffers, "task": task}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Load what `state_dict` returned; return a message for each entry that does not fit."""
        places = dict(self._passing())
        missing = [name for name in state["buffers"] if name not in places]
        for name, (owner, key, buffer) in places.items():
            value = state["buffers"].get(name, self._built.get(name, buffer))
            if buffer.shape == value.shape:
                buffer.copy_(value)
            else:
                owner._buffers[key] = value.to(buffer)
        missing += self._load_task(state["task"])
        return [f"the checkpoint's {name} is not in this run" for name in missing]

    def _load_task(self, found: Mapping[str, Tensor]) -> list[str]:
        """Load the state of the task's modules; return the names that do not fit."""
        own = {
            f"{part}.{name}": value
            for part, module in self._task.items()
            for name, value in module.state_dict(keep_vars=True).items()
        }
        fits = {n: v for n, v in found.items() if n in own and own[n].shape == v.shape}
        for name, value in fits.items():
            own[name].copy_(value)
        return [f"task.{name}" for name in found if name not in fits]

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for root, part in self._parts.items():
            for name, module in part.named_modules():
                yield ".".join(word for word in (root, name) if word), module

    def _passing(self) -> Iterator[tuple[str, tuple[nn.Module, str, Tensor]]]:
        """Yield the non-persistent buffers, by name."""
        for prefix, module in self._modules():
            for key in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers.get(key)
                if buffer is not None:
                    yield f"{prefix}.{key}" if prefix else key, (module, key, buffer)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield a mark for each plain attribute, which changes when the attribute does."""
        for prefix, module in self._modules():
            for key, value in vars(module).items():
                if key not in _TORCHS and (mark := _mark(value)) is not None:
                    yield f"{prefix}.{key}" if prefix else key, mark

    def _warn(self) -> None:
        marks = dict(self._attributes())
        moved = [name for name, mark in marks.items() if self._marks.get(name, mark) != mark]
        self._marks = marks  # a new attribute is taken for a cache until it changes
        for name in moved:
            if name not in self._told:
                self._told.add(name)
                _log.warning(
                    "%s changes in training but is not a buffer: checkpoints lack it, and a resume "
                    "starts from its initial value; use register_buffer to save it",
                    name,
                )


_TORCHS = frozenset({"training", "_parameters", "_buffers", "_modules"})


def _mark(value: Any) -> Any:
    """Return a value that changes when `value` does; None if it is not state."""
    if isinstance(value, int | float | complex):
        return value if value == value else "nan"
    if isinstance(value, Tensor):
        return (id(value), value._version)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, list | deque) and not isinstance(value, nn.Module):
        return len(value)
    return None


def _same(value: Tensor, built: Tensor | None) -> bool:
    return built is not None and value.shape == built.shape and bool(torch.equal(value, built))
