"""From `data.fold` and `data.folds` to the data sets that share their samples out in folds."""

import inspect
from collections.abc import Iterator
from typing import Any

from conf.errors import Problem
from conf.schema import Config
from trainer.targets.allow_list import TargetError, locate

_SHARED = ("train", "val")  # the test set stays as it is
_WORDS = {"fold", "folds"}


def in_folds(config: Config, split: str, node: dict[str, Any]) -> dict[str, Any]:
    """Return a data set's node, in which every target that takes folds is given them."""
    given = {"fold": config.data.fold, "folds": config.data.folds}
    if config.data.folds is None or split not in _SHARED:
        return node
    result: dict[str, Any] = _with(node, given)
    return result


def fold_problems(config: Config) -> Iterator[Problem]:
    """Name the data sets that cannot be shared out, where folds are asked for."""
    if config.data.folds is None:
        return
    for split in _SHARED:
        node = getattr(config.data, split)
        if node is None:
            message = f"data.{split} is null: folds are shared out over train and val"
            yield Problem("data.folds", message)
        elif in_folds(config, split, node) == node:
            message = f"data.{split}: {node['_target_']} has no folds"
            hint = "a data set has, whose target takes `fold` and `folds` (data.splits.fold_of)"
            yield Problem("data.folds", message, hint)


def _with(node: Any, given: dict[str, int | None]) -> Any:
    if isinstance(node, list):
        return [_with(value, given) for value in node]
    if not isinstance(node, dict):
        return node
    inner = {name: _with(value, given) for name, value in node.items()}
    return {**given, **inner} if _takes_folds(node.get("_target_")) else inner


def _takes_folds(target: Any) -> bool:
    if not isinstance(target, str):
        return False
    try:
        return set(inspect.signature(locate(target)).parameters) >= _WORDS
    except (TargetError, TypeError, ValueError):
        return False
