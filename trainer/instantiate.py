"""The one door from a configuration node to the object that it describes.

Every target is checked (`trainer/targets.py`) before anything of the tree is imported or called.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException

from trainer.signatures import TargetProblem, bind_problems, hides_arguments
from trainer.targets import ALLOWED, TargetError, allow, allowed_extra, locate, refusal

__all__ = [
    "TargetError",
    "TargetProblem",
    "allow",
    "allowed_extra",
    "bind_problems",
    "build_problems",
    "hides_arguments",
    "instantiate",
    "locate",
    "refused_targets",
]

# What a constructor raises about a value it was given, as opposed to a fault within it.
_REFUSALS = (TypeError, ValueError, AssertionError, NotImplementedError)
# Hydra 1.4 wants the list of allowed targets from the caller; 1.3 has no such parameter.
_WHITELIST = "_execution_whitelist_"
_TAKES_WHITELIST = _WHITELIST in inspect.signature(hydra.utils.instantiate).parameters


def refused_targets(node: Any, key: str = "") -> list[TargetProblem]:
    """List the targets in `node` that may not be used, judged by name alone: imports nothing."""
    return [
        TargetProblem(where, reason)
        for where, path in _targets(node, key)
        if (reason := refusal(path)) is not None
    ]


def instantiate(node: dict[str, Any], *args: Any, _key_: str = "", **kwargs: Any) -> Any:
    """Build what `node` describes, nested nodes first, and return it.

    `args` take the place of the node's `_args_`, `kwargs` win over the node's own arguments; both
    are handed on untouched. Containers arrive as plain dicts and lists. With `_partial_: true`
    the result is a callable. `_key_` is where the node stands, for the messages.
    Raises TargetError where a target is refused or rejects a value; other exceptions pass.
    """
    paths = [path for _, path in _targets(node, _key_)]
    for where, path in _targets(node, _key_):
        _locate(where, path)
    own = {k: v for k, v in _escaped(node).items() if not (args and k == "_args_")}
    deferred = bool(own.pop("_partial_", False))
    own.pop("_convert_", None)
    extra = {_WHITELIST: sorted({*ALLOWED, *paths})} if _TAKES_WHITELIST else {}
    try:
        call = hydra.utils.instantiate({**own, "_partial_": True, "_convert_": "all"}, **extra)
        if deferred:
            return _bound(call, args, kwargs)
        return call(*args, **kwargs)
    except InstantiationException as error:
        raise _cause(error, node, _key_) from error.__cause__
    except _REFUSALS as error:
        raise _refused_value(error, node, _key_) from error


def build_problems(
    node: dict[str, Any], key: str, *args: Any, **kwargs: Any
) -> list[TargetProblem]:
    """Build `node` on the meta device, which allocates nothing, and report what it objects to.

    For targets that hide their arguments behind `**kwargs`, as torchvision's models do.
    """
    import torch  # the rest of this module serves checks that must answer before torch is loaded

    try:
        with torch.device("meta"):
            instantiate(node, *args, _key_=key, **kwargs)
    except TargetError as error:
        return [TargetProblem(key, str(error).removeprefix(f"{key}: "))]
    return []


def _targets(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield (f"{key}._target_" if key else "_target_"), node["_target_"]
        for name, child in node.items():
            yield from _targets(child, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _targets(child, f"{key}.{index}")


def _locate(where: str, path: Any) -> Any:
    try:
        return locate(path)
    except TargetError as error:
        raise TargetError(f"{where}: {error}") from error


def _bound(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args and not kwargs:
        return call
    return lambda *more, **named: call(*args, *more, **{**kwargs, **named})


def _escaped(node: Any) -> Any:
    """Protect `${` in values that are final: Hydra would resolve it a second time."""
    if isinstance(node, dict):
        return {key: _escaped(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_escaped(value) for value in node]
    return _escape(node) if isinstance(node, str) else node


def _escape(text: str) -> str:
    head, *rest = text.split("${")
    for part in rest:
        # Backslashes right before an interpolation are halved when it is read: double them first.
        slashes = len(head) - len(head.rstrip("\\"))
        head = f"{head}{chr(92) * slashes}{chr(92)}${{{part}"
    return head


def _cause(error: InstantiationException, node: dict[str, Any], key: str) -> BaseException:
    """Return what a nested target raised, or the refusal it amounts to."""
    cause = error.__cause__
    if isinstance(cause, InstantiationException):
        return _cause(cause, node, key)
    if cause is None or isinstance(cause, _REFUSALS):
        return _refused_value(cause or error, node, key)
    return cause


def _refused_value(error: BaseException, node: dict[str, Any], key: str) -> BaseException:
    """Return the configuration error that `error` is, or `error` itself if it has a code."""
    if hasattr(error, "exit_code"):
        return error
    reason = " ".join(str(error).split())[:500] or type(error).__name__
    where = f"{key}: " if key else ""
    return TargetError(f"{where}{node['_target_']} does not accept its arguments: {reason}")
