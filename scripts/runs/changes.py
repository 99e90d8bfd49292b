"""What differs between two configurations of a run."""

from __future__ import annotations

from typing import Any

from conf.check import fill_defaults
from trainer.targets.signatures import is_default, takes

OF_A_START = ("run_dir", "resume", "dry_run", "sweep")  # differ between any two starts of a run
ABSENT = object()


def changes(saved: dict[str, Any], raw: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs; not what one of the two leaves out and the other has at its default.

    So a run goes on with a later version, whose new keys and arguments are at their defaults and
    whose new parts are empty.
    """
    before = fill_defaults(saved)
    found = changed_leaves(_without_start(before), _without_start(raw))
    return {
        key: (old, new)
        for key, (old, new) in found.items()
        if not (old is ABSENT and _at_default(raw, key))
        and not (new is ABSENT and _at_default(before, key))
    }


def _at_default(config: dict[str, Any], key: str) -> bool:
    *parents, name = key.split(".")
    node: Any = config
    given = False  # whether what is looked at goes to a target
    for parent, child in zip(parents, [*parents[1:], name], strict=True):
        node = node.get(parent) if isinstance(node, dict) else None
        given |= isinstance(node, dict) and "_target_" in node and takes(node, child)
    if given or not isinstance(node, dict):
        return is_default(node, name)
    return _is_empty(node.get(name))


def _is_empty(value: Any) -> bool:
    """Return whether a part of the configuration names nothing: null, {}, [] or a dict of these."""
    if isinstance(value, dict):
        return all(_is_empty(child) for child in value.values())
    return value is None or value == []


def _without_start(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out what differs between any two starts of a run."""
    return {key: value for key, value in config.items() if key not in OF_A_START}


def changed_leaves(old: Any, new: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the leaves of two nested dicts that differ, by dotted key.

    For transforms and optimizers a different order of keys is a difference as well.
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new and type(old) is type(new) else {key: (old, new)}
    found: dict[str, tuple[Any, Any]] = {}
    for name in {**old, **new}:
        child = f"{key}.{name}" if key else str(name)
        found |= changed_leaves(old.get(name, ABSENT), new.get(name, ABSENT), child)
    shared = [n for n in old if n in new]
    if shared != [n for n in new if n in old] and key.startswith(("transforms", "optimizer")):
        found[f"{key} (order)"] = (shared, [n for n in new if n in old])
    return found
