"""The weights to prune: rules over parameters, their sparsity, and the masks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from callbacks.support.errors import CallbackError
from conf.errors import Problem, did_you_mean, raise_problems
from trainer.optimizers.param_groups import Claim, GroupRule, parse_rules, unused
from trainer.optimizers.selectors import SELECTORS, candidates
from trainer.rng import derived

METHODS = ("l1", "random", "ln_structured")
SCOPES = ("global", "layer")


@dataclass(frozen=True, slots=True)
class PruningSettings:
    """How the weights of a rule are pruned."""

    sparsity: float
    initial_sparsity: float
    method: str
    scope: str
    norm: float
    dim: int

    def level(self, progress: float) -> float:
        """Return the share to prune at a `progress` from 0 to 1 (Zhu and Gupta 2017)."""
        return self.sparsity + (self.initial_sparsity - self.sparsity) * (1 - progress) ** 3

    def problems(self) -> Iterator[Problem]:
        """Yield what is out of range."""
        for key in ("initial_sparsity", "sparsity"):
            value = getattr(self, key)
            if not _is_number(value) or not 0 <= value < 1:
                yield Problem(key, f"must be at least 0 and less than 1, not {value!r}")
                return
        if self.initial_sparsity > self.sparsity:
            message = f"{self.initial_sparsity} is more than sparsity={self.sparsity}"
            yield Problem("initial_sparsity", message, "a pruned weight stays pruned")
        for key, known in (("method", METHODS), ("scope", SCOPES)):
            if (value := getattr(self, key)) not in known:
                yield Problem(key, f"{value!r} is none of {', '.join(known)}")
        if not _is_number(self.norm) or self.norm <= 0:
            yield Problem("norm", f"must be more than 0, not {self.norm!r}")
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            yield Problem("dim", f"must be a whole number, not {self.dim!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Pool:
    """Weights that are compared with each other: those of a rule, or of one layer of it."""

    rule: str
    settings: PruningSettings
    members: Mapping[str, nn.Parameter]


class Rules:
    """The rules of a configuration, in the form of parameter groups: the first that accepts wins.

    A rule may replace any of `settings`. Raises ConfigError.
    """

    def __init__(self, node: Any, settings: PruningSettings) -> None:
        problems = list(settings.problems())
        self._claim = Claim("rules", parse_rules(node, "rules", problems))
        if not self._claim.rules and not problems:
            problems.append(Problem("rules", "there is none", "such as {convs: {module: conv}}"))
        self._settings: dict[str, PruningSettings] = {}
        for rule in self._claim.rules:
            problems += _unknown_keys(rule)
            known = {k: v for k, v in rule.overrides.items() if k in _OPTIONS}
            self._settings[rule.key] = own = replace(settings, **known)
            problems += [replace(p, key=f"{rule.key}.{p.key}") for p in own.problems() if known]
        # The caller adds the callback's key in front.
        raise_problems(Problem("", str(problem)) for problem in problems)

    def pools(self, model: nn.Module) -> list[Pool]:
        """Divide the parameters of a model. ConfigError where a rule takes none, or a wrong one."""
        members: dict[str, dict[str, nn.Parameter]] = {r.key: {} for r in self._claim.rules}
        found = candidates(model)
        for candidate in found:
            if (rule := self._claim.rule_of(candidate)) is not None:
                members[rule.key][candidate.name] = candidate.tensor
        used = {key for key, taken in members.items() if taken}
        problems = [*unused({"": self._claim}, used, found), *self._misfits(members)]
        raise_problems(Problem("", str(problem)) for problem in problems)
        pruned = {k: taken for k, taken in members.items() if self._settings[k].sparsity}
        return [
            Pool(key, self._settings[key], pool)
            for key, taken in pruned.items()
            for pool in _divided(taken, self._settings[key].scope)
        ]

    def _misfits(self, members: Mapping[str, Mapping[str, nn.Parameter]]) -> Iterator[Problem]:
        for key, taken in members.items():
            settings = self._settings[key]
            for name, parameter in taken.items():
                shape = list(parameter.shape)
                if not parameter.is_floating_point() and not parameter.is_complex():
                    yield Problem(key, f"{name} is of type {parameter.dtype}")
                elif settings.method == "ln_structured" and not (
                    len(shape) > 1 and -len(shape) <= settings.dim < len(shape)
                ):
                    hint = "ln_structured takes matrices and kernels: add kind: [matrix, kernel]"
                    yield Problem(key, f"{name} {shape} has no slices along {settings.dim}", hint)


def _unknown_keys(rule: GroupRule) -> Iterator[Problem]:
    ours = [key for key in rule.overrides if key not in _OPTIONS]
    groups = {"frozen": rule.frozen, "layer_decay": rule.layer_decay, "layers": rule.layers}
    for key in (*ours, *(key for key, value in groups.items() if value)):
        hint = did_you_mean(key, (*SELECTORS, *_OPTIONS))
        yield Problem(f"{rule.key}.{key}", "unknown key", hint)


_OPTIONS = tuple(field.name for field in fields(PruningSettings))


def _divided(taken: Mapping[str, nn.Parameter], scope: str) -> Sequence[Mapping[str, nn.Parameter]]:
    return [taken] if scope == "global" else [{name: taken[name]} for name in taken]


@torch.no_grad()
def extend(pool: Pool, pruned: Mapping[str, Tensor], level: float, seed: int) -> None:
    """Add to the masks `pruned` (True: zero) until a share `level` of the pool's units is pruned.

    A unit is a weight, or a slice where the method is structured. What is pruned stays; then come
    the lowest scores, of equal ones the first: the same on every process.
    """
    scores = [
        _scores(name, p, pruned[name], pool.settings, seed) for name, p in pool.members.items()
    ]
    units = torch.cat(scores)
    lowest = units.argsort(stable=True)[: round(level * len(units))]
    chosen = torch.zeros_like(units, dtype=torch.bool).index_fill_(0, lowest, True)
    parts = chosen.split([len(s) for s in scores])  # type: ignore[no-untyped-call]
    for (name, parameter), part in zip(pool.members.items(), parts, strict=True):
        pruned[name].logical_or_(part.reshape(_unit_shape(parameter, pool.settings)))


def _scores(
    name: str, weight: Tensor, pruned: Tensor, settings: PruningSettings, seed: int
) -> Tensor:
    """Return a number for each unit, -1 where it is pruned already."""
    rows = _rows(weight, settings)
    if settings.method == "random":
        # The same at every step: a higher sparsity prunes all that a lower one does.
        generator = torch.Generator().manual_seed(derived(seed, "pruning", name))
        drawn = torch.rand(len(rows), generator=generator, dtype=torch.float64)
        scores = drawn.to(rows.device)
    elif settings.method == "l1":
        scores = rows[:, 0].abs()
    else:  # the mean over a slice, so that slices of different sizes compare
        size = rows.shape[1] ** (1 / settings.norm)
        scores = torch.linalg.vector_norm(rows, settings.norm, dim=1) / size
    return scores.masked_fill(_rows(pruned, settings).all(1), -1)


def _rows(tensor: Tensor, settings: PruningSettings) -> Tensor:
    """Return a tensor as a matrix with a row for each unit."""
    if settings.method != "ln_structured":
        return tensor.reshape(-1, 1)
    return tensor.movedim(settings.dim, 0).flatten(1)


def _unit_shape(weight: Tensor, settings: PruningSettings) -> list[int]:
    if settings.method != "ln_structured":
        return list(weight.shape)
    shape = [1] * weight.ndim
    shape[settings.dim] = -1
    return shape


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps at which weights are pruned: `count` intervals of `every` updates from `start`."""

    start: int
    every: int
    count: int  # 0: all at once, at `start`

    @classmethod
    def between(cls, start: float, end: float | None, every: int, total: int | None) -> Schedule:
        """Plan from `start` to at most `end`; floats up to 1 are shares of `total` updates.

        Raises ConfigError for a share of an unknown total.
        """
        first = _step(start, total, "start_step")
        last = first if end is None else _step(end, total, "end_step")
        return cls(first, every, max(0, last - first) // every)

    @property
    def end(self) -> int:
        """The step of the last pruning."""
        return self.start + self.count * self.every

    def is_due(self, step: int) -> bool:
        """Return whether weights are pruned at a step."""
        return self.start <= step <= self.end and (step - self.start) % self.every == 0

    def progress(self, step: int) -> float:
        """Return the share of the schedule that is done after the last pruning up to `step`."""
        return min((step - self.start) // self.every, self.count) / self.count if self.count else 1


def check_step(key: str, step: float | None) -> None:
    """Raise CallbackError for what is neither a number of updates nor a share of the run."""
    if step is not None and (step < 0 or (step > 1 and step != int(step))):
        raise CallbackError(
            f"{key}={step}: choose a number of updates, or a share of the run up to 1.0"
        )


def _step(value: float, total: int | None, key: str) -> int:
    if not isinstance(value, float) or value > 1:
        return int(value)
    if total is None:
        message = f"{value} is a share of the run, whose number of updates is not known"
        raise_problems([Problem("", f"{key}: {message}; give a number of updates")])
        raise AssertionError  # unreachable
    return math.floor(value * total)
