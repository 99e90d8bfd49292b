"""A node: what its `_target_` names, its arguments against the signature, the object it describes.

`node_problems` is the check of one node, and `instantiate` the only place that builds one: all
nodes within are checked before any target is called.
"""

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter
from typing import Any, Literal, Union

from regimen.conf.errors import Problem, collect_problems, did_you_mean, problems_at, raise_problems
from regimen.conf.interpolation import join, walk
from regimen.trainer.errors import short_message
from regimen.trainer.targets.allow_list import TargetError, listed, locate, refusal, under

# Keys of a node that are no arguments, as Hydra calls them.
SPECIAL = ("_target_", "_args_", "_partial_", "_recursive_")
_HELD: Mapping[str, type] = {"_args_": list, "_partial_": bool, "_recursive_": bool}
# Arguments by which builders of networks unpickle files: timm loads them with weights_only=False,
# and transformers can wrap timm. The name of a model must be no address such as `hf-hub:...`.
_BUILDERS = ("timm", "regimen.models")
_UNPICKLED = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
_NAMES = ("model_name", "name")
_LISTS = (list, tuple, set, frozenset)
# Classes that no string, number or null can represent.
_COMPARED = ("builtins", "torch", "torch.nn.modules.module", "collections.abc")
# Exceptions by which a constructor rejects a value.
_REFUSALS = (TypeError, ValueError, ArithmeticError, AssertionError, NotImplementedError)


def nodes_in(value: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every dict with a target in `value`, the outer ones first, and its key."""
    for where, node in walk(value, key):
        if isinstance(node, dict) and "_target_" in node:
            yield where, node


def refused_targets(node: Any, key: str = "") -> list[Problem]:
    """List the targets in `node` that may not be used, by their names alone; imports nothing."""
    found = ((where, refusal(inner["_target_"])) for where, inner in nodes_in(node, key))
    return [Problem(join(where, "_target_"), reason) for where, reason in found if reason]


def instantiate(node: dict[str, Any], *args: Any, _key_: str = "", **kwargs: Any) -> Any:
    """Build what `node` describes, nested nodes first, and return it.

    `args` replace the node's `_args_`, `kwargs` override the node's arguments; both are passed on
    unchanged, containers as plain dicts and lists. With `_partial_: true` the result is a
    callable. `_key_` is the node's key, for error messages.
    Raises TargetError if a target is refused or does not take its arguments; other exceptions pass
    through.
    """
    found: list[Problem] = []
    for where, inner in nodes_in(node, _key_):
        given = inner if inner is not node else {k: v for k, v in node.items() if k not in kwargs}
        found += node_problems(given, where, *((len(args), kwargs) if inner is node else ()))
    raise_problems(found, TargetError)
    return _build(node, args, kwargs, _key_)


def node_problems(
    node: dict[Any, Any],
    key: str,
    positional: int = 0,
    provided: Collection[str] = (),
    apart: Collection[str] | None = None,
    elsewhere: Callable[[str], str | None] = lambda key: None,
) -> list[Problem]:
    """List what is wrong with a node itself: its target, which is imported, and its arguments.

    The caller adds `positional` arguments by position, `provided` by keyword. Of keys `apart` it
    makes arguments: they are not compared, and nothing is missing. `elsewhere` says which key of
    the configuration an unknown argument may have been meant for.
    """
    found: list[Problem] = []

    def wrong(name: object, message: str, hint: str | None = None) -> None:
        found.append(Problem(f"{key}.{name}", message, hint))

    for name, value in node.items():
        if not isinstance(name, str) or not name.isidentifier():
            wrong(name, "cannot be the name of an argument")
        elif not isinstance(value, _HELD.get(name, object)):
            wanted = "a list" if name == "_args_" else "true or false"
            wrong(name, f"expected {wanted}, got {value!r}")
    target, known = node["_target_"], parameters_of(node["_target_"])
    args = node["_args_"] if isinstance(node.get("_args_"), list) else []
    placed = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    places = [name for name, p in (known or {}).items() if p.kind in placed]
    with collect_problems(found), problems_at(join(key, "_target_")):
        locate(target)
        if under(target, _BUILDERS):
            found += _unpickling({**node, **dict(zip(places, args, strict=False))}, key)
    if known is None:
        return found
    kinds = {p.kind for p in known.values()}
    if not positional:  # otherwise the caller's arguments replace the node's
        for index, (name, value) in enumerate(zip(places, args, strict=False)):
            if (message := _mismatch(known[name], value)) is not None:
                wrong(f"_args_.{index}", f"{name}: {message}")
        if len(args) > len(places) and Parameter.VAR_POSITIONAL not in kinds:
            wrong("_args_", f"{target} takes {len(places)} arguments by position, got {len(args)}")
    filled = {*provided, *places[: max(positional, len(args))]}
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    names = [n for n, p in known.items() if p.kind in named and n not in filled]
    given = {n: v for n, v in node.items() if n not in (*SPECIAL, *(apart or ()))}
    for name, value in given.items():
        if name in filled and name in known:
            wrong(name, f"is filled in when {target} is called: leave it out")
        elif name in names:
            if (message := _mismatch(known[name], value)) is not None:
                wrong(name, message)
        elif Parameter.VAR_KEYWORD not in kinds and isinstance(name, str):
            ours = elsewhere(f"{key}.{name}")
            hint = f"it is called {ours} here" if ours else did_you_mean(name, names)
            hint = hint or (f"it takes {', '.join(names)}" if names else "it takes no arguments")
            wrong(name, f"{target} has no argument {name!r}", hint)
    for name in names if apart is None and node.get("_partial_") is not True else ():
        if known[name].default is Parameter.empty and name not in given:
            wrong(name, f"missing: {target} needs it")
    return found


def _unpickling(given: dict[Any, Any], key: str) -> Iterator[Problem]:
    """Yield the arguments of a builder that would unpickle a file or fetch code."""
    for where, value in walk(given, key):
        if value and where.rpartition(".")[2] in _UNPICKLED:
            yield Problem(where, "not allowed here: it would unpickle a file")
    for name in _NAMES:
        model = given.get(name)
        if model is not None and (not isinstance(model, str) or ":" in model):
            message = f"not allowed here: {model!r} is an address, not the name of a model"
            yield Problem(f"{key}.{name}", message)


def parameters_of(target: Any) -> Mapping[str, Parameter] | None:
    """Return the parameters of a class or function, or of what a path names; None if unknown."""
    with suppress(TargetError):
        target = locate(target) if isinstance(target, str) else target
        # Annotations may be strings (PEP 563); those that cannot be evaluated stay strings.
        for spelled_out in (True, False):
            with suppress(Exception):  # none for compiled functions; evaluation may raise any type
                return inspect.signature(target, eval_str=spelled_out).parameters
    return None


def is_default(node: Any, name: str) -> bool:
    """Return whether an argument of a node has the value that leaving it out gives."""
    if not isinstance(node, dict) or name in SPECIAL or name not in node:
        return False
    parameter = (parameters_of(str(node.get("_target_"))) or {}).get(name)
    value, default = node[name], Parameter.empty if parameter is None else parameter.default
    return type(value) is type(default) and bool(value == default)


def accepts_argument(node: Any, name: str) -> bool:
    """Return whether a node's target is given a value under this name; if in doubt, it is."""
    known = None
    with suppress(Exception):  # of a module of the user's: the check of targets tells it
        known = parameters_of(str(node.get("_target_")))
    if known is None or name in (*known, *SPECIAL):
        return True
    return any(p.kind is Parameter.VAR_KEYWORD for p in known.values())


def _mismatch(parameter: Parameter, value: Any) -> str | None:
    """Say why a value cannot be an argument; None if it can."""
    if value is None and parameter.default is None:
        return None  # `x: int = None` is common
    if isinstance(value, str) and "${" in value:
        return None  # a reserved interpolation, filled in later
    sides = value if isinstance(value, list) else [value]
    if parameter.name == "size" and any(type(side) is int and side < 1 for side in sides):
        return f"expected a size of at least 1, got {value!r}"
    if not may_hold(parameter.annotation, value):
        known = parameter.annotation
        wanted = known.__name__ if isinstance(known, type) else str(known).replace("typing.", "")
        return f"expected {wanted}, got {value!r} ({type(value).__name__})"
    return "expected a number, got nan" if isinstance(value, float) and math.isnan(value) else None


def may_hold(annotation: Any, value: Any) -> bool:
    """Return False if a plain config value cannot fit `annotation`."""
    if isinstance(value, dict) or annotation in (Parameter.empty, Any, object):
        return True  # a dict may be a node, which can build anything
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(may_hold(member, value) for member in args)
    if origin is Literal:
        return value in args
    if origin is typing.Annotated:
        return may_hold(args[0], value)
    cls = type(None) if annotation is None else origin or annotation
    if not isinstance(cls, type) or getattr(cls, "_is_protocol", False):
        return True  # a string annotation, a TypeVar, a protocol: not checked
    if isinstance(value, list):
        if cls is tuple and args and ... not in args:
            return all(map(may_hold, args, value))
        if args and (cls in _LISTS or cls in (Sequence, Iterable, Collection)):
            return all(may_hold(args[0], item) for item in value)
        return issubclass(cls, _LISTS) or issubclass(list, cls)
    if cls in (int, float):
        numbers = int if cls is int else int | float
        return isinstance(value, numbers) and not isinstance(value, bool)
    if cls is bool:
        return value in (True, False, None)
    return cls.__module__ not in _COMPARED or isinstance(value, cls)


def _build(node: dict[str, Any], args: tuple[Any, ...], given: Mapping[str, Any], key: str) -> Any:
    target, keep = node["_target_"], node.get("_recursive_") is False
    own = {n: v if keep else _built(v, join(key, n)) for n, v in node.items() if n != "_target_"}
    args = args or tuple(own.get("_args_", ()))
    arguments = {n: v for n, v in own.items() if n not in SPECIAL} | {**given}
    call = functools.partial(locate(target), *args, **arguments)
    if own.get("_partial_"):
        return call
    try:
        with problems_at(key):
            return call()
    except _REFUSALS as error:
        # The user's own code: a traceback is more useful.
        if hasattr(error, "exit_code") or listed(target) is None:
            raise
        reason = short_message(error) or type(error).__name__
        message = f"{target} does not accept its arguments: {reason}"
        raise TargetError(key, message) from error


def _built(value: Any, key: str) -> Any:
    """Return an argument with the nodes within it built."""
    if isinstance(value, dict):
        if "_target_" in value:
            return _build(value, (), {}, key)
        return {name: _built(child, join(key, name)) for name, child in value.items()}
    if isinstance(value, list):
        return [_built(child, join(key, index)) for index, child in enumerate(value)]
    return value
