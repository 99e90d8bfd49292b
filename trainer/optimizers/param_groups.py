"""Assign parameters to groups by ordered rules; the first rule that accepts one decides."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from conf.errors import ConfigError, Problem, did_you_mean, problems_at, raise_problems
from trainer.targets.allow_list import locate

DEFAULT = "default"  # the group of the parameters that no rule accepts
SELECTORS = ("match", "module", "kind", "except")
_OWN = (*SELECTORS, "name", "frozen", "layers", "layer_decay")

_NORM_NAME = re.compile(r"Norm([123]d)?$")
_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "conv": (
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    ),
    "linear": (nn.Linear, nn.Bilinear),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "attention": (nn.MultiheadAttention,),
    "recurrent": (nn.RNNBase, nn.RNNCellBase),
}
_SHAPES = {"vector": "ndim<=1", "matrix": "ndim==2", "kernel": "ndim>=3"}
_KINDS = ("bias", "weight", "norm", "embedding", *_SHAPES)
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


class Candidate(NamedTuple):
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
        if comparison := _NDIM.fullmatch(_SHAPES.get(kind, kind)):
            return bool(_COMPARE[comparison[1]](self.tensor.ndim, int(comparison[2])))
        if kind in ("bias", "weight"):  # also an LSTM's `bias_ih_l0`, attention's `in_proj_bias`
            word = re.compile(rf"{kind}$|{kind}_.*|.*_{kind}$")
            return any(word.match(name.rpartition(".")[2]) for name in self.names)
        return _one_is(kind, self.owners)


def _one_is(kind: str | type, modules: Iterable[nn.Module]) -> bool:
    if kind == "norm":  # by its name, or a base's: there is no base of all
        return any(_NORM_NAME.search(base.__name__) for m in modules for base in type(m).__mro__)
    classes = _MODULES[kind] if isinstance(kind, str) else kind
    return any(isinstance(m, classes) for m in modules)


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


Selector = Callable[[Candidate], object]


class GroupRule(NamedTuple):
    """A named selector, and the hyper-parameters of its parameters, or `frozen`."""

    name: str
    key: str  # its key in the config
    accepts: Selector
    overrides: Mapping[str, Any]
    frozen: bool = False
    layer_decay: float | None = None
    layers: tuple[re.Pattern[str], ...] = ()


class Claim(NamedTuple):
    """Which parameters an optimizer takes, and the rules that divide them."""

    key: str
    rules: Sequence[GroupRule]
    takes: Selector = lambda candidate: True


def first_rule(rules: Sequence[GroupRule], candidate: Candidate) -> GroupRule | None:
    """Return the first rule that accepts a parameter."""
    return next((rule for rule in rules if rule.accepts(candidate)), None)


class ParamGroup(NamedTuple):
    """Parameters that share hyper-parameters."""

    name: str
    key: str  # of the rule, for messages
    overrides: Mapping[str, Any]
    lr_factor: float  # from `layer_decay` and the depth of the layer
    parameters: dict[str, nn.Parameter]


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
        rule = None if owner is None else first_rule(claims[owner].rules, candidate)
        used |= {rule.key} if rule else set()
        if not candidate.tensor.requires_grad or (rule and rule.frozen):
            frozen[candidate.name] = candidate.tensor
            continue
        if owner is None:
            homeless.append(candidate.name)
            continue
        prefix, key, own = owner if len(claims) > 1 else "", claims[owner].key, claims[owner].rules
        group, place, depth = ParamGroup(prefix or DEFAULT, key, {}, 1.0, {}), len(own), 0
        if rule:
            depth, above = layers.get(rule.key, {}).get(candidate.name, (0, 0))
            layer = str(depth) if rule.layer_decay is not None else ""
            name = ".".join(filter(None, (prefix, rule.name, layer)))
            factor = (rule.layer_decay or 1.0) ** above
            group, place = ParamGroup(name, rule.key, rule.overrides, factor, {}), own.index(rule)
        members = groups.setdefault((owner, place, depth), group).parameters
        members[candidate.name] = candidate.tensor
    ordered = {name: [groups[key] for key in sorted(groups) if key[0] == name] for name in claims}
    problems += unused(rules, used, found)
    if homeless:
        problems.append(Problem("optimizer.optimizers", f"no optimizer takes {some(homeless)}"))
    for name, claim in claims.items():
        if not ordered[name]:
            problems.append(Problem(claim.key, "has no trainable parameter left"))
    names = [group.name for group in groups.values()]
    for name in sorted({name for name in names if names.count(name) > 1}):
        message = f"two parameter groups would be called {name!r}"
        problems.append(Problem("optimizer", message, "rename a rule"))
    raise_problems(problems, ParamGroupError)
    for tensor in frozen.values():
        tensor.requires_grad_(False)
    return ordered, frozen


def _layers(
    rule: GroupRule, model: nn.Module, found: Sequence[Candidate], problems: list[Problem]
) -> dict[str, tuple[int, int]]:
    # Of each parameter: the number of its layer from the input on, and of layers above it.
    places: Mapping[str, Any] = {c.name: _place(c.name, rule.layers) for c in found}
    if len(set(places.values()) - {None}) < 2:
        places = _timm_layers(model) or places
    numbers = sorted(set(places.values()) - {None})
    missing = [c.name for c in found if rule.accepts(c) and places.get(c.name) is None]
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
    for key, rule in {rule.key: rule for rule in rules if rule.key not in used}.items():
        if accepted := [c.name for c in found if rule.accepts(c)]:
            yield Problem(key, f"has no parameter left: earlier rules take {some(accepted)}")
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
    elif isinstance(rules, list | tuple):
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
    if decay is not None and not (type(decay) in (int, float) and 0 < decay <= 1):
        message = f"must be a number in (0, 1], not {decay!r}"
        problems.append(Problem(f"{key}.layer_decay", message))
    selector = {word: node[word] for word in SELECTORS if word in node}
    overrides = {word: value for word, value in node.items() if word not in _OWN}
    layers = _patterns(node.get("layers"), f"{key}.layers", problems)
    accepts = parse_selector(selector, key, problems)
    return GroupRule(name, key, accepts, overrides, frozen is True, decay, layers)


def parse_selector(node: Any, key: str, problems: list[Problem]) -> Selector:
    """Parse `match`, `module`, `kind`, all of which hold, and `except`, of which none does.

    Appends to `problems`.
    """
    hold, unless = _conditions(node, SELECTORS, key, problems), []
    if isinstance(node, Mapping) and node.get("except") is not None:
        unless = _conditions(node["except"], SELECTORS[:-1], f"{key}.except", problems)
    return lambda c: not any(holds(c) for holds in unless) and all(holds(c) for holds in hold)


def _conditions(
    node: Any, words: Sequence[str], key: str, problems: list[Problem]
) -> list[Selector]:
    if not isinstance(node, Mapping):
        message = f"must be a dict with {', '.join(words)}, not {node!r}"
        problems.append(Problem(key, message))
        return []
    problems += [
        Problem(f"{key}.{word}", "unknown key", did_you_mean(str(word), words))
        for word in node
        if word not in words
    ]
    patterns = _patterns(node.get("match"), f"{key}.match", problems)
    modules = _modules(node.get("module"), f"{key}.module", problems)
    kinds = _strings(node.get("kind"), f"{key}.kind", problems)
    for kind in kinds:
        if kind not in _KINDS and not _NDIM.fullmatch(kind):
            known = f"neither one of {', '.join(_KINDS)} nor a comparison such as ndim<=1"
            hint = did_you_mean(kind, _KINDS)
            problems.append(Problem(f"{key}.kind", f"{kind!r} is {known}", hint))
    conditions: list[Selector] = []
    if patterns:
        conditions.append(lambda c: any(p.search(name) for p in patterns for name in c.names))
    if modules:
        conditions.append(lambda c: any(_one_is(module, c.path) for module in modules))
    if kinds:
        conditions.append(lambda c: any(map(c.is_kind, kinds)))
    return conditions


def _strings(value: Any, key: str, problems: list[Problem]) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if values is None:
        return []
    if isinstance(values, list | tuple) and values and all(isinstance(v, str) for v in values):
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


def _modules(value: Any, key: str, problems: list[Problem]) -> list[str | type]:
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
            known_text = f"neither the import path of a class nor one of {', '.join(known)}"
            hint = did_you_mean(text, known)
            problems.append(Problem(key, f"{text!r} is {known_text}", hint))
    return modules
