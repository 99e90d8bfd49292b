"""Prune weights while the network trains."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from callbacks.support import CallbackError, check_least, require
from conf.errors import Problem, did_you_mean, problems_at, raise_problems
from trainer.callback import Average, Callback
from trainer.optimizers.param_groups import (
    SELECTORS,
    GroupRule,
    candidates,
    first_rule,
    parse_rules,
    unused,
)
from trainer.rng import derived

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_log = logging.getLogger(__name__)


def step_of(key: str, value: float, total: int | None) -> int:
    """Return the step that a number of updates or a share of `total` stands for.

    Raises CallbackError for what is neither, and for a share of an unknown total.
    """
    sound = 0 <= value <= 1 or (value > 1 and value == int(value))
    require(sound, f"{key}={value}: choose a number of updates, or a share of the run up to 1.0")
    if not isinstance(value, float) or value > 1:
        return int(value)
    if total is None:
        unknown = "is a share of the run, whose number of updates is not known"
        raise CallbackError(f"{key}={value} {unknown}; give a number of updates")
    return math.floor(value * total)


def progress(steps: range, step: int) -> float:
    """Return the share of a schedule that is done after the last of its steps up to `step`."""
    count = len(steps) - 1
    return min((step - steps.start) // steps.step, count) / count if count else 1


@dataclass(frozen=True, slots=True)
class PruningSettings:
    """How the weights of a rule are pruned."""

    sparsity: float = 0.5
    initial_sparsity: float = 0.0
    method: str = "l1"
    scope: str = "global"
    norm: float = 2.0
    dim: int = 0

    def level(self, progress: float) -> float:
        """Return the share to prune at a `progress` from 0 to 1 (Zhu and Gupta 2017)."""
        return self.sparsity + (self.initial_sparsity - self.sparsity) * (1 - progress) ** 3


_VALID: Mapping[str, tuple[str, Callable[[PruningSettings], bool]]] = {
    "sparsity": ("at least 0 and less than 1", lambda s: 0 <= s.sparsity < 1),
    "initial_sparsity": (
        "between 0 and sparsity: a pruned weight stays pruned",
        lambda s: 0 <= s.initial_sparsity <= s.sparsity,
    ),
    "method": ("l1, random, ln_structured", lambda s: s.method in _VALID["method"][0].split(", ")),
    "scope": ("global, layer", lambda s: s.scope in _VALID["scope"][0].split(", ")),
    "norm": ("more than 0", lambda s: s.norm > 0),
    "dim": ("a whole number", lambda s: isinstance(s.dim, int)),
}


def _misfits(settings: PruningSettings, prefix: str = "") -> Iterator[Problem]:
    """Yield the options that are out of range, or no numbers."""
    for key, (wanted, holds) in _VALID.items():
        try:
            fits = holds(settings)
        except TypeError:
            fits = False
        if not fits:
            yield Problem(prefix + key, f"{getattr(settings, key)!r} is not {wanted}")


@dataclass(frozen=True, slots=True)
class Pool:
    """Weights that are compared with each other: those of a rule, or of one layer of it."""

    rule: str
    settings: PruningSettings
    members: Mapping[str, nn.Parameter]


def _parsed(node: Any, settings: PruningSettings) -> list[tuple[GroupRule, PruningSettings]]:
    """Parse rules in the form of parameter groups; each may replace some of `settings`.

    Raises ConfigError.
    """
    problems = list(_misfits(settings))
    rules = []
    for rule in parse_rules(node, "rules", problems):
        known = {key: value for key, value in rule.overrides.items() if key in _VALID}
        others = [k for k in ("frozen", "layer_decay", "layers") if getattr(rule, k)]
        for key in [*(rule.overrides.keys() - known.keys()), *others]:
            hint = did_you_mean(key, (*SELECTORS, *_VALID))
            problems.append(Problem(f"{rule.key}.{key}", "unknown key", hint))
        rules.append((rule, replace(settings, **known)))
        problems += _misfits(rules[-1][1], f"{rule.key}.") if known else ()
    if not rules and not problems:
        problems.append(Problem("rules", "there is none", "such as {convs: {module: conv}}"))
    _refuse(problems)
    return rules


def _pools(rules: Sequence[tuple[GroupRule, PruningSettings]], model: nn.Module) -> list[Pool]:
    """Divide the parameters of a model: the first rule that accepts one takes it.

    Raises ConfigError where a rule takes none, or one that its method cannot prune.
    """
    every, found = [rule for rule, _ in rules], candidates(model)
    owners = {c.name: first_rule(every, c) for c in found}
    problems = list(unused(every, {rule.key for rule in owners.values() if rule}, found))
    pools = []
    for rule, settings in rules:
        taken = {c.name: c.tensor for c in found if owners[c.name] is rule}
        for name, weight in taken.items() if settings.method == "ln_structured" else ():
            if weight.ndim < 2 or not -weight.ndim <= settings.dim < weight.ndim:
                hint = "ln_structured takes matrices and kernels: add kind: [matrix, kernel]"
                message = f"{name} {list(weight.shape)} has no slices along {settings.dim}"
                problems.append(Problem(rule.key, message, hint))
        parts = [taken] if settings.scope == "global" else [{n: p} for n, p in taken.items()]
        pools += [Pool(rule.key, settings, part) for part in parts if settings.sparsity]
    _refuse(problems)
    return pools


def _refuse(problems: Iterable[Problem]) -> None:
    raise_problems(Problem("", str(problem)) for problem in problems)  # the caller adds its key


@torch.no_grad()
def extend(pool: Pool, pruned: Mapping[str, Tensor], level: float, seed: int) -> None:
    """Add to the masks `pruned` (True: zero) until a share `level` of the pool's units is pruned.

    A unit is a weight, or a slice where the method is structured. What is pruned stays; then come
    the lowest scores, of equal ones the first: the same on every process. torch.nn.utils.prune
    would rename the parameters, draw from the global generator and break ties by device.
    """
    settings, scores = pool.settings, []
    for name, weight in pool.members.items():
        score, gone = weight.abs(), pruned[name]
        if settings.method == "random":
            # The same at every step: a higher sparsity prunes all that a lower one does.
            generator = torch.Generator().manual_seed(derived(seed, "pruning", name))
            drawn = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
            score = drawn.to(weight.device)
        elif settings.method == "ln_structured":
            dim = settings.dim % weight.ndim
            others = [d for d in range(weight.ndim) if d != dim]
            # The mean over a slice, so that slices of different sizes compare.
            size = (weight.numel() / weight.shape[dim]) ** (1 / settings.norm)
            score = torch.linalg.vector_norm(weight, settings.norm, others, keepdim=True) / size
            gone = gone.all(others, keepdim=True)
        scores.append(score.masked_fill(gone, -1))
    units = torch.cat([score.flatten() for score in scores])
    lowest = units.argsort(stable=True)[: round(level * len(units))]
    chosen = torch.zeros_like(units, dtype=torch.bool).index_fill_(0, lowest, True)
    parts = torch.split(chosen, [score.numel() for score in scores])
    for name, score, part in zip(pool.members, scores, parts, strict=True):
        pruned[name].logical_or_(part.view(score.shape))


class Pruning(Callback):
    """Set weights to zero and keep them there: masks are applied after every update.

    `rules`: by name, as in `optimizer.param_groups` (`match`, `module`, `kind`, `except`); the
    first that accepts a parameter decides. Each may replace the other options but the steps;
    `sparsity: 0` leaves parameters out. `method`: `l1` (the smallest weights), `random` (keyed by
    the seed of the run), `ln_structured` (the slices along `dim` with the smallest `norm`).
    `scope`: `global` compares all weights of a rule, `layer` those of one parameter.

    From `start_step` to `end_step` the sparsity rises from `initial_sparsity` to `sparsity`, every
    `every_n_steps` updates; without `end_step` all is pruned at `start_step`. Both are numbers of
    updates, or shares of the run (floats up to 1).

    Zhu and Gupta, To Prune, or Not to Prune, 2017.
    """

    changes_weights = True
    takes_shards = False

    def __init__(
        self,
        rules: Mapping[str, Mapping[str, Any] | None],
        sparsity: float = 0.5,
        initial_sparsity: float = 0.0,
        method: str = "l1",
        scope: str = "global",
        norm: float = 2.0,
        dim: int = 0,
        start_step: float = 0,
        end_step: float | None = None,
        every_n_steps: int = 1,
    ) -> None:
        settings = PruningSettings(sparsity, initial_sparsity, method, scope, norm, dim)
        self._rules = _parsed(rules, settings)
        check_least(every_n_steps=every_n_steps)
        self._steps = (start_step, start_step if end_step is None else end_step, every_n_steps)
        alike = isinstance(start_step, float) == isinstance(end_step, float)
        falls = alike and self._steps[1] < start_step
        require(not falls, f"end_step={end_step}: choose at least start_step={start_step}")
        self.schedule(1)
        self.pools: list[Pool] = []
        self._pruned: dict[str, Tensor] = {}  # by name of the parameter, True where it is zero
        self._handles: list[Any] = []

    def schedule(self, total: int | None) -> range:
        """Return the steps at which a run of `total` updates prunes. Raises CallbackError."""
        start, end, every = self._steps
        first, last = step_of("start_step", start, total), step_of("end_step", end, total)
        return range(first, max(first, last) + 1, every)

    def check(self, model: nn.Module) -> None:
        """Divide the parameters of the model by the rules."""
        self.pools = _pools(self._rules, model)

    def setup(self, trainer: Trainer) -> None:
        """Find the weights, their averages, and the steps."""
        names = list(trainer.callbacks)
        averages = {n: c for n, c in trainer.callbacks.items() if isinstance(c, Average)}
        with problems_at(f"callbacks.{self.name}"):
            self.check(trainer.model)
            self._schedule = self.schedule(trainer.total_steps)
            for name, average in averages.items():
                own = type(average).tensors is not Average.tensors
                hint = f"cannot be pruned: give {type(average).__name__} a method tensors"
                require(own, f"the average of callbacks.{name} {hint}")
                first = names.index(name) > names.index(self.name)
                require(first, f"must come before callbacks.{name}, which reads the weights")
        self._averages = list(averages.values())
        self._weights = {n: p for pool in self.pools for n, p in pool.members.items()}
        for name, weight in self._weights.items():
            self._pruned[name] = torch.zeros_like(weight, dtype=torch.bool, requires_grad=False)
            if weight.requires_grad:
                hook = _masked_by(self._pruned[name])
                self._handles.append(weight.register_hook(hook))  # type: ignore[no-untyped-call]

    def on_fit_start(self, trainer: Trainer) -> None:
        """Prune what is due: at the first step, or after a resume from a run without masks."""
        if trainer.state.global_step >= self._schedule.start:
            self._prune(trainer)

    def on_update_end(self, trainer: Trainer) -> None:
        """Prune if it is due, and mask what the update has changed."""
        if trainer.state.skipped_in_a_row:
            return
        if trainer.state.global_step in self._schedule:
            trainer.updater.confirm()
            self._prune(trainer)
        else:
            self._apply(self._weights)

    def _prune(self, trainer: Trainer) -> None:
        share = progress(self._schedule, trainer.state.global_step)
        for pool in self.pools:
            extend(pool, self._pruned, pool.settings.level(share), trainer.options.seed)
        # An average of zero weights stays zero: only new masks apply to it.
        for tensors in (self._weights, *(average.tensors() for average in self._averages)):
            self._apply(tensors)

    @torch.no_grad()
    def _apply(self, tensors: Mapping[str, Tensor]) -> None:
        for name, pruned in self._pruned.items():
            if name in tensors:
                tensors[name].masked_fill_(pruned, 0)

    def scalars(self, trainer: Trainer) -> Mapping[str, float]:
        """Log the share of pruned weights among those that the rules take."""
        masks = self._pruned.values()
        count = sum(mask.numel() for mask in masks)
        return {"pruning/sparsity": sum(int(mask.sum()) for mask in masks) / count}

    def on_fit_end(self, trainer: Trainer) -> None:
        """Log the sparsity of each layer."""
        share = self.scalars(trainer)["pruning/sparsity"]
        lines = [f"callbacks.{self.name}: {share:.1%} of the weights are zero"]
        for name, mask in self._pruned.items():
            lines.append(
                f"  {name}: {int(mask.sum()):,} of {mask.numel():,}, {mask.double().mean():.1%}"
            )
        _log.info("%s", "\n".join(lines))

    def teardown(self, trainer: Trainer) -> None:
        """Remove the hooks of the gradients."""
        for handle in self._handles:
            handle.remove()

    def explain(self, trainer: Trainer) -> Iterator[str]:
        """Describe what will be pruned, when, and to which sparsity."""
        plan = self.schedule(trainer.total_steps)
        when = f"from step {plan[0]} to {plan[-1]}, every {plan.step}"
        when = when if len(plan) > 1 else f"at step {plan[0]}"
        yield f"callbacks.{self.name} prunes {when}:"
        for pool in _pools(self._rules, trainer.model):
            how = f"{pool.settings.sparsity:.1%} ({pool.rule}, {pool.settings.method}"
            for name, weight in pool.members.items():
                yield f"  {name}: {weight.numel():,} weights, {how}, {pool.settings.scope})"

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, True where a weight is pruned."""
        return {"pruned": dict(self._pruned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the masks of the parameters that the rules take."""
        for name, pruned in self._pruned.items():
            if name in state["pruned"]:
                pruned.copy_(state["pruned"][name])


def _masked_by(pruned: Tensor) -> Any:
    """Return the hook that zeroes gradients of pruned weights: norms are those of the others."""
    return lambda grad: grad if grad.is_sparse else grad.masked_fill(pruned, 0)
