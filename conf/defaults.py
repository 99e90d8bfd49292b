"""Fill the defaults of the schema in where a configuration leaves a key out."""

import dataclasses
import typing
from typing import Any

from conf.check import dataclass_in
from conf.fields import REQUIRED, declared, default_of, rule_of
from conf.schema import Config


def fill_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a composed configuration with every key of ours, in the schema's order.

    Keys that have no effect with the chosen strategy stay out, unless they were written.
    """
    return _filled(raw, Config)


def _filled(raw: dict[str, Any], schema: type) -> dict[str, Any]:
    chosen = raw.get("name", "single")  # of a strategy; elsewhere no rule asks for it
    filled: dict[str, Any] = {}
    hints = typing.get_type_hints(schema)
    for name, one in declared(schema).items():
        users, default = rule_of(one).strategies, default_of(one)
        section = dataclass_in(hints[name])
        given = raw.get(name, {} if dataclasses.is_dataclass(default) else default)
        if section is not None and isinstance(given, dict):
            filled[name] = _filled(given, section)
        elif name in raw or (given is not REQUIRED and (not users or chosen in users)):
            filled[name] = given
    return {**filled, **{name: value for name, value in raw.items() if name not in filled}}
