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
_RULE_KEYS = (*SELECTORS, "frozen", "layers", "layer_decay")  # all others are hyper-parameters

_NORM_NAME = re.compile(r"Norm([123]d)?$")
_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "norm": (),  # selected by class names: torch's normalization layers have no common base
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


class NamedParameter(NamedTuple):
    """A parameter with all its names (a tied one has several) and the modules that contain it."""

    names: list[str]
    tensor: nn.Parameter
    owners: list[nn.Module]  # the modules that it is registered in
    path: list[nn.Module]  # the owners and all modules that contain them

    @property
    def name(self) -> str:
        """The name that its state is saved under."""
        return self.names[0]


Test = Callable[[NamedParameter], bool]
T = TypeVar("T")


def named_parameters(
    model: nn.Module, others: Mapping[str, nn.Module] | None = None
) -> list[NamedParameter]:
    """Return each parameter of `model` once, in order of registration, then those of `others`."""
    parameters = dict[nn.Parameter, NamedParameter]()
    for root, part in {"": model, **(others or {})}.items():
        for prefix, module in part.named_modules(prefix=root, remove_duplicate=False):
            for tensor in module.parameters():
                parameter = parameters.setdefault(tensor, NamedParameter([], tensor, [], []))
                parameter.path.append(module)
            registered = module.named_parameters(prefix, recurse=False, remove_duplicate=False)
            for name, tensor in registered:
                parameter = parameters[tensor]
                parameter.names.append(name)
                parameter.owners.append(module)
    return list(parameters.values())


def accept_all(parameter: NamedParameter) -> bool:
    """Return that a parameter is accepted."""
    return True


class GroupRule(NamedTuple):
    """A named selector, and the hyper-parameters of its parameters, or `frozen`."""

    name: str
    key: str  # its key in the config
    accepts: Test = accept_all
    overrides: Mapping[str, Any] = {}
    frozen: bool = False
    layer_decay: float = 1.0
    layers: Sequence[Pattern] = ()


class OptimizerScope(NamedTuple):
    """Which parameters an optimizer trains, and its rules, of which the last accepts all others."""

    matches: Callable[[NamedParameter], object]
    rules: Sequence[GroupRule]


class ParamGroup(NamedTuple):
    """Parameters that share hyper-parameters."""

    name: str
    rule: GroupRule
    lr_factor: float  # from `layer_decay` and the depth of the layer
    parameters: dict[str, nn.Parameter]


def first_rule(rules: Sequence[GroupRule], parameter: NamedParameter) -> GroupRule | None:
    """Return the first rule that accepts a parameter."""
    return next((rule for rule in rules if rule.accepts(parameter)), None)


def assign_groups(
    model: nn.Module, parameters: Sequence[NamedParameter], scopes: Mapping[str, OptimizerScope]
) -> dict[str, list[ParamGroup]]:
    """Assign each trainable parameter to the first optimizer that matches it, and to one group.

    Returns the groups of each optimizer (I8). Parameters of rules with `frozen` are frozen here.
    With several optimizers, the name of a group begins with that of its optimizer. Raises
    `ConfigError` with all problems.
    """
    rules = [rule for scope in scopes.values() for rule in scope.rules[:-1]]
    layers = {rule.key: _layers(rule, model, parameters) for rule in rules if rule.layers}
    groups = dict[tuple[str, int, int], ParamGroup]()  # by optimizer, rule and layer
    frozen = list[nn.Parameter]()
    unassigned = list[str]()
    used = set[str]()
    for parameter in parameters:
        is_trained = parameter.tensor.requires_grad
        owner = next((name for name, s in scopes.items() if s.matches(parameter)), None)
        if owner is None:
            if is_trained:
                unassigned.append(parameter.name)
            continue
        rules_of_owner = scopes[owner].rules  # the last one accepts every parameter
        number, rule = next((i, r) for i, r in enumerate(rules_of_owner) if r.accepts(parameter))
        used.add(rule.key)
        if rule.frozen:
            frozen.append(parameter.tensor)
        elif is_trained:
            depth, factor = layers.get(rule.key, {}).get(parameter.name, (0, 1.0))
            prefix = owner if len(scopes) > 1 else ""
            layer = str(depth) if rule.layers else ""
            name = ".".join(filter(None, (prefix, rule.name, layer))) or DEFAULT
            group = groups.setdefault((owner, number, depth), ParamGroup(name, rule, factor, {}))
            group.parameters[parameter.name] = parameter.tensor

    by_optimizer: dict[str, list[ParamGroup]] = {name: [] for name in scopes}
    for order in sorted(groups):
        by_optimizer[order[0]].append(groups[order])

    problems = list(unused_rules(rules, used, parameters))
    if unassigned:
        problems.append(
            Problem("optimizer.optimizers", f"no optimizer takes {truncated_list(unassigned)}")
        )
    hint = None
    if not parameters:
        hint = (
            "the model has none: layers in a Python list or dict are not its own, those in "
            "nn.ModuleList or nn.ModuleDict are"
        )
    for name, scope in scopes.items():
        if not by_optimizer[name]:
            problems.append(Problem(scope.rules[-1].key, "has no trainable parameter left", hint))
    raise_problems(problems)
    for tensor in frozen:
        tensor.requires_grad_(False)
    return by_optimizer


def _layers(
    rule: GroupRule, model: nn.Module, parameters: Sequence[NamedParameter]
) -> dict[str, tuple[int, float]]:
    """Return (depth, learning rate factor) by parameter name; depth 0 is next to the input."""
    positions: dict[str, Any] = {}
    for parameter in parameters:
        position = _layer_position(parameter.name, rule.layers)
        if position is not None:
            positions[parameter.name] = position
    if len({*positions.values()}) < 2:
        positions = _timm_layers(model) or positions

    for parameter in parameters:
        if rule.accepts(parameter) and parameter.name not in positions:
            refuse(f"{rule.key}.layers", f"no pattern matches {parameter.name}")
    layers = sorted({*positions.values()})
    if len(layers) < 2:
        refuse(
            f"{rule.key}.layers",
            "finds one layer only",
            r"give patterns from the input on, such as blocks\.(\d+)",
        )
    factors = {}
    for name, position in positions.items():
        depth = layers.index(position)
        factors[name] = depth, rule.layer_decay ** (len(layers) - 1 - depth)
    return factors


def _layer_position(name: str, layers: Sequence[Pattern]) -> tuple[int, int] | None:
    # A pattern with a capture group stands for one layer for each number that it matches.
    for i, pattern in enumerate(layers):
        match = pattern.search(name)
        if match is not None:
            number = match.group(1) if pattern.groups else None
            return i, int(number) if number and number.isdigit() else 0
    return None


def _timm_layers(model: nn.Module) -> dict[str, int]:
    """Return the layer of each parameter by name, which timm's models define; else nothing."""
    for prefix, module in model.named_modules():
        if hasattr(module, "group_matcher"):
            from timm.models import group_parameters

            layers = group_parameters(module, module.group_matcher(coarse=False), reverse=True)
            return {f"{prefix}.{name}".removeprefix("."): n for name, n in layers.items()}
    return {}


def unused_rules(
    rules: Sequence[GroupRule], used: set[str], parameters: Sequence[NamedParameter]
) -> Iterator[Problem]:
    """Yield the rules whose keys are not in `used`, and why they are left without a parameter."""
    for key, rule in {rule.key: rule for rule in rules if rule.key not in used}.items():
        accepted = [p.name for p in parameters if rule.accepts(p)]
        if accepted:
            yield Problem(
                key, f"has no parameter left: earlier rules take {truncated_list(accepted)}"
            )
        else:
            names = truncated_list([p.name for p in parameters])
            yield Problem(key, "matches no parameter", f"the model has {names}")


def parse_rules(rules: Any, key: str) -> list[GroupRule]:
    """Parse a dict of rules, of which null entries are dropped.

    Raises `ConfigError` with the first problem of each rule.
    """
    if not isinstance(rules, Mapping | None):
        refuse(key, f"must be a dict of rules, not {rules!r}")
    parsed = []
    problems = list[Problem]()
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

    frozen = node.get("frozen", False)
    if not isinstance(frozen, bool):
        refuse(f"{key}.frozen", f"must be true or false, not {frozen!r}")

    decay = node.get("layer_decay")
    layers = node.get("layers")
    if (decay is None) != (layers is None):
        refuse(key, "needs both layer_decay and layers, or neither")
    patterns: list[Pattern] = []
    if decay is not None:
        if not (type(decay) in (int, float) and 0 < decay <= 1):
            refuse(f"{key}.layer_decay", f"must be a number in (0, 1], not {decay!r}")
        patterns = _parse_each(Pattern, layers, f"{key}.layers")

    overrides = {word: value for word, value in node.items() if word not in _RULE_KEYS}
    accepts = parse_selector(selector, key)
    return GroupRule(name, key, accepts, overrides, frozen, decay or 1.0, patterns)


def parse_selector(node: Any, key: str) -> Test:
    """Parse `match`, `module`, `kind`, all of which must accept, and `except`, which must not.

    Raises `ConfigError`.
    """
    required = _parse_tests(node, SELECTORS, key)
    excluded: list[list[Test]] = []
    if node.get("except") is not None:
        excluded = _parse_tests(node["except"], SELECTORS[:-1], f"{key}.except")

    def accepts(parameter: NamedParameter) -> bool:
        for tests in required:
            if not any(test(parameter) for test in tests):
                return False
        return not any(test(parameter) for tests in excluded for test in tests)

    return accepts


def _parse_tests(node: Any, words: Sequence[str], key: str) -> list[list[Test]]:
    """Return for each key the tests of its values, of which at least one has to pass."""
    if not isinstance(node, Mapping):
        refuse(key, f"must be a dict with {', '.join(words)}, not {node!r}")
    for word in node.keys() - {*words}:
        refuse(f"{key}.{word}", "unknown key", did_you_mean(str(word), words))
    parsers = {"match": _name_test, "module": _module_test, "kind": _kind_test}
    return [
        _parse_each(parsers[word], value, f"{key}.{word}")
        for word, value in node.items()
        if word in parsers and value is not None
    ]


def _parse_each(parse: Callable[[str], T], value: Any, key: str) -> list[T]:
    """Parse a string, or each string of a list."""
    texts = [value] if isinstance(value, str) else value
    if not (isinstance(texts, list) and texts and all(isinstance(t, str) for t in texts)):
        refuse(key, f"must be a string or a list of strings, not {value!r}")
    with problems_at(key):
        return [parse(text) for text in texts]


def _name_test(text: str) -> Test:
    pattern = Pattern(text)
    return lambda p: any(map(pattern.search, p.names))


def _kind_test(kind: str) -> Test:
    comparison = _NDIM.fullmatch(_SHAPES.get(kind, kind))
    if comparison is not None:
        compare = _COMPARE[comparison[1]]
        limit = int(comparison[2])
        return lambda p: compare(p.tensor.ndim, limit)
    if kind in ("bias", "weight"):  # also an LSTM's `bias_ih_l0`, attention's `in_proj_bias`
        word = re.compile(rf"{kind}$|{kind}_.*|.*_{kind}$")
        return lambda p: any(word.match(name.rpartition(".")[2]) for name in p.names)
    if kind in _KINDS:
        return lambda p: _any_is(kind, p.owners)
    refuse(
        "",
        f"{kind!r} is neither one of {', '.join(_KINDS)} nor a comparison such as ndim<=1",
        did_you_mean(kind, _KINDS),
    )


def _module_test(text: str) -> Test:
    kind: Any = None
    if text in _MODULES:
        kind = text
    elif "." in text:
        kind = locate(text)
    if not isinstance(kind, str | type):
        refuse(
            "",
            f"{text!r} is neither the import path of a class nor one of {', '.join(_MODULES)}",
            did_you_mean(text, _MODULES),
        )
    return lambda p: _any_is(kind, p.path)


def _any_is(kind: str | type, modules: Iterable[nn.Module]) -> bool:
    if kind == "norm":
        return any(_NORM_NAME.search(base.__name__) for m in modules for base in type(m).__mro__)
    classes = _MODULES[kind] if isinstance(kind, str) else kind
    return any(isinstance(m, classes) for m in modules)
