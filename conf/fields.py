"""How a configuration key is declared: its default, what it means, what it may hold."""

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

# What a key's `check` returns: what was expected instead, or None where the value is fine.
Check = Callable[[Any], str | None]
REQUIRED: Any = ...  # no default
_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le}


@dataclass(frozen=True, slots=True)
class Key:
    """What a key means, what it is by default, and what it may hold."""

    doc: str = ""
    default: Any = REQUIRED  # of a section its schema
    limits: Mapping[str, float] = field(default_factory=dict)  # of numbers, such as {">=": 0}
    infinite: bool = False  # whether .inf is a value
    check: Check | None = None
    node: bool = False  # a dict must have a `_target_`
    several: bool = False  # or be nodes by name
    words: type | None = None  # the keys of an open node that we know
    strategies: tuple[str, ...] = ()  # the strategies for which the key has an effect; (): all
    type: Any = Any  # as annotated

    @property
    def section(self) -> "type | None":
        """The schema of the section that the key stands for, if it stands for one."""
        return next(filter(dataclasses.is_dataclass, members(self.type)), None)

    @property
    def within(self) -> "type | None":
        """The schema of the keys that we know within it."""
        return self.section or self.words

    @property
    def limit(self) -> str:
        """The limits in words; empty where there are none."""
        return " and ".join(f"{sign} {limit}" for sign, limit in self.limits.items())

    def expects(self, value: object) -> str | None:
        """Say what was expected instead of `value`, whose type is right; None if it is fine."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            finite = isinstance(value, int) or math.isfinite(value) or self.infinite
            kept = (_COMPARE[sign](value, limit) for sign, limit in self.limits.items())
            if not (finite and all(kept)):
                return f"a number {self.limit}" if self.limits else "a finite number"
        return self.check(value) if self.check and value is not None else None


def option(default: Any, doc: str, **how: Any) -> Any:
    """Declare a key of a dataclass: a default (REQUIRED: none), its meaning and its limits."""
    made = default.copy if isinstance(default, list | dict) else default  # by a schema: itself
    given: dict[str, Any] = {"default_factory" if callable(made) else "default": made}
    metadata = {"key": Key(doc, default, **how)}
    return field(metadata=metadata, **({} if default is REQUIRED else given))


def declared(schema: type) -> Mapping[str, Key]:
    """Return the keys that a schema declares, in order; not what else its objects hold."""
    hints, found = typing.get_type_hints(schema), dataclasses.fields(schema)
    return {
        f.name: replace(f.metadata["key"], type=hints[f.name]) for f in found if "key" in f.metadata
    }


def is_open(schema: type) -> bool:
    """Return whether a section takes keys beyond those that its schema declares."""
    return any(f.name == "extra" for f in dataclasses.fields(schema))


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a union takes; of any other type itself."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def choices(annotation: Any) -> list[Any]:
    """Return the values that a type names: those of its literals."""
    literals = [one for one in members(annotation) if typing.get_origin(one) is typing.Literal]
    return [choice for one in literals for choice in typing.get_args(one)]


def plain_name(value: str) -> str | None:
    """Require one component of a path: it names a folder under `runs/`."""
    bad = "/" in value or "\\" in value or value in ("", ".", "..") or not value.isprintable()
    if bad or len(value.encode()) > 100 or value != value.strip():
        return "a plain folder name of at most 100 bytes, without / or .."
    return None


def plain_words(value: list[str]) -> str | None:
    """Require short texts that any tracker can show."""
    sound = all(word.strip() and word.isprintable() and len(word) <= 64 for word in value)
    return None if sound else "words of 1 to 64 characters"


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
    parts = re.fullmatch(r"\d+:[0-5]?\d:[0-5]?\d", value) if isinstance(value, str) else True
    if not parts or not re.search("[1-9]", str(value)):
        return "seconds, or a quoted 'hours:minutes:seconds' (up to 59 of these two), more than 0"
    return None


count = partial(option, limits={">=": 1})
natural = partial(option, limits={">=": 0})
positive = partial(option, limits={">": 0})
node = partial(option, node=True)
path = partial(option, check=plain_path)
