"""In which keys the configurations of runs differ."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conf.yaml_dump import word
from scripts.history.entry import RunEntry

_ABSENT = "-"
_TARGET = "_target_"


def varied(values: Sequence[Any], key: str = "", deep: bool = False) -> Iterator[str]:
    """Yield the keys at which nested dicts differ.

    A node whose `_target_` differs is one difference, unless `deep`: its keys mean other things.
    """
    if len({repr(value) for value in values}) == 1:  # by its text: 1 is not true
        return
    nodes = [value for value in values if isinstance(value, dict)]
    alike = len({repr(node.get(_TARGET)) for node in nodes}) == 1
    if len(nodes) < len(values) or not (deep or alike):
        yield key
        return
    for name in dict.fromkeys(name for node in nodes for name in node):
        inner = f"{key}.{name}" if key else str(name)
        yield from varied([node.get(name, _ABSENT) for node in nodes], inner, deep)


def differences(runs: Sequence[RunEntry]) -> list[dict[str, Any]]:
    """Return for each run its values of the keys that differ among the runs of its name."""
    keys = {}
    for name in {run.name for run in runs}:
        configs = [run.config for run in runs if run.name == name and run.config]
        keys[name] = list(varied(configs)) if configs else []
    return [{key: at(run.config, key) for key in keys[run.name]} for run in runs]


def at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; "-" where there is none."""
    node: Any = config
    for name in key.split("."):
        if not isinstance(node, dict):
            return _ABSENT
        node = next((node[k] for k in node if str(k) == name), _ABSENT)
    return node


def shown(value: Any) -> str:
    """Return a value as the command line writes it; of a node its target."""
    return str(value.get(_TARGET, value)) if isinstance(value, dict) else word(value)
