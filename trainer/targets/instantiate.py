"""Build the object that a configuration node describes: the only place that does so.

All targets of a node are checked (`trainer.targets.allow_list`) before any is called.
"""

import functools
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException

from conf.errors import Problem, problems_at, raise_problems
from trainer.targets.allow_list import TargetError, locate, refusal
from trainer.targets.nameable import split
from trainer.targets.signatures import SPECIAL, join, nodes_in, refused_arguments

# Exceptions by which a constructor rejects a value.
_REFUSALS = (TypeError, ValueError, ArithmeticError, AssertionError, NotImplementedError)


def refused_targets(node: Any, key: str = "") -> list[Problem]:
    """List the targets in `node` that may not be used, by their names alone; imports nothing."""
    return [
        Problem(join(where, "_target_"), reason)
        for where, inner in nodes_in(node, key)
        if (reason := refusal(inner["_target_"])) is not None
    ]


def instantiate(node: dict[str, Any], *args: Any, _key_: str = "", **kwargs: Any) -> Any:
    """Build what `node` describes, nested nodes first, and return it.

    `args` replace the node's `_args_`, `kwargs` override the node's arguments; both are passed on
    unchanged, containers as plain dicts and lists. With `_partial_: true` the result is a
    callable. `_key_` is the node's key, for error messages.
    Raises TargetError if a target is refused or rejects a value; other exceptions pass through.
    """
    for where, inner in nodes_in(node, _key_):
        with problems_at(join(where, "_target_")):
            locate(inner["_target_"])
        raise_problems(refused_arguments(inner, where), TargetError)
    return _build(node, args, kwargs, _key_)


def _build(node: dict[str, Any], args: tuple[Any, ...], given: dict[str, Any], key: str) -> Any:
    target, keep = node["_target_"], node.get("_recursive_") is False
    own = {k: v if keep else _built(v, join(key, k)) for k, v in node.items() if k not in SPECIAL}
    args = args or tuple(_built(node.get("_args_", []), join(key, "_args_")))
    if node.get("_partial_"):
        return functools.partial(locate(target), *args, **{**own, **given})
    # Hydra gets the target without arguments: it would resolve `${` in them a second time.
    try:
        call = hydra.utils.instantiate({"_target_": target, "_partial_": True})
        with problems_at(key):
            return call(*args, **{**own, **given})
    except (InstantiationException, *_REFUSALS) as error:
        by_hydra = isinstance(error, InstantiationException)
        # The user's own code: a traceback is more useful.
        if not by_hydra and (hasattr(error, "exit_code") or split(target) is None):
            raise
        cause = (error.__cause__ or error) if by_hydra else error
        reason = " ".join(str(cause).split())[:500] or type(cause).__name__
        message = f"{target} does not accept its arguments: {reason}"
        raise TargetError(Problem(key, message)) from error


def _built(value: Any, key: str) -> Any:
    """Return an argument with the nodes within it built."""
    if isinstance(value, dict):
        if "_target_" in value:
            return _build(value, (), {}, key)
        return {name: _built(child, join(key, name)) for name, child in value.items()}
    if isinstance(value, list):
        return [_built(child, join(key, index)) for index, child in enumerate(value)]
    return value
