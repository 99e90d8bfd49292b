"""How a configuration key is declared: all that is known of a key stands at its `option(...)`."""

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

# The `check` of a key returns what was expected instead; None if the value is valid.
Check = Callable[[Any], str | None]
REQUIRED: Any = ...  # the key has no default
_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le}


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its meaning, its default, its limits, and what depends on its value."""

    doc: str = ""
    default: Any = REQUIRED  # a section has its schema as the default
    limits: Mapping[str, float] = field(default_factory=dict)  # of numbers, such as {">=": 0}
    infinite: bool = False  # whether .inf is valid
    check: Check | None = None
    node: bool = False  # a dict must have a `_target_`
    named_nodes: bool = False  # or hold nodes by name
    nested_schema: type | None = None  # our keys in a node that takes further keys
    hint: str | None = None  # the way out of a value of another type, where it is a word of its own

    # The strategies with which the key has an effect; (): all.
    strategies: tuple[str, ...] = ()
    # Returns whether a value has no effect on an optimizer that computes its gradients itself, in
    # a closure (LBFGS). None: every value has its effect.
    idle_with_closure: Callable[[Any], bool] | None = None
    # False: the key changes the place, the speed or the output of a run, never what it computes.
    # A resumed run takes the new value.
    affects_result: bool = True
    # Entries of a section that do not affect the result.
    harmless_entries: tuple[str, ...] = ()
    # The key belongs to one start of a run. It does not affect the result either, and a resumed run
    # does not compare it.
    of_start: bool = False

    type: Any = Any  # the annotation

    @property
    def section(self) -> "type | None":
        """The schema of the section that the key stands for; None if it is no section."""
        for member in members(self.type):
            if dataclasses.is_dataclass(member):
                return typing.cast("type", member)
        return None

    @property
    def inner_schema(self) -> "type | None":
        """The schema of our keys below this one, in a section or in a node."""
        return self.section or self.nested_schema

    @property
    def limit(self) -> str:
        """The limits in words; empty if there are none."""
        return " and ".join(f"{sign} {limit}" for sign, limit in self.limits.items())

    def expects(self, value: object) -> str | None:
        """Return what was expected instead of `value`, whose type is valid; None if it is valid."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            is_allowed = self.infinite or isinstance(value, int) or math.isfinite(value)
            for sign, limit in self.limits.items():
                is_allowed = is_allowed and _COMPARE[sign](value, limit)
            if not is_allowed:
                return f"a number {self.limit}" if self.limits else "a finite number"
        if self.check is None or value is None:
            return None
        return self.check(value)


def option(default: Any, doc: str, **facts: Any) -> Any:
    """Declare a key of a dataclass: its default (REQUIRED: none), its meaning, further facts.

    `facts`: by the names of the fields of `Key`.
    """
    metadata = {"key": Key(doc, default, **facts)}
    if default is REQUIRED:
        return field(metadata=metadata)
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    if callable(default):  # the schema of a section
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(schema: type) -> Mapping[str, Key]:
    """Return the keys that a schema declares, in order. Other fields of its objects are no keys."""
    annotations = typing.get_type_hints(schema)
    keys = {}
    for one in dataclasses.fields(schema):
        if "key" in one.metadata:
            keys[one.name] = replace(one.metadata["key"], type=annotations[one.name])
    return keys


def is_open(schema: type) -> bool:
    """Return whether a section takes keys beyond those that its schema declares."""
    return any(one.name == "extra" for one in dataclasses.fields(schema))


def affects_result(schema: type, key: str) -> bool:
    """Return whether another value of a dotted key may change what a run computes."""
    name, _, rest = key.partition(".")
    declaration = declared(schema).get(name)
    if declaration is None:
        return True
    nested = declaration.nested_schema
    if nested is not None and rest.partition(".")[0] in declared(nested):
        return affects_result(nested, rest)
    if declaration.of_start or not declaration.affects_result:
        return False
    if not rest:
        return True
    if declaration.section is not None:
        return affects_result(declaration.section, rest)
    return rest.partition(".")[0] not in declaration.harmless_entries


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a union takes; of any other type the type itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def choices(annotation: Any) -> list[Any]:
    """Return the values that the literals of a type name."""
    values = list[Any]()
    for member in members(annotation):
        if typing.get_origin(member) is typing.Literal:
            values += typing.get_args(member)
    return values


def plain_name(value: str) -> str | None:
    """Require one component of a path: it names a folder under `runs/`."""
    is_plain = value.isprintable() and value == value.strip() and len(value.encode()) <= 100
    if not is_plain or value in ("", ".", "..") or "/" in value or "\\" in value:
        return "a plain folder name of at most 100 bytes, without / or .."
    return None


def plain_words(value: list[str]) -> str | None:
    """Require short texts that any tracker can show."""
    for word in value:
        if not word.strip() or not word.isprintable() or len(word) > 64:
            return "words of 1 to 64 characters"
    return None


def plain_path(value: str) -> str | None:
    """Require a path that the file system can hold."""
    if not value.strip() or not value.isprintable() or len(value.encode()) > 4000:
        return "the path of a file or folder"
    return None


def count_or_fraction(value: object) -> str | None:
    """Require a number of batches, or a fraction: a float in (0, 1]."""
    if isinstance(value, float) and not 0 < value <= 1:
        return "a number of batches (an integer), or a fraction in (0, 1]"
    return None


def duration(value: object) -> str | None:
    """Require seconds, or hours, minutes and seconds as '1:30:00'."""
    is_clock = isinstance(value, str)
    is_zero = re.search("[1-9]", str(value)) is None
    if is_zero or (is_clock and not re.fullmatch(r"\d+:[0-5]?\d:[0-5]?\d", str(value))):
        return "seconds, or a quoted 'hours:minutes:seconds' (up to 59 of these two), more than 0"
    return None


count = partial(option, limits={">=": 1})
natural = partial(option, limits={">=": 0})
positive = partial(option, limits={">": 0})
node = partial(option, node=True)
path = partial(option, check=plain_path)
