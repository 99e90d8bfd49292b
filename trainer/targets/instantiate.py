"""Nodes: check the arguments of a `_target_` against its signature, and build the object.

`CheckedNode` checks one node. `instantiate` is the only place that builds one: all nodes within it
are checked before any target is called.
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
from regimen.conf.interpolation import join, under, walk
from regimen.trainer.errors import short_message
from regimen.trainer.targets.allow_list import TargetError, listed, locate, refusal

# Keys of a node that are no arguments, as Hydra calls them.
SPECIAL = ("_target_", "_args_", "_partial_", "_recursive_")
_SPECIAL_TYPES: Mapping[str, type] = {"_args_": list, "_partial_": bool, "_recursive_": bool}
# Builders of networks that can unpickle files: timm loads them with weights_only=False, and
# transformers can wrap timm. These arguments name such files.
_BUILDERS = ("timm", "regimen.models")
_UNPICKLED = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
# Arguments of builders that name a model; an address such as `hf-hub:...` is no name.
_MODEL_NAMES = ("model_name", "name")
_LISTS = (list, tuple, set, frozenset)
# A class from these modules accepts a config value only if the value is an instance of it: no
# string, number or null can stand for a tensor or a module. Other classes are not checked.
_COMPARED = ("builtins", "torch", "torch.nn.modules.module", "collections.abc")
# Exceptions that constructors raise for a value that they reject.
_REJECTIONS = (TypeError, ValueError, ArithmeticError, AssertionError, NotImplementedError)


def nodes_in(value: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key of each dict with a target in `value` and the dict, outer ones first."""
    for where, node in walk(value, key):
        if isinstance(node, dict) and "_target_" in node:
            yield where, node


def refused_targets(node: Any, key: str = "") -> list[Problem]:
    """List the targets in `node` that may not be used, by their names alone; imports nothing."""
    problems = []
    for where, inner in nodes_in(node, key):
        reason = refusal(inner["_target_"])
        if reason is not None:
            problems.append(Problem(join(where, "_target_"), reason))
    return problems


def instantiate(node: dict[str, Any], *args: Any, _key_: str = "", **kwargs: Any) -> Any:
    """Build what `node` describes, nested nodes first, and return it.

    `args` replace the node's `_args_`, `kwargs` override the node's arguments; both are passed on
    unchanged, containers as plain dicts and lists. With `_partial_: true` the result is a
    callable. `_key_` is the node's key, for error messages.
    Raises TargetError if a target is refused or does not take its arguments; other exceptions pass
    through.
    """
    problems: list[Problem] = []
    targets: dict[int, Any] = {}
    for where, inner in nodes_in(node, _key_):
        if inner is node:
            own = {name: value for name, value in node.items() if name not in kwargs}
            checked = CheckedNode(own, where, len(args), kwargs)
        else:
            checked = CheckedNode(inner, where)
        problems += checked.problems
        # By identity: keys of plain dicts may hold dots, so that two nodes may have the same key.
        targets[id(inner)] = checked.target
    raise_problems(problems, TargetError)
    return _build(node, args, kwargs, _key_, targets)


class CheckedNode:
    """A node whose target was located and whose arguments were held against its signature.

    The caller adds `positional` arguments by position, which replace the node's `_args_`, and those
    called `provided` by keyword. `converted`: keys that the caller turns into arguments; they are
    not checked, and then no argument is reported as missing. `our_key` returns which key of the
    configuration an unknown argument may have been meant for.
    """

    def __init__(
        self,
        node: dict[Any, Any],
        key: str,
        positional: int = 0,
        provided: Collection[str] = (),
        converted: Collection[str] | None = None,
        our_key: Callable[[str], str | None] = lambda key: None,
    ) -> None:
        self.problems: list[Problem] = []
        self.target: Any = None  # the class or function; None if it is refused or does not exist
        self._path = node["_target_"]
        self._key = key
        self._our_key = our_key
        self._check_names(node)
        with collect_problems(self.problems), problems_at(join(key, "_target_")):
            self.target = locate(self._path)
        if self.target is None:
            return

        parameters = parameters_of(self.target)
        self._parameters = parameters or {}
        args = node["_args_"] if isinstance(node.get("_args_"), list) else []
        by_position = self._names_of(Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        if under(self._path, _BUILDERS):
            named_args = dict(zip(by_position, args, strict=False))
            self.problems += _unpickling({**node, **named_args}, key)
        if parameters is None:
            return

        if not positional:
            self._check_positional(by_position, args)
        filled = {*provided, *by_position[: max(positional, len(args))]}
        by_keyword = self._names_of(Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        accepted = [name for name in by_keyword if name not in filled]
        skipped = (*SPECIAL, *(converted or ()))
        arguments = {name: value for name, value in node.items() if name not in skipped}
        self._check_keywords(arguments, accepted, filled)
        if converted is None and node.get("_partial_") is not True:
            self._check_missing(arguments, accepted)

    def _check_names(self, node: Mapping[Any, Any]) -> None:
        for name, value in node.items():
            if not isinstance(name, str) or not name.isidentifier():
                self._add(name, "cannot be the name of an argument")
            elif not isinstance(value, _SPECIAL_TYPES.get(name, object)):
                wanted = "a list" if name == "_args_" else "true or false"
                self._add(name, f"expected {wanted}, got {value!r}")

    def _check_positional(self, names: Sequence[str], args: Sequence[Any]) -> None:
        for index, (name, value) in enumerate(zip(names, args, strict=False)):
            mismatch = _mismatch(self._parameters[name], value)
            if mismatch is not None:
                self._add(f"_args_.{index}", f"{name}: {mismatch}")
        if len(args) > len(names) and not self._names_of(Parameter.VAR_POSITIONAL):
            self._add(
                "_args_",
                f"{self._path} takes {len(names)} arguments by position, got {len(args)}",
            )

    def _check_keywords(
        self, arguments: Mapping[Any, Any], accepted: Sequence[str], filled: Collection[str]
    ) -> None:
        """`accepted`: what the node may give by keyword; `filled`: what the call gives already."""
        takes_any = bool(self._names_of(Parameter.VAR_KEYWORD))
        for name, value in arguments.items():
            if name in accepted:
                mismatch = _mismatch(self._parameters[name], value)
                if mismatch is not None:
                    self._add(name, mismatch)
            elif name in filled and name in self._parameters:
                self._add(name, f"is filled in when {self._path} is called: leave it out")
            elif not takes_any and isinstance(name, str):
                hint = self._hint_for_unknown(name, accepted)
                self._add(name, f"{self._path} has no argument {name!r}", hint)

    def _hint_for_unknown(self, name: str, accepted: Sequence[str]) -> str:
        ours = self._our_key(f"{self._key}.{name}")
        if ours:
            return f"it is called {ours} here"
        available = f"it takes {', '.join(accepted)}" if accepted else "it takes no arguments"
        return did_you_mean(name, accepted) or available

    def _check_missing(self, arguments: Mapping[Any, Any], accepted: Sequence[str]) -> None:
        for name in accepted:
            if self._parameters[name].default is Parameter.empty and name not in arguments:
                self._add(name, f"missing: {self._path} needs it")

    def _names_of(self, *kinds: Any) -> list[str]:
        return [name for name, p in self._parameters.items() if p.kind in kinds]

    def _add(self, name: object, message: str, hint: str | None = None) -> None:
        self.problems.append(Problem(f"{self._key}.{name}", message, hint))


def _unpickling(arguments: dict[Any, Any], key: str) -> Iterator[Problem]:
    """Yield the arguments of a builder that would unpickle a file or fetch code."""
    for where, value in walk(arguments, key):
        if value and where.rpartition(".")[2] in _UNPICKLED:
            yield Problem(where, "not allowed here: it would unpickle a file")
    for name in _MODEL_NAMES:
        model = arguments.get(name)
        if model is not None and (not isinstance(model, str) or ":" in model):
            yield Problem(
                f"{key}.{name}",
                f"not allowed here: {model!r} is an address, not the name of a model",
            )


def parameters_of(target: Any) -> Mapping[str, Parameter] | None:
    """Return the parameters of a class or function, or of what a path names; None if unknown."""
    with suppress(TargetError):
        if isinstance(target, str):
            target = locate(target)
        # Annotations may be strings (PEP 563); those that cannot be evaluated stay strings.
        for eval_str in (True, False):
            with suppress(Exception):  # none for compiled functions; evaluation may raise any type
                return inspect.signature(target, eval_str=eval_str).parameters
    return None


def is_default(node: Any, name: str) -> bool:
    """Return whether an argument of a node has the value that leaving it out gives."""
    if not isinstance(node, dict) or name in SPECIAL or name not in node:
        return False
    parameters = parameters_of(str(node.get("_target_"))) or {}
    if name not in parameters:
        return False
    default = parameters[name].default
    # Types are compared as well: False and 0 are equal, and are not the same argument.
    return type(node[name]) is type(default) and bool(node[name] == default)


def accepts_argument(node: Any, name: str) -> bool:
    """Return whether a node's target accepts an argument of this name; if in doubt, it does."""
    parameters = None
    with suppress(Exception):  # of a user's module: `check_targets` reports it
        parameters = parameters_of(str(node.get("_target_")))
    if parameters is None or name in parameters or name in SPECIAL:
        return True
    return any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())


def _mismatch(parameter: Parameter, value: Any) -> str | None:
    """Return why a value cannot be an argument; None if it can."""
    if value is None and parameter.default is None:
        return None  # `x: int = None` is common
    if isinstance(value, str) and "${" in value:
        return None  # a reserved interpolation, filled in later
    sides = value if isinstance(value, list) else [value]
    if parameter.name == "size" and any(type(side) is int and side < 1 for side in sides):
        return f"expected a size of at least 1, got {value!r}"
    annotation = parameter.annotation
    if not may_hold(annotation, value):
        is_class = isinstance(annotation, type)
        wanted = annotation.__name__ if is_class else str(annotation).replace("typing.", "")
        return f"expected {wanted}, got {value!r} ({type(value).__name__})"
    if isinstance(value, float) and math.isnan(value):
        return "expected a number, got nan"
    return None


def may_hold(annotation: Any, value: Any) -> bool:
    """Return False if a plain config value cannot fit `annotation`."""
    if isinstance(value, dict) or annotation in (Parameter.empty, Any, object):
        return True  # a dict may be a node, which can build anything
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
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
    if cls is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if cls is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if cls is bool:
        return value in (True, False, None)
    return cls.__module__ not in _COMPARED or isinstance(value, cls)


def _build(
    node: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    key: str,
    targets: Mapping[int, Any],
) -> Any:
    """Call a node's target. `targets`: the located target of each node, by the node's identity."""
    values = dict(node)
    path = values.pop("_target_")
    if node.get("_recursive_") is not False:
        for name, value in values.items():
            values[name] = _build_all(value, join(key, name), targets)
    args = args or tuple(values.get("_args_", ()))
    arguments = {name: value for name, value in values.items() if name not in SPECIAL}
    call = functools.partial(targets[id(node)], *args, **{**arguments, **kwargs})
    if values.get("_partial_"):
        return call
    try:
        with problems_at(key):
            return call()
    except _REJECTIONS as error:
        # An error in the user's own code is more useful with its traceback.
        if hasattr(error, "exit_code") or listed(path) is None:
            raise
        reason = short_message(error) or type(error).__name__
        raise TargetError(key, f"{path} does not accept its arguments: {reason}") from error


def _build_all(value: Any, key: str, targets: Mapping[int, Any]) -> Any:
    """Return an argument with the nodes within it built."""
    if isinstance(value, dict):
        if "_target_" in value:
            return _build(value, (), {}, key, targets)
        return {name: _build_all(child, join(key, name), targets) for name, child in value.items()}
    if isinstance(value, list):
        return [_build_all(child, join(key, index), targets) for index, child in enumerate(value)]
    return value
