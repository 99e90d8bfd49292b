"""Preserve the attributes of modules during a forward pass that must not change the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_OF_TORCH = frozenset(vars(nn.Module()))  # dicts of tensors, modules and hooks; the training mode


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Let a forward pass work on copies of the modules' plain attributes, then restore them.

    Whatever the pass changes (counters, caches, lists, generators) or registers (buffers) is undone
    afterwards. Objects that cannot be copied, such as a lock or an open file, are shared.
    """
    modules = list(model.modules())
    before = [(module, _contents(module)) for module in modules]
    memo: dict[int, Any] = {id(module): module for module in modules}
    memo |= {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        for module in modules:
            for name in vars(module).keys() - _OF_TORCH:
                vars(module)[name] = _copied(vars(module)[name], memo)
        yield
    finally:
        for module, contents in before:
            _put_back(module, contents)


def _contents(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return each attribute, and a copy of each of torch's own dicts."""
    return {
        name: (value, copy.copy(value) if name in _OF_TORCH and isinstance(value, dict) else None)
        for name, value in vars(module).items()
    }


def _put_back(module: nn.Module, contents: dict[str, tuple[Any, Any]]) -> None:
    vars(module).clear()
    for name, (value, items) in contents.items():
        vars(module)[name] = value
        if items is not None:  # restore in place: others may refer to this dict
            value.clear()
            value.update(items)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):  # torch cannot deep-copy non-leaf tensors
        if id(value) not in memo:
            memo[id(value)] = value.detach().clone()
        return memo[id(value)]
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a user's object may raise anything
        return value
