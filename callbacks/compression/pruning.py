"""Prune weights while the network trains."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regimen.callbacks.support import check_least, require, steps_of
from regimen.conf.errors import Problem, collect_problems, did_you_mean, problems_at, raise_problems
from regimen.trainer.callback import Average, Callback
from regimen.trainer.optimizers import param_groups
from regimen.trainer.optimizers.param_groups import GroupRule
from regimen.trainer.rng import derived_seed
from regimen.trainer.trainer import Trainer

_METHODS, _SCOPES = ("l1", "random", "ln_structured"), ("global", "layer")


@dataclass(eq=False)
class Settings:
    """How the weights of a rule are pruned. Raises CallbackError."""

    sparsity: float = 0.5
    initial_sparsity: float = 0.0
    method: str = "l1"
    scope: str = "global"
    norm: float = 2.0
    dim: int = 0

    def __post_init__(self) -> None:
        start = f"initial_sparsity={self.initial_sparsity}"
        require(0 <= self.sparsity < 1, f"sparsity={self.sparsity}: choose 0 or more, less than 1")
        rises = 0 <= self.initial_sparsity <= self.sparsity
        require(rises, f"{start}: choose 0 to sparsity: a pruned weight stays pruned")
        require(self.method in _METHODS, f"method={self.method}: choose {', '.join(_METHODS)}")
        require(self.scope in _SCOPES, f"scope={self.scope}: choose {', '.join(_SCOPES)}")
        require(self.norm > 0, f"norm={self.norm}: choose more than 0")

    def level(self, plan: range, step: int) -> float:
        """Return the share to prune after a step of the plan (Zhu and Gupta 2017)."""
        last = len(plan) - 1
        done = min((step - plan.start) // plan.step, last) / last if last else 1
        return self.sparsity + (self.initial_sparsity - self.sparsity) * (1 - done) ** 3


class Pool(NamedTuple):
    """Weights that are compared with each other: those of a rule, or of one layer of it."""

    rule: str
    settings: Settings
    members: Mapping[str, nn.Parameter]


def _parsed(node: Any, settings: Mapping[str, Any]) -> list[tuple[GroupRule, Settings]]:
    """Parse rules in the form of parameter groups; each may replace some of `settings`.

    Raises ConfigError.
    """
    rules, problems, known = [], list[Problem](), (*param_groups.SELECTORS, *settings)
    with collect_problems(problems):
        for rule in param_groups.parse_rules(node, "rules"):
            of_groups = {key for key in ("frozen", "layers") if getattr(rule, key)}
            for key in of_groups | rule.overrides.keys() - settings:
                hint = did_you_mean(key, known)
                problems.append(Problem(f"{rule.key}.{key}", "unknown key", hint))
            with collect_problems(problems), problems_at(rule.key):
                own = {key: rule.overrides.get(key, value) for key, value in settings.items()}
                rules.append((rule, Settings(**own)))
    if not rules and not problems:
        problems.append(Problem("rules", "there is none", "such as {convs: {module: conv}}"))
    _refuse(problems)
    return rules


def _pools(rules: Sequence[tuple[GroupRule, Settings]], model: nn.Module) -> list[Pool]:
    """Divide the parameters of a model: the first rule that accepts one takes it.

    Raises ConfigError where a rule takes none, or one that its method cannot prune.
    """
    every, found = [rule for rule, _ in rules], param_groups.candidates(model)
    owners = {c.name: param_groups.first_rule(every, c) for c in found}
    used = {rule.key for rule in owners.values() if rule}
    problems = list(param_groups.unused(every, used, found))
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
            generator = torch.Generator().manual_seed(derived_seed(seed, "pruning", name))
            drawn = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
            score = drawn.to(weight.device)
        elif settings.method == "ln_structured":
            others = [d for d in range(weight.ndim) if d != settings.dim % weight.ndim]
            # The mean over a slice, so that slices of different sizes compare.
            score = score.pow(settings.norm).mean(others, keepdim=True)
            gone = gone.all(others, keepdim=True)
        scores.append(score.masked_fill(gone, -1))
    units = torch.cat([score.flatten() for score in scores])
    lowest = units.argsort(stable=True)[: round(level * len(units))]
    chosen = torch.zeros_like(units, dtype=torch.bool).index_fill_(0, lowest, True)
    parts = torch.split(chosen, [score.numel() for score in scores])
    for name, score, part in zip(pool.members, scores, parts, strict=True):
        pruned[name].logical_or_(part.view(score.shape))


@dataclass(eq=False, kw_only=True)
class Pruning(Settings, Callback):
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

    rules: Mapping[str, Mapping[str, Any] | None]
    start_step: float = 0
    end_step: float | None = None
    every_n_steps: int = 1
    changes_weights = True
    supports_sharding = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rules = _parsed(self.rules, {f.name: getattr(self, f.name) for f in fields(Settings)})
        check_least(every_n_steps=self.every_n_steps)
        plan = self.schedule(1)
        alike = isinstance(self.start_step, float) == isinstance(self.end_step, float)
        falls = alike and self.end_step is not None and self.end_step < self.start_step
        require(not falls, f"end_step={self.end_step}: choose at least start_step={plan.start}")
        self.pools = list[Pool]()
        self._pruned = dict[str, Tensor]()  # by name of the parameter, True where it is zero
        self._handles = list[Any]()

    def schedule(self, total: int | None) -> range:
        """Return the steps at which a run of `total` updates prunes. Raises CallbackError."""
        first = steps_of("start_step", self.start_step, total)
        end = first if self.end_step is None else steps_of("end_step", self.end_step, total)
        return range(first, max(first, end) + 1, self.every_n_steps)

    def check(self, model: nn.Module) -> None:
        """Divide the parameters of the model by the rules."""
        self.pools = _pools(self._rules, model)

    def setup(self, trainer: Trainer) -> None:
        """Find the weights, their averages, and the steps."""
        callbacks = list(trainer.callbacks.values())
        self._averages = [c for c in callbacks if isinstance(c, Average)]
        with problems_at(f"callbacks.{self.name}"):
            self.check(trainer.model)
            self._plan = self.schedule(trainer.total_steps)
            for average in self._averages:
                own, name = type(average).tensors is not Average.tensors, average.name
                require(own, f"callbacks.{name} would keep what is pruned: give it `tensors`")
                first = callbacks.index(average) > callbacks.index(self)
                require(first, f"must come before callbacks.{name}, which reads the weights")
        self._weights = {n: p for pool in self.pools for n, p in pool.members.items()}
        for name, weight in self._weights.items():
            self._pruned[name] = torch.zeros_like(weight, dtype=torch.bool, requires_grad=False)
            if weight.requires_grad:
                hook = _masked_by(self._pruned[name])
                self._handles.append(weight.register_hook(hook))  # type: ignore[no-untyped-call]

    def on_fit_start(self, trainer: Trainer) -> None:
        """Prune what is due: at the first step, or after a resume from a run without masks."""
        if trainer.state.global_step >= self._plan.start:
            self._prune(trainer)

    def on_update_end(self, trainer: Trainer) -> None:
        """Prune if it is due, and mask what the update has changed."""
        if trainer.state.skipped_in_a_row:
            return
        if trainer.state.global_step in self._plan:
            trainer.updater.check_deferred_nonfinite()
            self._prune(trainer)
        else:
            self._apply(self._weights)

    def _prune(self, trainer: Trainer) -> None:
        for pool in self.pools:
            level = pool.settings.level(self._plan, trainer.state.global_step)
            extend(pool, self._pruned, level, trainer.options.seed)
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

    def teardown(self, trainer: Trainer) -> None:
        """Remove the hooks of the gradients."""
        for handle in self._handles:
            handle.remove()

    def explain(self, trainer: Trainer) -> Iterator[str]:
        """Describe what will be pruned, when, and to which sparsity."""
        plan = self.schedule(trainer.total_steps)
        when = f"from step {plan[0]} to {plan[-1]}, every {plan.step}"
        yield f"callbacks.{self.name} prunes {when if len(plan) > 1 else f'at step {plan[0]}'}:"
        for pool in _pools(self._rules, trainer.model):
            how = f"{pool.settings.sparsity:.1%} ({pool.rule}, {pool.settings.method}"
            for name, weight in pool.members.items():
                yield f"  {name}: {weight.numel():,} weights, {how}, {pool.settings.scope})"

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, True where a weight is pruned."""
        return {"pruned": dict(self._pruned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the masks of the parameters that the rules take."""
        for name in self._pruned.keys() & state["pruned"].keys():
            self._pruned[name].copy_(state["pruned"][name])


def _masked_by(pruned: Tensor) -> Any:
    """Return the hook that zeroes gradients of pruned weights: norms are those of the others."""
    return lambda grad: grad if grad.is_sparse else grad.masked_fill(pruned, 0)
