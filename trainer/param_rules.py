"""Rules of a config: which parameters are meant, and what they get."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.param_selectors import SELECTORS, Selector, parse_selector, patterns

DEFAULT = "default"  # the group of the parameters that no rule accepts
_OWN = (*SELECTORS, "name", "frozen", "layers", "layer_decay")


@dataclass(frozen=True, slots=True)
class Rule:
    """A named selector, and what its parameters get: hyper-parameters, or no training at all."""

    name: str
    key: str  # where it stands in the config
    selector: Selector
    overrides: Mapping[str, Any] = field(default_factory=dict)
    frozen: bool = False
    layer_decay: float | None = None
    layers: tuple[re.Pattern[str], ...] = ()


def parse_rules(rules: Any, key: str, problems: list[str]) -> list[Rule]:
    """Read a named dict (a null entry is dropped) or a list of rules; note what is wrong."""
    parsed = []
    for name, node in _named(rules, key, problems):
        if not isinstance(node, Mapping):
            problems.append(f"{key}.{name} must be a rule such as {{match: bias$}}, not {node!r}")
        elif name == DEFAULT or not re.fullmatch(r"[\w\-./]+", name):
            problems.append(
                f"{key}.{name}: a rule's name is made of letters, digits and ._-/, and is not"
                f" {DEFAULT!r}, the group of all parameters without a rule"
            )
        else:
            parsed.append(_parse_rule(name, node, f"{key}.{name}", problems))
    return parsed


def _named(rules: Any, key: str, problems: list[str]) -> list[tuple[str, Any]]:
    if rules is None:
        return []
    if isinstance(rules, Mapping):
        return [(str(name), node) for name, node in rules.items() if node is not None]
    if isinstance(rules, Sequence) and not isinstance(rules, str):
        named = [
            (str(node.get("name", f"rule_{i}")) if isinstance(node, Mapping) else f"rule_{i}", node)
            for i, node in enumerate(rules)
        ]
        if len(dict(named)) < len(named):
            problems.append(f"{key} gives the same name to two rules")
        return named
    problems.append(f"{key} must be a dict or a list of rules, not {rules!r}")
    return []


def _parse_rule(name: str, node: Mapping[str, Any], key: str, problems: list[str]) -> Rule:
    if not any(word in node for word in SELECTORS):
        problems.append(f"{key} selects nothing: give it {', '.join(SELECTORS[:-1])} or except")
    frozen = node.get("frozen", False)
    if not isinstance(frozen, bool):
        problems.append(f"{key}.frozen must be true or false, not {frozen!r}")
    return Rule(
        name,
        key,
        parse_selector({word: node[word] for word in SELECTORS if word in node}, key, problems),
        {word: value for word, value in node.items() if word not in _OWN},
        frozen is True,
        _parse_layer_decay(node, key, problems),
        patterns(node.get("layers"), f"{key}.layers", problems),
    )


def _parse_layer_decay(node: Mapping[str, Any], key: str, problems: list[str]) -> float | None:
    decay = node.get("layer_decay")
    if (decay is None) != (node.get("layers") is None):
        problems.append(f"{key} needs both layer_decay and layers, or neither")
    if decay is None:
        return None
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
        problems.append(f"{key}.layer_decay must be a number in (0, 1], not {decay!r}")
        return None
    return float(decay)
