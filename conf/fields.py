"""How a configuration key is declared: its default, what it means, what it may hold."""

import dataclasses
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

# What a rule's `check` returns: what was expected instead, or None where the value is fine.
Check = Callable[[Any], str | None]
REQUIRED = object()
_COMPARE: Mapping[str, Any] = {">=": operator.ge, ">": operator.gt, "<=": operator.le}


@dataclass(frozen=True, slots=True)
class Rule:
    """The meaning and the limits of one key; limits apply to numbers."""

    doc: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    infinite: bool = False  # whether .inf is a value
    check: Check | None = None
    node: bool = False  # a dict must have a `_target_`
    words: type | None = None  # the keys of an open node that we know, and check where they occur
    strategies: tuple[str, ...] = ()  # the strategies for which the key has an effect; (): all

    def expects(self, value: object) -> str | None:
        """Say what was expected instead of `value`, whose type is right; None if it is fine."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            limits = {">=": self.at_least, ">": self.above, "<=": self.at_most}
            given = {sign: limit for sign, limit in limits.items() if limit is not None}
            finite = isinstance(value, int) or math.isfinite(value) or self.infinite
            kept = (_COMPARE[sign](value, limit) for sign, limit in given.items())
            if not (finite and all(kept)):
                shown = [f"a number {sign} {limit}" for sign, limit in given.items()]
                return " and ".join(shown) or "a finite number"
        return self.check(value) if self.check and value is not None else None


def option(default: Any, doc: str, **limits: Any) -> Any:
    """Declare a key of a dataclass: a default (REQUIRED: none), its meaning and its limits."""
    metadata = {"rule": Rule(doc, **limits)}
    if default is REQUIRED:
        return field(metadata=metadata)
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    if dataclasses.is_dataclass(default):
        return field(default_factory=default, metadata=metadata)  # type: ignore[arg-type]
    return field(default=default, metadata=metadata)


def rule_of(declared: "dataclasses.Field[Any]") -> Rule:
    """Return the rule that a field was declared with."""
    rule: Rule = declared.metadata["rule"]
    return rule


def declared(schema: type) -> Mapping[str, "dataclasses.Field[Any]"]:
    """Return the keys that a schema declares, in order; not what else its objects hold."""
    return {f.name: f for f in dataclasses.fields(schema) if "rule" in f.metadata}


def is_open(schema: type) -> bool:
    """Return whether a section takes keys beyond those that its schema declares."""
    return any(f.name == "extra" for f in dataclasses.fields(schema))


def default_of(declared_field: "dataclasses.Field[Any]") -> Any:
    """Return a fresh default of a field, or REQUIRED."""
    if declared_field.default_factory is not dataclasses.MISSING:
        return declared_field.default_factory()
    if declared_field.default is dataclasses.MISSING:
        return REQUIRED
    return declared_field.default


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a union takes; of any other type itself."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def dataclass_in(annotation: Any) -> type | None:
    """Return the section that a type stands for, if it stands for one."""
    found = (m for m in members(annotation) if isinstance(m, type))
    return next((m for m in found if dataclasses.is_dataclass(m)), None)


def plain_name(value: str) -> str | None:
    """Require one component of a path: it names a folder under `runs/`."""
    bad = "/" in value or "\\" in value or value in ("", ".", "..") or not value.isprintable()
    if bad or len(value.encode()) > 100 or value != value.strip():
        return "a plain folder name of at most 100 bytes, without / or .."
    return None


def plain_path(value: str) -> str | None:
    """Require a path that the file system can hold."""
    if not value.strip() or not value.isprintable() or len(value.encode()) > 4000:
        return "the path of a file or folder"
    return None


def share(value: object) -> str | None:
    """Require a count, or a fraction: a float in (0, 1]."""
    if isinstance(value, float) and not 0 < value <= 1:
        return "a number of batches (an integer), or a fraction in (0, 1]"
    return None


def duration(value: object) -> str | None:
    """Require seconds, or hours, minutes and seconds as '1:30:00'."""
    if isinstance(value, str):
        parts = value.split(":")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            return "seconds, or a quoted 'hours:minutes:seconds'"
        if not any(map(int, parts)) or max(map(int, parts[1:])) > 59:
            return "hours, minutes and seconds (up to 59 of these two), and more than 0"
    return None


count = partial(option, at_least=1)
natural = partial(option, at_least=0)
positive = partial(option, above=0)
node = partial(option, node=True)
path = partial(option, check=plain_path)
