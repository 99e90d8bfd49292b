"""Fill the defaults of the schema in where a configuration leaves a key out."""

import dataclasses
from typing import Any

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
    for name, one in declared(schema).items():
        users, default = rule_of(one).strategies, default_of(one)
        value = raw.get(name, default)
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            given = raw.get(name, {})
            filled[name] = _filled(given, type(default)) if isinstance(given, dict) else given
        elif name in raw or (value is not REQUIRED and (not users or chosen in users)):
            filled[name] = value
    return {**filled, **{name: value for name, value in raw.items() if name not in filled}}
