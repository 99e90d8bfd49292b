"""State that the model's state dict lacks: the task's modules and non-persistent buffers."""

from __future__ import annotations

import logging
import pickle
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
        self._task = {f"task.{name}.": part for name, part in task.own_modules().items()}
        self._parts = {"": model, **self._task}
        self._built = {name: _copied(buffer) for name, (*_, buffer) in self._passing()}
        self._marks = dict(self._attributes())
        self._told: set[str] = set()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return this process's state on the host; warn about attributes that changed."""
        marks = dict(self._attributes())
        moved = {name for name, mark in marks.items() if self._marks.get(name, mark) != mark}
        self._marks = marks  # a new attribute is taken for a cache until it changes
        for name in sorted(moved - self._told):
            _log.warning(
                "%s changes in training but is not a buffer: checkpoints lack it, and a resume "
                "starts from its initial value; use register_buffer to save it",
                name,
            )
        self._told |= moved
        buffers = {name: _copied(buffer) for name, (*_, buffer) in self._passing()}
        built = self._built
        buffers = {
            name: value
            for name, value in buffers.items()
            if name not in built or not torch.equal(value, built[name])
        }
        return {"buffers": buffers, "task": {n: _copied(v) for n, v in self._own_state().items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Load what `state_dict` returned; return a message for each entry that does not fit."""
        places, own = dict(self._passing()), self._own_state()
        for name, (module, key, buffer) in places.items():
            value = state["buffers"].get(name, self._built.get(name, buffer))
            if buffer.shape == value.shape:
                buffer.copy_(value)
            else:
                setattr(module, key, value.to(buffer))
        missing = [name for name in state["buffers"] if name not in places]
        for name, value in state["task"].items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)
            else:
                missing.append(name)
        return [f"the checkpoint's {name} is not in this run" for name in missing]

    def _own_state(self) -> dict[str, Tensor]:
        states = {root: part.state_dict(keep_vars=True) for root, part in self._task.items()}
        named = {
            root + name: value for root, part in states.items() for name, value in part.items()
        }
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def _passing(self) -> Iterator[tuple[str, tuple[nn.Module, str, Tensor]]]:
        """Yield the non-persistent buffers by name: those that a state dict lacks."""
        for root, part in self._parts.items():
            saved = part.state_dict()
            for name, buffer in part.named_buffers():
                if name not in saved:
                    owner, _, key = name.rpartition(".")
                    yield root + name, (part.get_submodule(owner), key, buffer)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield a mark for each plain attribute, which changes when the attribute does."""
        for root, part in self._parts.items():
            for name, module in part.named_modules():
                for key, value in vars(module).items():
                    if key != "training" and (mark := _mark(value)) is not None:
                        yield f"{root}{name}.{key}" if name else f"{root}{key}", mark


def _mark(value: Any) -> Any:
    """Return a value that changes when `value` does; None if it is not state."""
    match value:
        case int() | float() | complex():
            return repr(value)  # NaN equals itself
        case Tensor():
            return id(value), value._version
        case torch.Generator():
            return value.get_state().numpy().tobytes()
        case random.Random() | np.random.Generator() | np.random.RandomState():
            return pickle.dumps(value)
        case list() | deque():
            return len(value)
    return None


def _copied(value: Tensor) -> Tensor:
    return value.detach().cpu().clone()
