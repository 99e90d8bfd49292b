"""Assign parameters to groups by ordered rules; the first rule that accepts one decides."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import eq, ge, gt, le, lt
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch import nn

from regimen.conf.errors import (
    ConfigError,
    Problem,
    collect_problems,
    did_you_mean,
    problems_at,
    raise_problems,
    truncated_list,
)
from regimen.conf.patterns import Pattern
from regimen.trainer.targets.allow_list import locate

DEFAULT = "default"  # the group of the parameters that no rule accepts
SELECTORS = ("match", "module", "kind", "except")
_OWN = (*SELECTORS, "frozen", "layers", "layer_decay")

_NORM_NAME = re.compile(r"Norm([123]d)?$")
_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "norm": (),  # by the name of the class, or of a base: there is no base of all
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
_COMPARE = {"<": lt, "<=": le, "==": eq, ">=": ge, ">": gt}


def refuse(key: str, message: str, hint: str | None = None) -> NoReturn:
    """Raise `ConfigError` for one key."""
    raise ConfigError(key, message, hint)


class Candidate(NamedTuple):
    """A parameter with all its names (a tied one has several) and the modules that contain it."""

    names: list[str]
    tensor: nn.Parameter
    owners: list[nn.Module]  # the modules that it is registered in
    path: list[nn.Module]  # the owners and all modules that contain them

    @property
    def name(self) -> str:
        """The name that its state is saved under."""
        return self.names[0]


Selector = Callable[[Candidate], object]
T = TypeVar("T")


def candidates(model: nn.Module, others: Mapping[str, nn.Module] | None = None) -> list[Candidate]:
    """Return each parameter of `model` once, in order of registration, then those of `others`."""
    found = dict[nn.Parameter, Candidate]()
    for root, part in {"": model, **(others or {})}.items():
        for place, module in part.named_modules(prefix=root, remove_duplicate=False):
            for tensor in module.parameters():
                found.setdefault(tensor, Candidate([], tensor, [], [])).path.append(module)
            for name, tensor in module.named_parameters(place, False, remove_duplicate=False):
                found[tensor].names.append(name)
                found[tensor].owners.append(module)
    return [*found.values()]


class GroupRule(NamedTuple):
    """A named selector, and the hyper-parameters of its parameters, or `frozen`."""

    name: str
    key: str  # its key in the config
    accepts: Selector = lambda candidate: True
    overrides: Mapping[str, Any] = {}
    frozen: bool = False
    layer_decay: float = 1.0
    layers: Sequence[Pattern] = ()


class Claim(NamedTuple):
    """Which parameters an optimizer takes, and its rules, of which the last accepts all others."""

    takes: Selector
    rules: Sequence[GroupRule]


class ParamGroup(NamedTuple):
    """Parameters that share hyper-parameters."""

    name: str
    rule: GroupRule
    lr_factor: float  # from `layer_decay` and the depth of the layer
    parameters: dict[str, nn.Parameter]


def first_rule(rules: Sequence[GroupRule], candidate: Candidate) -> GroupRule | None:
    """Return the first rule that accepts a parameter."""
    return next((rule for rule in rules if rule.accepts(candidate)), None)


def divide(
    model: nn.Module, found: Sequence[Candidate], claims: Mapping[str, Claim]
) -> dict[str, list[ParamGroup]]:
    """Assign each trainable parameter to the first claim that takes it, and to one group (I8).

    Returns the groups of each claim; what rules with `frozen` accept is frozen here. With several
    claims, the name of a group begins with that of its optimizer. Raises `ConfigError` with all
    problems.
    """
    rules = [rule for claim in claims.values() for rule in claim.rules[:-1]]
    layers = {rule.key: _layers(rule, model, found) for rule in rules if rule.layers}
    groups = dict[tuple[str, int, int], ParamGroup]()  # by optimizer, rule and layer
    frozen = []
    used = set()
    homeless = []
    for candidate in found:
        owner = next((name for name, claim in claims.items() if claim.takes(candidate)), "")
        rule = first_rule(claims[owner].rules if owner else (), candidate)
        used |= {rule.key} if rule else set()
        if not candidate.tensor.requires_grad or (rule and rule.frozen):
            frozen.append(candidate.tensor)
        elif rule:
            depth, factor = layers.get(rule.key, {}).get(candidate.name, (0, 1.0))
            layer = str(depth) if rule.layers else ""
            words = (owner if len(claims) > 1 else "", rule.name, layer)
            group = ParamGroup(".".join(filter(None, words)) or DEFAULT, rule, factor, {})
            place = owner, claims[owner].rules.index(rule), depth
            groups.setdefault(place, group).parameters[candidate.name] = candidate.tensor
        else:
            homeless.append(candidate.name)
    ordered = {name: [groups[key] for key in sorted(groups) if key[0] == name] for name in claims}
    problems = list(unused(rules, used, found))
    if homeless:
        problems.append(
            Problem("optimizer.optimizers", f"no optimizer takes {truncated_list(homeless)}")
        )
    for name, claim in claims.items():
        if not ordered[name]:
            hint = None
            if not found:
                hint = (
                    "the model has none: layers in a Python list or dict are not its own, those "
                    "in nn.ModuleList or nn.ModuleDict are"
                )
            problems.append(Problem(claim.rules[-1].key, "has no trainable parameter left", hint))
    raise_problems(problems)
    for tensor in frozen:
        tensor.requires_grad_(False)
    return ordered


def _layers(
    rule: GroupRule, model: nn.Module, found: Sequence[Candidate]
) -> dict[str, tuple[int, float]]:
    # Of each parameter: the number of its layer from the input on, and the factor of its rate.
    places: dict[str, Any] = {c.name: p for c in found if (p := _place(c.name, rule.layers))}
    if len({*places.values()}) < 2:
        places = _timm_layers(model) or places
    for candidate in found:
        if rule.accepts(candidate) and candidate.name not in places:
            refuse(f"{rule.key}.layers", f"no pattern matches {candidate.name}")
    layers = sorted({*places.values()})
    if len(layers) < 2:
        hint = r"give patterns from the input on, such as blocks\.(\d+)"
        refuse(f"{rule.key}.layers", "finds one layer only", hint)
    depths = {name: layers.index(place) for name, place in places.items()}
    return {n: (d, rule.layer_decay ** (len(layers) - 1 - d)) for n, d in depths.items()}


def _place(name: str, layers: Sequence[Pattern]) -> tuple[int, int] | None:
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

            layers = group_parameters(module, module.group_matcher(coarse=False), reverse=True)
            return {f"{prefix}.{name}".removeprefix("."): n for name, n in layers.items()}
    return {}


def unused(
    rules: Sequence[GroupRule], used: set[str], found: Sequence[Candidate]
) -> Iterator[Problem]:
    """Yield the rules whose keys are not in `used`, and why they are left without a parameter."""
    for key, rule in {rule.key: rule for rule in rules if rule.key not in used}.items():
        if accepted := [c.name for c in found if rule.accepts(c)]:
            yield Problem(
                key, f"has no parameter left: earlier rules take {truncated_list(accepted)}"
            )
        else:
            hint = f"the model has {truncated_list([c.name for c in found])}"
            yield Problem(key, "matches no parameter", hint)


def parse_rules(rules: Any, key: str) -> list[GroupRule]:
    """Parse a dict of rules, of which null entries are dropped.

    Raises `ConfigError` with the first problem of each rule.
    """
    if not isinstance(rules, Mapping | None):
        refuse(key, f"must be a dict of rules, not {rules!r}")
    parsed, problems = [], list[Problem]()
    for name, node in (rules or {}).items():
        with collect_problems(problems):
            if node is not None:
                parsed.append(_parse_rule(str(name), node, f"{key}.{name}"))
    raise_problems(problems)
    return parsed


def _parse_rule(name: str, node: Any, key: str) -> GroupRule:
    if name == DEFAULT or not re.fullmatch(r"[\w\-/]+", name):
        refuse(key, f"a rule's name has letters, digits and _-/ only, and is not {DEFAULT!r}")
    if not isinstance(node, Mapping):
        refuse(key, f"must be a rule such as {{match: bias$}}, not {node!r}")
    selector = {word: node[word] for word in SELECTORS if word in node}
    if not selector:
        refuse(key, "selects nothing", f"give it {', '.join(SELECTORS[:-1])} or except")
    frozen, decay, layers = node.get("frozen", False), node.get("layer_decay"), node.get("layers")
    if not isinstance(frozen, bool):
        refuse(f"{key}.frozen", f"must be true or false, not {frozen!r}")
    if (decay is None) != (layers is None):
        refuse(key, "needs both layer_decay and layers, or neither")
    if decay is not None and not (type(decay) in (int, float) and 0 < decay <= 1):
        refuse(f"{key}.layer_decay", f"must be a number in (0, 1], not {decay!r}")
    patterns = [] if layers is None else _each(Pattern, layers, f"{key}.layers")
    overrides = {word: value for word, value in node.items() if word not in _OWN}
    accepts = parse_selector(selector, key)
    return GroupRule(name, key, accepts, overrides, frozen, decay or 1.0, patterns)


def parse_selector(node: Any, key: str) -> Selector:
    """Parse `match`, `module`, `kind`, all of which hold, and `except`, of which none does.

    Raises `ConfigError`.
    """
    hold, unless = _tests(node, SELECTORS, key), []
    if node.get("except") is not None:
        unless = _tests(node["except"], SELECTORS[:-1], f"{key}.except")
    return lambda c: (
        all(any(holds(c) for holds in tests) for tests in hold)
        and not any(holds(c) for tests in unless for holds in tests)
    )


def _tests(node: Any, words: Sequence[str], key: str) -> list[list[Selector]]:
    # For each key the tests of its values, of which one must hold.
    if not isinstance(node, Mapping):
        refuse(key, f"must be a dict with {', '.join(words)}, not {node!r}")
    for word in node.keys() - {*words}:
        refuse(f"{key}.{word}", "unknown key", did_you_mean(str(word), words))
    makers = {"match": _matches, "module": _lies_in, "kind": _is_kind}
    return [
        _each(makers[word], value, f"{key}.{word}")
        for word, value in node.items()
        if word in makers and value is not None
    ]


def _each(make: Callable[[str], T], value: Any, key: str) -> list[T]:
    # What is made of a text, or of each text of a list.
    texts = [value] if isinstance(value, str) else value
    if not (isinstance(texts, list) and texts and all(isinstance(t, str) for t in texts)):
        refuse(key, f"must be a string or a list of strings, not {value!r}")
    with problems_at(key):
        return [make(text) for text in texts]


def _matches(text: str) -> Selector:
    pattern = Pattern(text)
    return lambda c: any(map(pattern.search, c.names))


def _is_kind(kind: str) -> Selector:
    if comparison := _NDIM.fullmatch(_SHAPES.get(kind, kind)):
        compare, limit = _COMPARE[comparison[1]], int(comparison[2])
        return lambda c: compare(c.tensor.ndim, limit)
    if kind in ("bias", "weight"):  # also an LSTM's `bias_ih_l0`, attention's `in_proj_bias`
        word = re.compile(rf"{kind}$|{kind}_.*|.*_{kind}$")
        return lambda c: any(word.match(name.rpartition(".")[2]) for name in c.names)
    if kind in _KINDS:
        return lambda c: _one_is(kind, c.owners)
    known = f"neither one of {', '.join(_KINDS)} nor a comparison such as ndim<=1"
    refuse("", f"{kind!r} is {known}", did_you_mean(kind, _KINDS))


def _lies_in(text: str) -> Selector:
    kind = text if text in _MODULES else locate(text) if "." in text else None
    if not isinstance(kind, str | type):
        known = f"neither the import path of a class nor one of {', '.join(_MODULES)}"
        refuse("", f"{text!r} is {known}", did_you_mean(text, _MODULES))
    return lambda c: _one_is(kind, c.path)


def _one_is(kind: str | type, modules: Iterable[nn.Module]) -> bool:
    if kind == "norm":
        return any(_NORM_NAME.search(base.__name__) for m in modules for base in type(m).__mro__)
    classes = _MODULES[kind] if isinstance(kind, str) else kind
    return any(isinstance(m, classes) for m in modules)
