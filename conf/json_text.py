"""JSON from a place that is not trusted: read in linear time, to a bounded depth."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from regimen.conf.errors import shortened

MAX_DEPTH = 40  # as of YAML
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)


def plain_json(text: str | bytes, finite: bool = False) -> Any:
    """Return the values of a JSON text. With `finite`, NaN and infinity are refused.

    Raises ValueError for a text that is no JSON, or is nested deeper than Python can walk over.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    # Brackets are counted before their depth is computed: most texts have few.
    has_many = text.count("[") + text.count("{") > MAX_DEPTH
    if has_many and nesting(re.findall(r"[\[\]{}]", _QUOTED.sub("", text))) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if finite:
        return json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_number)
    return json.loads(text)


def form_fault(values: Mapping[str, Any], form: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the values of an object; None if they have the types of `form`.

    `form`: a type or a union of types (`int | None`) by name. True and false are no numbers.
    """
    for name, expected in form.items():
        if name not in values:
            return f"it has no {name!r}"
        value = values[name]
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            return f"its {name!r} cannot be {shortened(repr(value), 80)}"
    return None


def nesting(characters: Iterable[str]) -> int:
    """Return how deep the brackets among some characters are nested."""
    depth = 0
    deepest = 0
    for character in characters:
        if character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        deepest = max(deepest, depth)
    return deepest


def _number(text: str) -> int | float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite number")
    return int(text) if text.lstrip("-").isdecimal() else value
