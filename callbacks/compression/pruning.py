"""Prune weights while the network trains."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from callbacks.support import CallbackError
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
from trainer.summary.text import table, to_text

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_log = logging.getLogger(__name__)
_METHODS = ("l1", "random", "ln_structured")
_SCOPES = ("global", "layer")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps at which something is done: `count` intervals of `every` updates from `start`."""

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
        """The last of the steps."""
        return self.start + self.count * self.every

    def is_due(self, step: int) -> bool:
        """Return whether a step is one of them."""
        return self.start <= step <= self.end and (step - self.start) % self.every == 0

    def progress(self, step: int) -> float:
        """Return the share of the schedule that is done after the last of them up to `step`."""
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
        message = f"{key}: {value} is a share of the run, whose number of updates is not known"
        raise_problems([Problem("", f"{message}; give a number of updates")])
    return math.floor(value * (total or 0))


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

    def problems(self) -> Iterator[Problem]:
        """Yield what is out of range."""
        shares = {key: getattr(self, key) for key in ("initial_sparsity", "sparsity")}
        for key, value in shares.items():
            if not _is_number(value) or not 0 <= value < 1:
                yield Problem(key, f"must be at least 0 and less than 1, not {value!r}")
                return
        if self.initial_sparsity > self.sparsity:
            message = f"{self.initial_sparsity} is more than sparsity={self.sparsity}"
            yield Problem("initial_sparsity", message, "a pruned weight stays pruned")
        for key, known in (("method", _METHODS), ("scope", _SCOPES)):
            if (value := getattr(self, key)) not in known:
                yield Problem(key, f"{value!r} is none of {', '.join(known)}")
        if not _is_number(self.norm) or self.norm <= 0:
            yield Problem("norm", f"must be more than 0, not {self.norm!r}")
        if not isinstance(self.dim, int):
            yield Problem("dim", f"must be a whole number, not {self.dim!r}")


_OPTIONS = tuple(field.name for field in fields(PruningSettings))


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
        self._rules = parse_rules(node, "rules", problems)
        if not self._rules and not problems:
            problems.append(Problem("rules", "there is none", "such as {convs: {module: conv}}"))
        self._settings: dict[str, PruningSettings] = {}
        for rule in self._rules:
            problems += _unknown_keys(rule)
            known = {k: v for k, v in rule.overrides.items() if k in _OPTIONS}
            self._settings[rule.key] = own = replace(settings, **known)
            problems += [replace(p, key=f"{rule.key}.{p.key}") for p in own.problems() if known]
        # The caller adds the callback's key in front.
        raise_problems(Problem("", str(problem)) for problem in problems)

    def pools(self, model: nn.Module) -> list[Pool]:
        """Divide the parameters of a model. ConfigError where a rule takes none, or a wrong one."""
        members: dict[str, dict[str, nn.Parameter]] = {r.key: {} for r in self._rules}
        found = candidates(model)
        for candidate in found:
            if (rule := first_rule(self._rules, candidate)) is not None:
                members[rule.key][candidate.name] = candidate.tensor
        used = {key for key, taken in members.items() if taken}
        problems = list(unused(self._rules, used, found))
        pools = []
        for key, taken in members.items():
            settings = self._settings[key]
            problems += _misfits(key, taken, settings)
            if not settings.sparsity:
                continue
            parts = [taken] if settings.scope == "global" else [{n: p} for n, p in taken.items()]
            pools += [Pool(key, settings, part) for part in parts]
        raise_problems(Problem("", str(problem)) for problem in problems)
        return pools


def _misfits(
    key: str, taken: Mapping[str, nn.Parameter], settings: PruningSettings
) -> Iterator[Problem]:
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


@torch.no_grad()
def extend(pool: Pool, pruned: Mapping[str, Tensor], level: float, seed: int) -> None:
    """Add to the masks `pruned` (True: zero) until a share `level` of the pool's units is pruned.

    A unit is a weight, or a slice where the method is structured. What is pruned stays; then come
    the lowest scores, of equal ones the first: the same on every process. torch.nn.utils.prune
    would rename the parameters, draw from the global generator and break ties by device.
    """
    settings = pool.settings
    scores, shapes = [], []
    for name, weight in pool.members.items():
        structured = settings.method == "ln_structured"
        dim = settings.dim % weight.ndim if weight.ndim else 0
        rows, gone = (
            t.movedim(dim, 0).flatten(1) if structured else t.reshape(-1, 1)
            for t in (weight, pruned[name])
        )
        if settings.method == "random":
            # The same at every step: a higher sparsity prunes all that a lower one does.
            generator = torch.Generator().manual_seed(derived(seed, "pruning", name))
            score = torch.rand(len(rows), generator=generator, dtype=torch.float64).to(rows.device)
        elif structured:  # the mean over a slice, so that slices of different sizes compare
            size = rows.shape[1] ** (1 / settings.norm)
            score = torch.linalg.vector_norm(rows, settings.norm, dim=1) / size
        else:
            score = rows[:, 0].abs()
        scores.append(score.masked_fill(gone.all(1), -1))
        shape = [len(rows) if d == dim else 1 for d in range(weight.ndim)]
        shapes.append(shape if structured else list(weight.shape))
    units = torch.cat(scores)
    lowest = units.argsort(stable=True)[: round(level * len(units))]
    chosen = torch.zeros_like(units, dtype=torch.bool).index_fill_(0, lowest, True)
    parts = chosen.split([len(s) for s in scores])  # type: ignore[no-untyped-call]
    for name, part, shape in zip(pool.members, parts, shapes, strict=True):
        pruned[name].logical_or_(part.reshape(shape))


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
        self._rules = Rules(
            rules, PruningSettings(sparsity, initial_sparsity, method, scope, norm, dim)
        )
        if every_n_steps < 1:
            raise CallbackError(f"every_n_steps={every_n_steps}: choose at least 1")
        check_step("start_step", start_step)
        check_step("end_step", end_step)
        alike = isinstance(start_step, float) == isinstance(end_step, float)
        if end_step is not None and end_step < start_step and alike:
            raise CallbackError(f"end_step={end_step}: choose at least start_step={start_step}")
        self._steps = (start_step, end_step, every_n_steps)
        self._schedule = Schedule(0, 1, 0)
        self._pools: list[Pool] = []
        self._pruned: dict[str, Tensor] = {}  # by name of the parameter, True where it is zero
        self._weights: dict[str, nn.Parameter] = {}
        self._averages: list[Average] = []
        self._handles: list[RemovableHandle] = []

    def check(self, model: nn.Module) -> None:
        """Divide the parameters of the model by the rules."""
        self._pools = self._rules.pools(model)

    def setup(self, trainer: Trainer) -> None:
        """Find the weights, their averages, and the steps."""
        with problems_at(f"callbacks.{self.name}"):
            self.check(trainer.model)
            self._schedule = Schedule.between(*self._steps, trainer.total_steps)
            self._averages = list(self._averages_of(trainer))
        self._weights = {n: p for pool in self._pools for n, p in pool.members.items()}
        for name, weight in self._weights.items():
            if hasattr(weight, "device_mesh"):
                raise CallbackError(
                    f"callbacks.{self.name} needs whole parameters, and {name} is in shards: use "
                    "strategy=ddp"
                )
            self._pruned[name] = torch.zeros_like(weight, dtype=torch.bool, requires_grad=False)
            if weight.requires_grad:
                hook = _masked_by(self._pruned[name])
                self._handles.append(weight.register_hook(hook))  # type: ignore[no-untyped-call]

    def _averages_of(self, trainer: Trainer) -> Iterator[Average]:
        names = list(trainer.callbacks)
        for name, callback in trainer.callbacks.items():
            if not isinstance(callback, Average):
                continue
            if type(callback).tensors is Average.tensors:
                raise CallbackError(
                    f"the average of callbacks.{name} cannot be pruned: give "
                    f"{type(callback).__name__} a method tensors"
                )
            if names.index(name) < names.index(self.name):
                raise CallbackError(f"must come before callbacks.{name}, which reads the weights")
            yield callback

    def on_fit_start(self, trainer: Trainer) -> None:
        """Prune what is due: at the first step, or after a resume from a run without masks."""
        if trainer.state.global_step >= self._schedule.start:
            self._prune(trainer)

    def on_update_end(self, trainer: Trainer) -> None:
        """Prune if it is due, and mask what the update has changed."""
        state = trainer.state
        if state.skipped_in_a_row:
            return
        if self._schedule.is_due(state.global_step):
            trainer.updater.confirm()
            self._prune(trainer)
        else:
            self._apply(self._weights)

    def _prune(self, trainer: Trainer) -> None:
        progress = self._schedule.progress(trainer.state.global_step)
        for pool in self._pools:
            extend(pool, self._pruned, pool.settings.level(progress), trainer.options.seed)
        self._apply(self._weights)
        # An average of zero weights stays zero: only new masks apply to it.
        for average in self._averages:
            self._apply(average.tensors())

    @torch.no_grad()
    def _apply(self, tensors: Mapping[str, Tensor]) -> None:
        for name, pruned in self._pruned.items():
            if name in tensors:
                tensors[name].masked_fill_(pruned, 0)

    def scalars(self, trainer: Trainer) -> Mapping[str, float]:
        """Log the share of pruned weights among those that the rules take."""
        zeros, total = map(sum, zip(*self._counts().values(), strict=True))
        return {"pruning/sparsity": zeros / total}

    def _counts(self) -> dict[str, tuple[int, int]]:
        """Return how many weights of each parameter are pruned, and how many there are."""
        return {name: (int(p.sum().item()), p.numel()) for name, p in self._pruned.items()}

    def on_fit_end(self, trainer: Trainer) -> None:
        """Log the sparsity of each layer."""
        rows = [(n, f"{k:,}", f"{k / total:.1%}") for n, (k, total) in self._counts().items()]
        columns = ("parameter", "pruned", "sparsity")
        text = to_text(table(columns, rows, right=columns[1:])).rstrip()
        share = self.scalars(trainer)["pruning/sparsity"]
        _log.info("callbacks.%s: %.1f%% of the weights are zero\n%s", self.name, 100 * share, text)

    def teardown(self, trainer: Trainer) -> None:
        """Remove the hooks of the gradients."""
        for handle in self._handles:
            handle.remove()

    def explain(self, trainer: Trainer) -> Iterator[str]:
        """Describe what will be pruned, when, and to which sparsity."""
        plan = Schedule.between(*self._steps, trainer.total_steps)
        when = f"at step {plan.start}"
        if plan.count:
            when = f"from step {plan.start} to {plan.end}, every {plan.every}"
        yield f"callbacks.{self.name} prunes {when}:"
        for pool in self._rules.pools(trainer.model):
            known = pool.settings.scope == "layer" or len(pool.members) == 1
            for name, weight in pool.members.items():
                share = f"{pool.settings.sparsity:.1%}" + (
                    "" if known else " of the rule's weights"
                )
                kind = f"{pool.rule}, {pool.settings.method}, {pool.settings.scope}"
                yield f"  {name}: {weight.numel():,} weights, {share} ({kind})"

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
