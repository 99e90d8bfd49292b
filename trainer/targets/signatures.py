"""Check the arguments of a `_target_` node against the target's signature."""

import inspect
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Any, Literal, Union

from conf.errors import Problem, did_you_mean, problems_at
from trainer.targets.allow_list import REFUSED_ARGUMENTS, TargetError, locate, under

# Hydra's own keys; every other key of a node is an argument.
SPECIAL = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_PLACED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def bind_problems(
    node: Any, key: str, provided: Sequence[str] = (), positional: int = 0
) -> list[Problem]:
    """List the problems of targets and arguments in `node`, including nested nodes.

    `provided` names the keyword arguments, and `positional` counts the positional ones, that the
    caller adds to the outermost target. Targets are imported; nothing is built.
    """
    if isinstance(node, list):
        return [p for i, child in enumerate(node) for p in bind_problems(child, f"{key}.{i}")]
    if not isinstance(node, dict):
        return []
    found = list(_node_problems(node, key, provided, positional)) if "_target_" in node else []
    for name, child in node.items():
        found += bind_problems(child, f"{key}.{name}")
    return found


def is_default(node: Any, name: str) -> bool:
    """Return whether an argument of a node has the value that leaving it out gives."""
    if not isinstance(node, dict) or name in SPECIAL or name not in node:
        return False
    try:
        parameters = _parameters(locate(str(node.get("_target_"))))
    except TargetError:
        return False
    parameter = (parameters or {}).get(name)
    value, default = node[name], Parameter.empty if parameter is None else parameter.default
    return type(value) is type(default) and bool(value == default)


def takes(node: Any, name: str) -> bool:
    """Return whether a node's target is given a value under this name; if in doubt, it is."""
    try:
        parameters = _parameters(locate(str(node.get("_target_"))))
    except TargetError:
        return True
    known = parameters is None or name in parameters or name in SPECIAL
    return known or any(p.kind is Parameter.VAR_KEYWORD for p in (parameters or {}).values())


def _node_problems(
    node: dict[str, Any], key: str, provided: Sequence[str], positional: int
) -> Iterator[Problem]:
    yield from _special_problems(node, key)
    try:
        with problems_at(f"{key}._target_"):
            target = locate(node["_target_"])
    except TargetError as error:
        yield from error.problems
        return
    parameters = _parameters(target)
    yield from _refused_arguments(node, key, parameters)
    if parameters is not None:
        args = _positional(node)
        if not positional:  # otherwise the caller's replace them
            yield from _positional_problems(args, key, parameters, node["_target_"])
        yield from _bind(node, key, parameters, set(provided), max(positional, len(args)))


def _special_problems(node: dict[str, Any], key: str) -> Iterator[Problem]:
    for name, value in node.items():
        if not isinstance(name, str) or not name.isidentifier():
            yield Problem(f"{key}.{name}", "cannot be the name of an argument")
        elif name in ("_partial_", "_recursive_") and not isinstance(value, bool):
            yield Problem(f"{key}.{name}", f"expected true or false, got {value!r}")
        elif name == "_args_" and not isinstance(value, list):
            yield Problem(f"{key}._args_", f"expected a list, got {value!r}")


def refused_arguments(node: dict[str, Any], key: str) -> list[Problem]:
    """List the arguments of `node` itself that would unpickle a file or fetch code."""
    if not any(under(str(node["_target_"]), [prefix]) for prefix in REFUSED_ARGUMENTS):
        return []
    return list(_refused_arguments(node, key, _parameters(locate(node["_target_"]))))


def _refused_arguments(
    node: dict[str, Any], key: str, parameters: Mapping[str, Parameter] | None
) -> Iterator[Problem]:
    given = {**node, **dict(zip(_by_place(parameters or {}), _positional(node), strict=False))}
    for prefix, refused in REFUSED_ARGUMENTS.items():
        if not under(node["_target_"], [prefix]):
            continue
        for name in refused.unpickled:
            if given.get(name):
                message = "not allowed here: it would unpickle a file"
                yield Problem(f"{key}.{name}", message)
        model = given.get(refused.model)
        if model is not None and (not isinstance(model, str) or ":" in model):
            message = f"not allowed here: {model!r} is an address, not the name of a model"
            yield Problem(f"{key}.{refused.model}", message)


def _positional(node: Mapping[str, Any]) -> list[Any]:
    args = node.get("_args_", [])
    return args if isinstance(args, list) else []


def _by_place(parameters: Mapping[str, Parameter]) -> list[str]:
    return [name for name, p in parameters.items() if p.kind in _PLACED]


def _positional_problems(
    args: list[Any], key: str, parameters: Mapping[str, Parameter], target: str
) -> Iterator[Problem]:
    """Check the values of `_args_` as the arguments at their positions."""
    names = _by_place(parameters)
    for index, (name, value) in enumerate(zip(names, args, strict=False)):
        for problem in _type_problems(parameters[name], value, f"{key}._args_.{index}"):
            yield Problem(problem.key, f"{name}: {problem.message}")
    endless = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters.values())
    if len(args) > len(names) and not endless:
        message = f"{target} takes {len(names)} arguments by position, got {len(args)}"
        yield Problem(f"{key}._args_", message)


def _parameters(target: Any) -> Mapping[str, Parameter] | None:
    # Annotations may be strings (PEP 563); those that cannot be evaluated stay strings.
    for spelled_out in (True, False):
        try:
            return inspect.signature(target, eval_str=spelled_out).parameters
        except Exception:  # none for compiled functions; evaluation may raise any type
            continue
    return None


def _bind(
    node: dict[str, Any],
    key: str,
    parameters: Mapping[str, Parameter],
    provided: set[str],
    positional: int,
) -> Iterator[Problem]:
    target = node["_target_"]
    filled = provided | set(_by_place(parameters)[:positional])
    names = [n for n, p in parameters.items() if p.kind in _NAMED and n not in filled]
    open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    given = {k: v for k, v in node.items() if k not in SPECIAL and isinstance(k, str)}
    for name, value in given.items():
        if name in filled and name in parameters:
            message = f"is filled in when {target} is called: leave it out"
            yield Problem(f"{key}.{name}", message)
        elif name in names:
            yield from _type_problems(parameters[name], value, f"{key}.{name}")
        elif not open_ended:
            yield _unknown(name, names, key, target)
    if node.get("_partial_") is not True:
        yield from _missing(names, parameters, given, key, target)


def _unknown(name: str, names: list[str], key: str, target: str) -> Problem:
    takes = f"it takes {', '.join(names)}" if names else "it takes no arguments"
    hint = did_you_mean(name, names) or takes
    return Problem(f"{key}.{name}", f"{target} has no argument {name!r}", hint)


def _missing(
    names: list[str],
    parameters: Mapping[str, Parameter],
    given: Mapping[str, Any],
    key: str,
    target: str,
) -> Iterator[Problem]:
    for name in names:
        if parameters[name].default is Parameter.empty and name not in given:
            yield Problem(f"{key}.{name}", f"missing: {target} needs it")


def _type_problems(parameter: Parameter, value: Any, key: str) -> Iterator[Problem]:
    annotation = parameter.annotation
    if value is None and parameter.default is None:
        return  # `x: int = None` is common
    if isinstance(value, str) and "${" in value:
        return  # a reserved interpolation, filled in later
    if not may_hold(annotation, value):
        wanted = _spelled(annotation)
        yield Problem(key, f"expected {wanted}, got {value!r} ({type(value).__name__})")
    elif isinstance(value, float) and math.isnan(value):
        yield Problem(key, "expected a number, got nan")


def may_hold(annotation: Any, value: Any) -> bool:
    """Return False if a plain config value cannot fit `annotation`."""
    if isinstance(value, dict) or annotation in (Parameter.empty, Any, object):
        return True  # a dict may be a node, which can build anything
    if annotation is None:
        return value is None
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(may_hold(member, value) for member in typing.get_args(annotation))
    if origin is Literal:
        return value in typing.get_args(annotation)
    if origin is typing.Annotated:
        return may_hold(typing.get_args(annotation)[0], value)
    return _may_be_instance(annotation if origin is None else origin, value)


def _may_be_instance(cls: Any, value: Any) -> bool:
    if not isinstance(cls, type) or getattr(cls, "_is_protocol", False):
        return True  # a string annotation, a TypeVar, a protocol: not checked
    if cls is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if cls is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if cls is bool:
        return value in (True, False, None)
    if isinstance(value, list):
        return issubclass(cls, _LISTS) or issubclass(list, cls)
    return cls.__module__ not in _COMPARED or isinstance(value, cls)


_LISTS = (list, tuple, set, frozenset)
# Classes that no string, number or null can represent.
_COMPARED = ("builtins", "torch", "torch.nn.modules.module", "collections.abc")


def _spelled(annotation: Any) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "")
