"""Statistics of the training data that a checkpoint keeps, and data sets that are given them."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from conf.schema import Config
from trainer.targets.allow_list import TargetError, locate

_SPLITS = ("train", "val", "test")
_WORD = "statistics"


def data_facts(sets: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint keeps of data sets that have statistics; nothing of others."""
    known = {split: s for split, s in sets.items() if callable(getattr(s, _WORD, None))}
    if not known:
        return {}
    first = known.get("train", next(iter(known.values())))
    fingerprints = {split: str(dataset.fingerprint()) for split, dataset in known.items()}
    return {_WORD: first.statistics(), "fingerprints": fingerprints}


def takes_statistics(config: Config) -> bool:
    """Return whether a data set of a configuration can be given statistics."""
    return any(_takes(getattr(config.data, split)) for split in _SPLITS)


def with_statistics(config: Config, payload: Mapping[str, Any] | None) -> Config:
    """Return a configuration whose data sets are encoded by the statistics of a checkpoint."""
    state = {} if payload is None else payload["state"]
    if not (statistics := state.get("data", {}).get(_WORD)):
        return config
    nodes = {split: getattr(config.data, split) for split in _SPLITS}
    given: dict[str, Any] = {
        split: {_WORD: statistics, **node} for split, node in nodes.items() if _takes(node)
    }
    return replace(config, data=replace(config.data, **given))


def changed_data(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say which data sets are no longer those of a checkpoint."""
    before = then.get("fingerprints", {})
    changed = [s for s, mark in now.get("fingerprints", {}).items() if before.get(s, mark) != mark]
    if not changed:
        return []
    same = then.get(_WORD) == now.get(_WORD)
    how = "the same statistics as before" if same else "other statistics than before"
    names = ", ".join(f"data.{split}" for split in changed)
    return [f"{names}: the rows are not those of the checkpoint; they are encoded by {how}"]


def _takes(node: Any) -> bool:
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        return False
    try:
        return _WORD in inspect.signature(locate(node["_target_"])).parameters
    except (TargetError, TypeError, ValueError):
        return False
