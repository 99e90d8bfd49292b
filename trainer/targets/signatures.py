"""The check of a node: what its `_target_` names, and its arguments against the signature."""

import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter
from typing import Any, Literal, Union

from conf.errors import Problem, did_you_mean, noted, problems_at
from trainer.targets.allow_list import TargetError, locate, under

# Hydra's own keys; every other key of a node is an argument.
SPECIAL = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")
_HELD: Mapping[str, type] = {"_args_": list, "_partial_": bool, "_recursive_": bool}
# Arguments by which builders of networks unpickle files: timm loads them with weights_only=False,
# and transformers can wrap timm. The name of a model must be no address such as `hf-hub:...`.
_BUILDERS = ("timm", "models")
_UNPICKLED = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
_NAMES = ("model_name", "name")
_LISTS = (list, tuple, set, frozenset)
# Classes that no string, number or null can represent.
_COMPARED = ("builtins", "torch", "torch.nn.modules.module", "collections.abc")


def join(key: str, name: object) -> str:
    """Return the key of what stands under a name within a key."""
    return f"{key}.{name}" if key else str(name)


def children(value: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, name or position, and value of what a dict or a list holds."""
    pairs = value.items() if isinstance(value, Mapping) else ()
    for name, child in enumerate(value) if isinstance(value, list | tuple) else pairs:
        yield join(key, name), name, child


def nodes_in(value: Any, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every dict with a target in `value`, the outer ones first, and its key."""
    if isinstance(value, dict) and "_target_" in value:
        yield key, value
    for where, _, child in children(value, key):
        yield from nodes_in(child, where)


def parameters_of(target: Any) -> Mapping[str, Parameter] | None:
    """Return the parameters of a class or function, or of what a path names; None if unknown."""
    with suppress(TargetError):
        target = locate(target) if isinstance(target, str) else target
        # Annotations may be strings (PEP 563); those that cannot be evaluated stay strings.
        for spelled_out in (True, False):
            with suppress(Exception):  # none for compiled functions; evaluation may raise any type
                return inspect.signature(target, eval_str=spelled_out).parameters
    return None


def bind_problems(
    node: Any,
    key: str,
    provided: Sequence[str] = (),
    positional: int = 0,
    elsewhere: Callable[[str], str | None] = lambda key: None,
) -> list[Problem]:
    """List the problems of targets and arguments in `node`, including nested nodes.

    `provided` names the keyword arguments, and `positional` counts the positional ones, that the
    caller adds to the outermost target. `elsewhere` says which key of the configuration an unknown
    argument may have been meant for. Targets are imported; nothing is built.
    """
    found: list[Problem] = []
    for where, inner in nodes_in(node, key):
        for name, value in inner.items():
            if not isinstance(name, str) or not name.isidentifier():
                found.append(Problem(f"{where}.{name}", "cannot be the name of an argument"))
            elif not isinstance(value, _HELD.get(name, object)):
                wanted = "a list" if name == "_args_" else "true or false"
                found.append(Problem(f"{where}.{name}", f"expected {wanted}, got {value!r}"))
        with noted(found), problems_at(f"{where}._target_"):
            target = locate(inner["_target_"])
            found += refused_arguments(inner, where)
            if (parameters := parameters_of(target)) is not None:
                given = (provided, positional) if inner is node else ((), 0)
                found += _argument_problems(inner, where, parameters, *given, elsewhere)
    return found


def refused_arguments(node: dict[str, Any], key: str) -> Iterator[Problem]:
    """Yield the arguments of `node` itself that would unpickle a file or fetch code."""
    if not under(str(node["_target_"]), _BUILDERS):
        return
    by_place = _by_place(parameters_of(node["_target_"]) or {})
    given = {**node, **dict(zip(by_place, _positional(node), strict=False))}
    for where in _unpickled(given, key):
        yield Problem(where, "not allowed here: it would unpickle a file")
    for name in _NAMES:
        model = given.get(name)
        if model is not None and (not isinstance(model, str) or ":" in model):
            message = f"not allowed here: {model!r} is an address, not the name of a model"
            yield Problem(f"{key}.{name}", message)


def _unpickled(value: Any, key: str) -> Iterator[str]:
    for where, name, child in children(value, key):
        if name in _UNPICKLED and child:
            yield where
        yield from _unpickled(child, where)


def is_default(node: Any, name: str) -> bool:
    """Return whether an argument of a node has the value that leaving it out gives."""
    if not isinstance(node, dict) or name in SPECIAL or name not in node:
        return False
    parameter = (parameters_of(str(node.get("_target_"))) or {}).get(name)
    value, default = node[name], Parameter.empty if parameter is None else parameter.default
    return type(value) is type(default) and bool(value == default)


def takes(node: Any, name: str) -> bool:
    """Return whether a node's target is given a value under this name; if in doubt, it is."""
    try:
        known = parameters_of(str(node.get("_target_")))
    except Exception:  # of a module of the user's: the check of targets tells it
        return True
    if known is None or name in known or name in SPECIAL:
        return True
    return any(p.kind is Parameter.VAR_KEYWORD for p in known.values())


def _argument_problems(
    node: dict[str, Any],
    key: str,
    parameters: Mapping[str, Parameter],
    provided: Sequence[str],
    positional: int,
    elsewhere: Callable[[str], str | None],
) -> Iterator[Problem]:
    target, args, places = node["_target_"], _positional(node), _by_place(parameters)
    kinds = {p.kind for p in parameters.values()}
    if not positional:  # otherwise the caller's arguments replace the node's
        for index, (name, value) in enumerate(zip(places, args, strict=False)):
            if (message := _mismatch(parameters[name], value)) is not None:
                yield Problem(f"{key}._args_.{index}", f"{name}: {message}")
        if len(args) > len(places) and Parameter.VAR_POSITIONAL not in kinds:
            message = f"{target} takes {len(places)} arguments by position, got {len(args)}"
            yield Problem(f"{key}._args_", message)
    filled = {*provided, *places[: max(positional, len(args))]}
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    names = [n for n, p in parameters.items() if p.kind in named and n not in filled]
    given = {n: v for n, v in node.items() if n not in SPECIAL and isinstance(n, str)}
    for name, value in given.items():
        where = f"{key}.{name}"
        if name in filled and name in parameters:
            yield Problem(where, f"is filled in when {target} is called: leave it out")
        elif name in names:
            if (message := _mismatch(parameters[name], value)) is not None:
                yield Problem(where, message)
        elif Parameter.VAR_KEYWORD not in kinds:
            ours = elsewhere(where)
            hint = f"it is called {ours} here" if ours else did_you_mean(name, names)
            hint = hint or (f"it takes {', '.join(names)}" if names else "it takes no arguments")
            yield Problem(where, f"{target} has no argument {name!r}", hint)
    for name in names if node.get("_partial_") is not True else ():
        if parameters[name].default is Parameter.empty and name not in given:
            yield Problem(f"{key}.{name}", f"missing: {target} needs it")


def _positional(node: Mapping[str, Any]) -> list[Any]:
    args = node.get("_args_")
    return args if isinstance(args, list) else []


def _by_place(parameters: Mapping[str, Parameter]) -> list[str]:
    placed = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in parameters.items() if p.kind in placed]


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
    nan = isinstance(value, float) and math.isnan(value)
    return "expected a number, got nan" if nan else None


def may_hold(annotation: Any, value: Any) -> bool:
    """Return False if a plain config value cannot fit `annotation`."""
    if isinstance(value, dict) or annotation in (Parameter.empty, Any, object):
        return True  # a dict may be a node, which can build anything
    if annotation is None:
        return value is None
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(may_hold(member, value) for member in args)
    if origin is Literal:
        return value in args
    if origin is typing.Annotated:
        return may_hold(args[0], value)
    cls = origin or annotation
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
