"""Assign parameters to groups by ordered rules; the first rule that accepts one decides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from conf.errors import ConfigError, Problem, raise_problems
from trainer.optimizers.selectors import (
    SELECTORS,
    Candidate,
    Layers,
    Selector,
    candidates,
    parse_selector,
    patterns,
)


class ParamGroupError(ConfigError, ValueError):
    """An `optimizer` section of the config is invalid."""


@dataclass(slots=True)
class ParamGroup:
    """Parameters that share hyper-parameters."""

    name: str
    key: str  # of the rule, for messages
    overrides: Mapping[str, Any]
    lr_factor: float = 1.0  # from `layer_decay` and the depth of the layer
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Whether the group's hyper-parameters differ from the optimizer's."""
        return bool(self.overrides) or self.lr_factor != 1.0


@dataclass(frozen=True, slots=True)
class Claim:
    """Which parameters an optimizer takes, and the rules that divide them."""

    key: str
    rules: Sequence[GroupRule]
    selector: Selector | None = None
    # Without a selector: take only what these rules accept, instead of all that is left.
    only: Sequence[GroupRule] = ()

    def takes(self, candidate: Candidate) -> bool:
        """Return whether the optimizer trains a parameter."""
        if self.selector is not None:
            return self.selector.accepts(candidate)
        return not self.only or any(rule.selector.accepts(candidate) for rule in self.only)

    def rule_of(self, candidate: Candidate) -> GroupRule | None:
        """Return the first rule that accepts a parameter."""
        return next((rule for rule in self.rules if rule.selector.accepts(candidate)), None)


@dataclass(frozen=True, slots=True)
class Division:
    """A model's parameters: the groups of each optimizer, and the frozen parameters."""

    groups: dict[str, list[ParamGroup]]
    frozen: dict[str, nn.Parameter]


def divide(
    model: nn.Module,
    claims: Mapping[str, Claim],
    others: Mapping[str, nn.Module] | None = None,
) -> Division:
    """Assign each trainable parameter to the first claim that takes it, and to one group (I8).

    Freezes the parameters of rules with `frozen`. With several claims, the name of a group begins
    with that of its optimizer. `others`: modules besides the model that are trained (those of a
    task), by name.
    """
    found = candidates(model, others)
    problems: list[Problem] = []
    layers = Layers(found, problems)
    groups: dict[_Slot, ParamGroup] = {}
    frozen: dict[str, nn.Parameter] = {}
    used: set[str] = set()
    homeless: list[str] = []
    for candidate in found:
        owner = next((name for name, claim in claims.items() if claim.takes(candidate)), None)
        rule = None if owner is None else claims[owner].rule_of(candidate)
        if rule is not None:
            used.add(rule.key)
        if not candidate.tensor.requires_grad or (rule is not None and rule.frozen):
            frozen[candidate.name] = candidate.tensor
        elif owner is None:
            homeless.append(candidate.name)
        else:
            slot = _slot(owner, claims[owner], rule, candidate, layers)
            if slot not in groups:
                prefix = owner if len(claims) > 1 else ""
                groups[slot] = _new_group(prefix, claims[owner], rule, slot, layers)
            groups[slot].parameters[candidate.name] = candidate.tensor
    ordered = {
        name: [groups[slot] for slot in sorted(groups) if slot.owner == name] for name in claims
    }
    objections = _objections(claims, ordered, used, homeless, found)
    raise_problems([*problems, *objections], ParamGroupError)
    for tensor in frozen.values():
        tensor.requires_grad_(False)
    return Division(ordered, frozen)


class _Slot(NamedTuple):
    """Position of a group: its optimizer, its rule's index (no rule comes last), its layer."""

    owner: str
    rank: int
    depth: int


def _slot(
    owner: str, claim: Claim, rule: GroupRule | None, candidate: Candidate, layers: Layers
) -> _Slot:
    if rule is None:
        return _Slot(owner, len(claim.rules), 0)
    rank = next(i for i, other in enumerate(claim.rules) if other is rule)
    depth = layers.depth(candidate, rule.layers, rule.key) if rule.layer_decay is not None else 0
    return _Slot(owner, rank, depth)


def _new_group(
    prefix: str, claim: Claim, rule: GroupRule | None, slot: _Slot, layers: Layers
) -> ParamGroup:
    if rule is None:
        return ParamGroup(prefix or DEFAULT, claim.key, {})
    parts = [prefix, rule.name, *([] if rule.layer_decay is None else [str(slot.depth)])]
    name = ".".join(part for part in parts if part)
    # The factor is 1 for the last layer and decreases towards the input.
    below = 0 if rule.layer_decay is None else layers.count(rule.layers) - 1 - slot.depth
    return ParamGroup(name, rule.key, rule.overrides, (rule.layer_decay or 1.0) ** below)


def _objections(
    claims: Mapping[str, Claim],
    groups: Mapping[str, Sequence[ParamGroup]],
    used: set[str],
    homeless: Sequence[str],
    found: Sequence[Candidate],
) -> Iterator[Problem]:
    yield from unused(claims, used, found)
    if homeless:
        yield Problem("optimizer.optimizers", f"no optimizer takes {some(homeless)}")
    for name, members in groups.items():
        if not members:
            yield Problem(claims[name].key, "has no trainable parameter left")
    names = [group.name for members in groups.values() for group in members]
    for name in sorted({name for name in names if names.count(name) > 1}):
        message = f"two parameter groups would be called {name!r}"
        yield Problem("optimizer", message, "rename a rule")


def unused(
    claims: Mapping[str, Claim], used: set[str], found: Sequence[Candidate]
) -> Iterator[Problem]:
    """Yield the rules whose keys are not in `used`, and why they are left without a parameter."""
    rules = {rule.key: rule for claim in claims.values() for rule in claim.rules}
    for key, rule in rules.items():
        if key in used:
            continue
        accepted = [c.name for c in found if rule.selector.accepts(c)]
        if accepted:
            message = f"has no parameter left: earlier rules take {some(accepted)}"
            yield Problem(key, message)
        else:
            hint = f"the model has {some([c.name for c in found])}"
            yield Problem(key, "matches no parameter", hint)


def some(names: Sequence[str], limit: int = 8) -> str:
    """Join the first `limit` names, with the number of the others."""
    more = f" (+{len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


DEFAULT = "default"  # the group of the parameters that no rule accepts
_OWN = (*SELECTORS, "name", "frozen", "layers", "layer_decay")


@dataclass(frozen=True, slots=True)
class GroupRule:
    """A named selector, and the hyper-parameters of its parameters, or `frozen`."""

    name: str
    key: str  # its key in the config
    selector: Selector
    overrides: Mapping[str, Any] = field(default_factory=dict)
    frozen: bool = False
    layer_decay: float | None = None
    layers: tuple[re.Pattern[str], ...] = ()


def parse_rules(rules: Any, key: str, problems: list[Problem]) -> list[GroupRule]:
    """Parse a dict (null entries are dropped) or a list of rules; append to `problems`."""
    parsed = []
    for name, node in _named(rules, key, problems):
        if not isinstance(node, Mapping):
            message = f"must be a rule such as {{match: bias$}}, not {node!r}"
            problems.append(Problem(f"{key}.{name}", message))
        elif name == DEFAULT or not re.fullmatch(r"[\w\-./]+", name):
            message = (
                "the name of a rule may have letters, digits and ._-/ only, and must not be"
                f" {DEFAULT!r}, the group of the parameters without a rule"
            )
            problems.append(Problem(f"{key}.{name}", message))
        else:
            parsed.append(_parse_rule(name, node, f"{key}.{name}", problems))
    return parsed


def _named(rules: Any, key: str, problems: list[Problem]) -> list[tuple[str, Any]]:
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
            problems.append(Problem(key, "gives the same name to two rules"))
        return named
    problems.append(Problem(key, f"must be a dict or a list of rules, not {rules!r}"))
    return []


def _parse_rule(name: str, node: Mapping[str, Any], key: str, problems: list[Problem]) -> GroupRule:
    if not any(word in node for word in SELECTORS):
        hint = f"give it {', '.join(SELECTORS[:-1])} or except"
        problems.append(Problem(key, "selects nothing", hint))
    frozen = node.get("frozen", False)
    if not isinstance(frozen, bool):
        problems.append(Problem(f"{key}.frozen", f"must be true or false, not {frozen!r}"))
    return GroupRule(
        name,
        key,
        parse_selector({word: node[word] for word in SELECTORS if word in node}, key, problems),
        {word: value for word, value in node.items() if word not in _OWN},
        frozen is True,
        _parse_layer_decay(node, key, problems),
        patterns(node.get("layers"), f"{key}.layers", problems),
    )


def _parse_layer_decay(node: Mapping[str, Any], key: str, problems: list[Problem]) -> float | None:
    decay = node.get("layer_decay")
    if (decay is None) != (node.get("layers") is None):
        problems.append(Problem(key, "needs both layer_decay and layers, or neither"))
    if decay is None:
        return None
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
        message = f"must be a number in (0, 1], not {decay!r}"
        problems.append(Problem(f"{key}.layer_decay", message))
        return None
    return float(decay)
