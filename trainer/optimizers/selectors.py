"""Select parameters by conditions on their names, modules and kinds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from conf.errors import ConfigError, Problem, did_you_mean, problems_at
from trainer.targets.instantiate import locate

SELECTORS = ("match", "module", "kind", "except")

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_NORM_NAME = re.compile(r"Norm([123]d)?$")
_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "conv": (_ConvNd,),
    "linear": (nn.Linear, nn.Bilinear),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "attention": (nn.MultiheadAttention,),
    "recurrent": (nn.RNNBase, nn.RNNCellBase),
}
_KINDS = ("bias", "weight", "norm", "embedding", "vector", "matrix", "kernel")
_NDIM = re.compile(r"ndim\s*(<=|>=|==|<|>)\s*([0-9]{1,3})")


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


def candidates(model: nn.Module, others: Mapping[str, nn.Module] | None = None) -> list[Candidate]:
    """Return each parameter of `model` once, in order of registration, then those of `others`."""
    modules: dict[str, nn.Module] = {}
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for root, part in {"": model, **(others or {})}.items():
        for name, module in part.named_modules(remove_duplicate=False):
            modules[_under(root, name)] = module
        for name, tensor in part.named_parameters(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(_under(root, name))
            tensors[id(tensor)] = tensor
    return [
        Candidate(
            tuple(aliases),
            tensors[key],
            tuple(modules[alias.rpartition(".")[0]] for alias in aliases),
            tuple(modules[p] for alias in aliases for p in _prefixes(alias) if p in modules),
        )
        for key, aliases in names.items()
    ]


def _under(root: str, name: str) -> str:
    return ".".join(part for part in (root, name) if part)


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
        if self.unless is not None and any(self.unless._conditions(candidate)):
            return False
        return all(self._conditions(candidate))

    def _conditions(self, candidate: Candidate) -> list[bool]:
        found = []
        if self.patterns:
            found.append(any(p.search(n) for p in self.patterns for n in candidate.names))
        if self.modules:
            found.append(any(_inside(candidate, module) for module in self.modules))
        if self.kinds:
            found.append(any(is_kind(candidate, kind) for kind in self.kinds))
        return found


def _inside(candidate: Candidate, module: str | type) -> bool:
    if module == "norm":
        return any(_is_norm(m) for m in candidate.path)
    classes = _MODULES[module] if isinstance(module, str) else (module,)
    return any(isinstance(m, classes) for m in candidate.path)


def _is_norm(module: nn.Module) -> bool:
    # Classes outside torch have no common base class, so their name decides.
    return isinstance(module, _NORMS) or bool(_NORM_NAME.search(type(module).__name__))


def is_kind(candidate: Candidate, kind: str) -> bool:
    """Return whether a parameter is of a kind: "bias", "norm", "matrix", "ndim<=1", ..."""
    comparison = _NDIM.fullmatch(kind)
    if comparison:
        operator, bound = comparison.groups()
        return _compare(candidate.tensor.ndim, operator, int(bound))
    match kind:
        case "bias" | "weight":
            return any(_is_called(name, kind) for name in candidate.names)
        case "norm":
            return any(_is_norm(m) for m in candidate.owners)
        case "embedding":
            return any(isinstance(m, _MODULES["embedding"]) for m in candidate.owners)
        case "vector":
            return candidate.tensor.ndim <= 1
        case "matrix":
            return candidate.tensor.ndim == 2
        case _:
            return candidate.tensor.ndim >= 3


def _is_called(name: str, word: str) -> bool:
    last = name.rpartition(".")[2]  # `bias`, and an LSTM's `bias_ih_l0`, attention's `in_proj_bias`
    return last == word or last.startswith(f"{word}_") or last.endswith(f"_{word}")


def _compare(value: int, operator: str, bound: int) -> bool:
    below, equal = value < bound, value == bound
    return {
        "<": below,
        "<=": below or equal,
        "==": equal,
        ">=": not below,
        ">": not below and not equal,
    }[operator]


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
    unless = node.get("except")
    return Selector(
        patterns(node.get("match"), f"{key}.match", problems),
        _modules(node.get("module"), f"{key}.module", problems),
        _kinds(node.get("kind"), f"{key}.kind", problems),
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


def patterns(value: Any, key: str, problems: list[Problem]) -> tuple[re.Pattern[str], ...]:
    """Compile one or several regular expressions; append to `problems`."""
    compiled = []
    for text in _strings(value, key, problems):
        try:
            compiled.append(re.compile(text))
        except re.error as error:
            problems.append(Problem(key, f"{text!r} is not a valid regular expression: {error}"))
    return tuple(compiled)


def _modules(value: Any, key: str, problems: list[Problem]) -> tuple[str | type, ...]:
    modules: list[str | type] = []
    for text in _strings(value, key, problems):
        if text == "norm" or text in _MODULES:
            modules.append(text)
            continue
        try:
            with problems_at(key):
                found = locate(text) if "." in text else None
        except ConfigError as error:
            problems += error.problems
            continue
        except Exception as error:  # whatever a user's module raises when imported
            problems.append(Problem(key, f"{text!r} cannot be imported: {error}"))
            continue
        if isinstance(found, type):
            modules.append(found)
        else:
            known = ("norm", *_MODULES)
            message = (
                f"{text!r} is neither the import path of a class nor one of {', '.join(known)}"
            )
            problems.append(Problem(key, message, did_you_mean(text, known)))
    return tuple(modules)


def _kinds(value: Any, key: str, problems: list[Problem]) -> tuple[str, ...]:
    kinds = _strings(value, key, problems)
    problems += [
        Problem(
            key,
            f"{kind!r} is neither one of {', '.join(_KINDS)} nor a comparison such as ndim<=1",
            did_you_mean(kind, _KINDS),
        )
        for kind in kinds
        if kind not in _KINDS and not _NDIM.fullmatch(kind)
    ]
    return tuple(kinds)


Patterns = tuple[re.Pattern[str], ...]


class Layers:
    """Number the layers of a model from the input on, by lists of patterns.

    A pattern with a capture group (`blocks\\.(\\d+)`) stands for one layer for each number that it
    matches. A parameter that no pattern matches is added to `problems`.
    """

    def __init__(self, found: Sequence[Candidate], problems: list[Problem]) -> None:
        self._found = found
        self._problems = problems
        self._numbers: dict[Patterns, dict[tuple[int, int], int]] = {}

    def depth(self, candidate: Candidate, layers: Patterns, key: str) -> int:
        """Return the number of a parameter's layer; `key` is that of the rule, for messages."""
        place = _place(candidate, layers)
        if place is None:
            self._problems.append(Problem(f"{key}.layers", f"no pattern matches {candidate.name}"))
            return 0
        return self._numbering(layers)[place]

    def count(self, layers: Patterns) -> int:
        """Return the number of layers of the model."""
        return len(self._numbering(layers))

    def _numbering(self, layers: Patterns) -> dict[tuple[int, int], int]:
        if layers not in self._numbers:
            places = {place for c in self._found if (place := _place(c, layers)) is not None}
            self._numbers[layers] = {place: i for i, place in enumerate(sorted(places))}
        return self._numbers[layers]


def _place(candidate: Candidate, layers: Patterns) -> tuple[int, int] | None:
    for i, pattern in enumerate(layers):
        found = pattern.search(candidate.name)
        if found:
            number = found.group(1) if pattern.groups else None
            return i, int(number) if number and number.isdigit() else 0
    return None
