"""Build the object that a configuration node describes: the only place that does so.

All targets of a node are checked (`trainer.targets.allow_list`) before any is imported or called.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException

from conf.errors import Problem, problems_at, raise_problems
from trainer.targets.allow_list import TargetError, allow, allowed_extra, locate, refusal, under
from trainer.targets.nameable import OFFERS
from trainer.targets.signatures import SPECIAL, bind_problems, refused_arguments

__all__ = [
    "TargetError",
    "allow",
    "allowed_extra",
    "bind_problems",
    "instantiate",
    "locate",
    "refused_targets",
]

# Exceptions by which a constructor rejects a value.
_REFUSALS = (TypeError, ValueError, AssertionError, NotImplementedError)
# Hydra 1.4 wants the list of allowed targets from the caller; 1.3 has no such parameter.
_WHITELIST = "_execution_whitelist_"
_TAKES_WHITELIST = _WHITELIST in inspect.signature(hydra.utils.instantiate).parameters


def refused_targets(node: Any, key: str = "") -> list[Problem]:
    """List the targets in `node` that may not be used, by their names alone; imports nothing."""
    return [
        Problem(_join(where, "_target_"), reason)
        for where, inner in _nodes(node, key)
        if (reason := refusal(inner["_target_"])) is not None
    ]


def instantiate(node: dict[str, Any], *args: Any, _key_: str = "", **kwargs: Any) -> Any:
    """Build what `node` describes, nested nodes first, and return it.

    `args` replace the node's `_args_`, `kwargs` override the node's arguments; both are passed on
    unchanged, containers as plain dicts and lists. With `_partial_: true` the result is a
    callable. `_key_` is the node's key, for error messages.
    Raises TargetError if a target is refused or rejects a value; other exceptions pass through.
    """
    for where, inner in _nodes(node, _key_):
        _check(where, inner)
    return _build(node, args, kwargs, _key_)


def _build(node: dict[str, Any], args: tuple[Any, ...], given: dict[str, Any], key: str) -> Any:
    keep = node.get("_recursive_") is False
    own = {k: v if keep else _built(v, _join(key, k)) for k, v in node.items() if k not in SPECIAL}
    args = args or tuple(_built(node.get("_args_", []), _join(key, "_args_")))
    if node.get("_partial_"):
        return functools.partial(locate(node["_target_"]), *args, **{**own, **given})
    # Hydra gets the target without arguments: it would resolve `${` in them a second time.
    extra = {_WHITELIST: [node["_target_"]]} if _TAKES_WHITELIST else {}
    try:
        call = hydra.utils.instantiate({"_target_": node["_target_"], "_partial_": True}, **extra)
        with problems_at(key):
            return call(*args, **{**own, **given})
    except InstantiationException as error:
        raise _refusal(error.__cause__ or error, node, key) from error
    except _REFUSALS as error:
        # The user's own code: a traceback is more useful.
        if hasattr(error, "exit_code") or not under(node["_target_"], OFFERS):
            raise
        raise _refusal(error, node, key) from error


def _built(value: Any, key: str) -> Any:
    """Return an argument with the nodes within it built."""
    if isinstance(value, dict):
        if "_target_" in value:
            return _build(value, (), {}, key)
        return {name: _built(child, f"{key}.{name}") for name, child in value.items()}
    if isinstance(value, list):
        return [_built(child, f"{key}.{index}") for index, child in enumerate(value)]
    return value


def _nodes(node: Any, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every dict with a target in `node`, and its key."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield key, node
        for name, child in node.items():
            yield from _nodes(child, _join(key, str(name)))
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _nodes(child, f"{key}.{index}")


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _check(where: str, node: dict[str, Any]) -> None:
    with problems_at(_join(where, "_target_")):
        locate(node["_target_"])
    raise_problems(refused_arguments(node, where), TargetError)


def _refusal(cause: BaseException, node: dict[str, Any], key: str) -> TargetError:
    """Return the configuration error for a rejected value."""
    reason = " ".join(str(cause).split())[:500] or type(cause).__name__
    message = f"{node['_target_']} does not accept its arguments: {reason}"
    return TargetError(Problem(key, message))
