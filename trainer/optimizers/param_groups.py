"""Assign parameters to groups by ordered rules; the first rule that accepts one decides."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from conf.errors import ConfigError, Problem, did_you_mean, problems_at, raise_problems
from trainer.internals import CONVOLUTIONS, NORMS
from trainer.targets.instantiate import locate

DEFAULT = "default"  # the group of the parameters that no rule accepts
SELECTORS = ("match", "module", "kind", "except")
_OWN = (*SELECTORS, "name", "frozen", "layers", "layer_decay")

_NORM_NAME = re.compile(r"Norm([123]d)?$")
_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "conv": CONVOLUTIONS,
    "linear": (nn.Linear, nn.Bilinear),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "attention": (nn.MultiheadAttention,),
    "recurrent": (nn.RNNBase, nn.RNNCellBase),
}
_KINDS = ("bias", "weight", "norm", "embedding", "vector", "matrix", "kernel")
_NDIM = re.compile(r"ndim\s*(<=|>=|==|<|>)\s*([0-9]{1,3})")
_COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}


class ParamGroupError(ConfigError, ValueError):
    """An `optimizer` section of the config is invalid."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A parameter with all its names (a tied one has several) and the modules that contain it."""

    names: tuple[str, ...]  # its state is saved under the first
    tensor: nn.Parameter
    owners: tuple[nn.Module, ...]  # the modules that it is registered in
    path: tuple[nn.Module, ...]  # the owners and all modules that contain them

    @property
    def name(self) -> str:
        """The name that its state is saved under."""
        return self.names[0]

    def is_kind(self, kind: str) -> bool:
        """Return whether it is of a kind: "bias", "norm", "matrix", "ndim<=1", ..."""
        dimensions = self.tensor.ndim
        if comparison := _NDIM.fullmatch(kind):
            return bool(_COMPARE[comparison[1]](dimensions, int(comparison[2])))
        if kind in ("bias", "weight"):  # also an LSTM's `bias_ih_l0`, attention's `in_proj_bias`
            word = re.compile(rf"{kind}$|{kind}_.*|.*_{kind}$")
            return any(word.match(name.rpartition(".")[2]) for name in self.names)
        if kind == "norm":
            return any(map(is_norm, self.owners))
        if kind == "embedding":
            return any(isinstance(m, _MODULES["embedding"]) for m in self.owners)
        return {"vector": dimensions <= 1, "matrix": dimensions == 2, "kernel": dimensions >= 3}[
            kind
        ]

    def is_inside(self, module: str | type) -> bool:
        """Return whether a module of this kind or class contains it."""
        if module == "norm":
            return any(map(is_norm, self.path))
        classes = _MODULES[module] if isinstance(module, str) else module
        return any(isinstance(m, classes) for m in self.path)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module normalizes; outside torch its name decides, as there is no base."""
    return isinstance(module, NORMS) or bool(_NORM_NAME.search(type(module).__name__))


def candidates(model: nn.Module, others: Mapping[str, nn.Module] | None = None) -> list[Candidate]:
    """Return each parameter of `model` once, in order of registration, then those of `others`."""
    modules: dict[str, nn.Module] = {}
    names: dict[nn.Parameter, list[str]] = {}
    for root, part in {"": model, **(others or {})}.items():
        modules |= dict(part.named_modules(prefix=root, remove_duplicate=False))
        for name, tensor in part.named_parameters(prefix=root, remove_duplicate=False):
            names.setdefault(tensor, []).append(name)
    return [
        Candidate(
            tuple(aliases),
            tensor,
            tuple(modules[alias.rpartition(".")[0]] for alias in aliases),
            tuple(modules[p] for alias in aliases for p in _prefixes(alias) if p in modules),
        )
        for tensor, aliases in names.items()
    ]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


@dataclass(frozen=True, slots=True)
class Selector:
    """Conditions on a parameter: all must hold, and none of those in `unless`."""

    patterns: tuple[re.Pattern[str], ...] = ()
    modules: tuple[str | type, ...] = ()
    kinds: tuple[str, ...] = ()
    unless: Selector | None = None

    def accepts(self, candidate: Candidate) -> bool:
        """Return whether the conditions hold for a parameter."""
        excepted = self.unless is not None and any(self.unless._conditions(candidate))
        return not excepted and all(self._conditions(candidate))

    def _conditions(self, candidate: Candidate) -> Iterator[bool]:
        if self.patterns:
            yield any(p.search(n) for p in self.patterns for n in candidate.names)
        if self.modules:
            yield any(map(candidate.is_inside, self.modules))
        if self.kinds:
            yield any(map(candidate.is_kind, self.kinds))


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
        return not self.only or first_rule(self.only, candidate) is not None


def first_rule(rules: Sequence[GroupRule], candidate: Candidate) -> GroupRule | None:
    """Return the first rule that accepts a parameter."""
    return next((rule for rule in rules if rule.selector.accepts(candidate)), None)


@dataclass(slots=True)
class ParamGroup:
    """Parameters that share hyper-parameters."""

    name: str
    key: str  # of the rule, for messages
    overrides: Mapping[str, Any]
    lr_factor: float = 1.0  # from `layer_decay` and the depth of the layer
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def divide(
    model: nn.Module,
    claims: Mapping[str, Claim],
    others: Mapping[str, nn.Module] | None = None,
) -> tuple[dict[str, list[ParamGroup]], dict[str, nn.Parameter]]:
    """Assign each trainable parameter to the first claim that takes it, and to one group (I8).

    Returns the groups of each claim and the frozen parameters; those of rules with `frozen` are
    frozen here. With several claims, the name of a group begins with that of its optimizer.
    `others`: modules besides the model that are trained (those of a task), by name. Raises
    `ParamGroupError` with all problems.
    """
    found = candidates(model, others)
    problems: list[Problem] = []
    rules = [rule for claim in claims.values() for rule in claim.rules]
    layers = {r.key: _layers(r, model, found, problems) for r in rules if r.layer_decay is not None}
    groups: dict[tuple[str, int, int], ParamGroup] = {}  # by optimizer, rule and layer
    frozen: dict[str, nn.Parameter] = {}
    used: set[str] = set()
    homeless: list[str] = []
    for candidate in found:
        owner = next((name for name, claim in claims.items() if claim.takes(candidate)), None)
        claim = None if owner is None else claims[owner]
        rule = claim and first_rule(claim.rules, candidate)
        if rule:
            used.add(rule.key)
        if not candidate.tensor.requires_grad or (rule and rule.frozen):
            frozen[candidate.name] = candidate.tensor
        elif owner is None or claim is None:
            homeless.append(candidate.name)
        else:
            prefix = owner if len(claims) > 1 else ""
            place, group = len(claim.rules), ParamGroup(prefix or DEFAULT, claim.key, {})
            depth = 0
            if rule:
                depth, above = layers.get(rule.key, {}).get(candidate.name, (0, 0))
                layer = str(depth) if rule.layer_decay is not None else ""
                name = ".".join(filter(None, (prefix, rule.name, layer)))
                factor = (rule.layer_decay or 1.0) ** above
                place = claim.rules.index(rule)
                group = ParamGroup(name, rule.key, rule.overrides, factor)
            members = groups.setdefault((owner, place, depth), group).parameters
            members[candidate.name] = candidate.tensor
    ordered = {name: [groups[key] for key in sorted(groups) if key[0] == name] for name in claims}
    problems += unused(rules, used, found)
    if homeless:
        problems.append(Problem("optimizer.optimizers", f"no optimizer takes {some(homeless)}"))
    problems += _empty_or_double(claims, ordered)
    raise_problems(problems, ParamGroupError)
    for tensor in frozen.values():
        tensor.requires_grad_(False)
    return ordered, frozen


def _empty_or_double(
    claims: Mapping[str, Claim], groups: Mapping[str, Sequence[ParamGroup]]
) -> Iterator[Problem]:
    for name, claim in claims.items():
        if not groups[name]:
            yield Problem(claim.key, "has no trainable parameter left")
    names = [group.name for members in groups.values() for group in members]
    for name in sorted({name for name in names if names.count(name) > 1}):
        message = f"two parameter groups would be called {name!r}"
        yield Problem("optimizer", message, "rename a rule")


def _layers(
    rule: GroupRule, model: nn.Module, found: Sequence[Candidate], problems: list[Problem]
) -> dict[str, tuple[int, int]]:
    # Of each parameter: the number of its layer from the input on, and of layers above it.
    places: Mapping[str, Any] = {c.name: _place(c.name, rule.layers) for c in found}
    if len(set(places.values()) - {None}) < 2:
        places = _timm_layers(model) or places
    numbers = sorted(set(places.values()) - {None})
    missing = [c.name for c in found if rule.selector.accepts(c) and places.get(c.name) is None]
    if missing:
        problems.append(Problem(f"{rule.key}.layers", f"no pattern matches {missing[0]}"))
    elif len(numbers) < 2:
        hint = r"give patterns from the input on, such as blocks\.(\d+)"
        problems.append(Problem(f"{rule.key}.layers", "finds one layer only", hint))
    order = {place: (i, len(numbers) - 1 - i) for i, place in enumerate(numbers)}
    return {name: order[place] for name, place in places.items() if place is not None}


def _place(name: str, layers: Sequence[re.Pattern[str]]) -> tuple[int, int] | None:
    # A pattern with a capture group stands for one layer for each number that it matches.
    for i, pattern in enumerate(layers):
        if found := pattern.search(name):
            number = found.group(1) if pattern.groups else None
            return i, int(number) if number and number.isdigit() else 0
    return None


def _timm_layers(model: nn.Module) -> dict[str, int]:
    # timm's models say which layer a parameter belongs to.
    for prefix, module in model.named_modules():
        if hasattr(module, "group_matcher"):
            from timm.models import group_parameters

            matcher = module.group_matcher(coarse=False)
            layers = group_parameters(module, matcher, reverse=True)
            return {".".join(filter(None, (prefix, name))): n for name, n in layers.items()}
    return {}


def unused(
    rules: Sequence[GroupRule], used: set[str], found: Sequence[Candidate]
) -> Iterator[Problem]:
    """Yield the rules whose keys are not in `used`, and why they are left without a parameter."""
    for key, rule in {rule.key: rule for rule in rules}.items():
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


def parse_rules(rules: Any, key: str, problems: list[Problem]) -> list[GroupRule]:
    """Parse a dict (null entries are dropped) or a list of rules; append to `problems`."""
    named: list[tuple[str, Any]] = []
    if isinstance(rules, Mapping):
        named = [(str(name), node) for name, node in rules.items() if node is not None]
    elif isinstance(rules, Sequence) and not isinstance(rules, str):
        for i, node in enumerate(rules):
            own = node.get("name") if isinstance(node, Mapping) else None
            named.append((str(own or f"rule_{i}"), node))
        if len(dict(named)) < len(named):
            problems.append(Problem(key, "gives the same name to two rules"))
    elif rules is not None:
        problems.append(Problem(key, f"must be a dict or a list of rules, not {rules!r}"))
    parsed = []
    for name, node in named:
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


def _parse_rule(name: str, node: Mapping[str, Any], key: str, problems: list[Problem]) -> GroupRule:
    if not any(word in node for word in SELECTORS):
        hint = f"give it {', '.join(SELECTORS[:-1])} or except"
        problems.append(Problem(key, "selects nothing", hint))
    frozen, decay = node.get("frozen", False), node.get("layer_decay")
    if not isinstance(frozen, bool):
        problems.append(Problem(f"{key}.frozen", f"must be true or false, not {frozen!r}"))
    if (decay is None) != (node.get("layers") is None):
        problems.append(Problem(key, "needs both layer_decay and layers, or neither"))
    number = isinstance(decay, int | float) and not isinstance(decay, bool)
    if decay is not None and not (number and 0 < decay <= 1):
        message = f"must be a number in (0, 1], not {decay!r}"
        problems.append(Problem(f"{key}.layer_decay", message))
    return GroupRule(
        name,
        key,
        parse_selector({word: node[word] for word in SELECTORS if word in node}, key, problems),
        {word: value for word, value in node.items() if word not in _OWN},
        frozen is True,
        decay,
        _patterns(node.get("layers"), f"{key}.layers", problems),
    )


def parse_selector(node: Any, key: str, problems: list[Problem]) -> Selector:
    """Parse `match`, `module`, `kind` and `except`; append to `problems`."""
    if not isinstance(node, Mapping):
        message = f"must be a dict with {', '.join(SELECTORS)}, not {node!r}"
        problems.append(Problem(key, message))
        return Selector()
    problems += [
        Problem(f"{key}.{word}", "unknown key", did_you_mean(str(word), SELECTORS))
        for word in node
        if word not in SELECTORS
    ]
    kinds = _strings(node.get("kind"), f"{key}.kind", problems)
    problems += [
        Problem(
            f"{key}.kind",
            f"{kind!r} is neither one of {', '.join(_KINDS)} nor a comparison such as ndim<=1",
            did_you_mean(kind, _KINDS),
        )
        for kind in kinds
        if kind not in _KINDS and not _NDIM.fullmatch(kind)
    ]
    unless = node.get("except")
    return Selector(
        _patterns(node.get("match"), f"{key}.match", problems),
        _modules(node.get("module"), f"{key}.module", problems),
        tuple(kinds),
        None if unless is None else parse_selector(unless, f"{key}.except", problems),
    )


def _strings(value: Any, key: str, problems: list[Problem]) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if values is None:
        return []
    if isinstance(values, Sequence) and values and all(isinstance(v, str) for v in values):
        return list(values)
    problems.append(Problem(key, f"must be a string or a list of strings, not {value!r}"))
    return []


def _patterns(value: Any, key: str, problems: list[Problem]) -> tuple[re.Pattern[str], ...]:
    compiled = []
    for text in _strings(value, key, problems):
        try:
            compiled.append(re.compile(text))
        except re.error as error:
            problems.append(Problem(key, f"{text!r} is not a valid regular expression: {error}"))
    return tuple(compiled)


def _modules(value: Any, key: str, problems: list[Problem]) -> tuple[str | type, ...]:
    modules: list[str | type] = []
    known = ("norm", *_MODULES)
    for text in _strings(value, key, problems):
        try:
            with problems_at(key):
                found = text if text in known else locate(text) if "." in text else None
        except ConfigError as error:
            problems += error.problems
            continue
        except Exception as error:  # whatever a user's module raises when imported
            problems.append(Problem(key, f"{text!r} cannot be imported: {error}"))
            continue
        if isinstance(found, str | type):
            modules.append(found)
        else:
            message = (
                f"{text!r} is neither the import path of a class nor one of {', '.join(known)}"
            )
            problems.append(Problem(key, message, did_you_mean(text, known)))
    return tuple(modules)
