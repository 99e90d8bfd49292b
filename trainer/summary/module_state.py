"""What modules hold beside parameters and buffers, lent to a pass that shall leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_OF_TORCH = frozenset(vars(nn.Module()))  # dicts of tensors, modules and hooks; the training mode


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Let a forward pass work on copies of the modules' plain attributes; put back what was there.

    Counters, caches, lists, generators: whatever the pass changes or sets, also buffers that it
    registers, is gone afterwards. Shared with the outside stays what cannot be copied (a lock, an
    open file).
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
    """Return each attribute, and of torch's own dicts what is in them."""
    return {
        name: (value, copy.copy(value) if name in _OF_TORCH and isinstance(value, dict) else None)
        for name, value in vars(module).items()
    }


def _put_back(module: nn.Module, contents: dict[str, tuple[Any, Any]]) -> None:
    vars(module).clear()
    for name, (value, items) in contents.items():
        vars(module)[name] = value
        if items is not None:  # the very dict: others may hold it
            value.clear()
            value.update(items)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):  # torch copies no tensor that was computed
        if id(value) not in memo:
            memo[id(value)] = value.detach().clone()
        return memo[id(value)]
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever a user's object may say to that
        return value
