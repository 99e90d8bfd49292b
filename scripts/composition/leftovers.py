"""Find keys that nothing reads; drop the arguments of targets that were replaced."""

from collections.abc import Collection, Iterator
from typing import Any

from conf.errors import Problem, nearest
from conf.fields import declared
from conf.interpolation import references
from conf.schema import DataConfig, TransformsConfig
from scripts.composition.argument_names import OWN_KEYS, SPECIAL, accepted
from scripts.composition.origins import Origins

# Sections that may contain the user's own keys, read by interpolations.
_OPEN = {"data": DataConfig, "transforms": TransformsConfig}


def unread_problems(tree: dict[str, Any], origins: Origins) -> Iterator[Problem]:
    """Yield the keys of open sections that no file of the group has and no interpolation reads.

    `tree` is not resolved.
    """
    read = references(tree)
    for section, schema in _OPEN.items():
        given = tree.get(section)
        if not isinstance(given, dict):
            continue
        extra = [str(name) for name in given if name not in declared(schema)]
        known = [*declared(schema), *(n for n in extra if origins.declares(section, n))]
        for name in extra:
            key = f"{section}.{name}"
            if name not in known and not any(_overlap(key, other) for other in read):
                near = nearest(name, known)
                listed = f"nothing reads it; {section} has {', '.join(known)}"
                hint = f"did you mean {section}.{near}?" if near else listed
                yield Problem(key, "unknown key", hint)


def _overlap(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def without_leftovers(node: Any, origins: Origins, chosen: Collection[str], key: str = "") -> Any:
    """Return a tree whose nodes lack the arguments that came with a replaced `_target_`.

    If a command line or a later file replaces a node's `_target_`, the arguments that came with
    the earlier one are dropped. Arguments given elsewhere, or `chosen` in a group, are kept.
    """
    if isinstance(node, list):
        return [without_leftovers(v, origins, chosen, f"{key}.{i}") for i, v in enumerate(node)]
    if not isinstance(node, dict):
        return node
    gone = set(_leftovers(node, origins, chosen, key)) if "_target_" in node else set()
    return {
        name: without_leftovers(value, origins, chosen, f"{key}.{name}" if key else str(name))
        for name, value in node.items()
        if name not in gone
    }


def _leftovers(
    node: dict[str, Any], origins: Origins, chosen: Collection[str], key: str
) -> Iterator[str]:
    target, setters = node["_target_"], origins.setters(f"{key}._target_")
    if len(setters) < 2 or not isinstance(target, str) or (taken := accepted(target)) is None:
        return
    *earlier, last = setters
    own = [name for part in key.split(".") for name in OWN_KEYS.get(part, ())]
    for name in node:
        where = f"{key}.{name}"
        if name in (*taken, *own, *SPECIAL) or where in chosen:
            continue
        setters = origins.setters(where)
        if setters and all(n in earlier or (n != last and origins.within(n, key)) for n in setters):
            yield name
