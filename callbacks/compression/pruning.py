"""Prune weights while the network trains."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regimen.callbacks.support import check_least, check_positive, require, steps_of
from regimen.conf.errors import Problem, collect_problems, did_you_mean, problems_at, raise_problems
from regimen.trainer.callback import Average, Callback
from regimen.trainer.optimizers import param_groups
from regimen.trainer.optimizers.param_groups import GroupRule
from regimen.trainer.rng import derived_seed
from regimen.trainer.trainer import Trainer

_METHODS = ("l1", "random", "ln_structured")
_SCOPES = ("global", "layer")


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
        require(0 <= self.sparsity < 1, f"sparsity={self.sparsity}: choose 0 or more, less than 1")
        require(
            0 <= self.initial_sparsity <= self.sparsity,
            f"initial_sparsity={self.initial_sparsity}: choose 0 to sparsity: a pruned weight "
            "stays pruned",
        )
        require(self.method in _METHODS, f"method={self.method}: choose {', '.join(_METHODS)}")
        require(self.scope in _SCOPES, f"scope={self.scope}: choose {', '.join(_SCOPES)}")
        check_positive(norm=self.norm)

    def level(self, plan: range, step: int) -> float:
        """Return the share to prune after a step of the plan (Zhu and Gupta 2017)."""
        last = len(plan) - 1
        if last == 0:
            return self.sparsity
        times = min((step - plan.start) // plan.step, last)  # that it was pruned before
        left = 1 - times / last
        return self.sparsity + (self.initial_sparsity - self.sparsity) * left**3


class Pool(NamedTuple):
    """Weights that are compared with each other: those of a rule, or of one layer of it."""

    rule: str
    settings: Settings
    members: Mapping[str, nn.Parameter]


def _parsed(node: Any, defaults: Mapping[str, Any]) -> list[tuple[GroupRule, Settings]]:
    """Parse rules in the form of parameter groups; each may replace some of the default settings.

    Raises ConfigError.
    """
    rules = []
    problems = list[Problem]()
    valid_keys = (*param_groups.SELECTORS, *defaults)
    with collect_problems(problems):
        for rule in param_groups.parse_rules(node, "rules"):
            settings = dict(defaults)
            unknown = []
            for key, value in rule.overrides.items():
                if key in defaults:
                    settings[key] = value
                else:
                    unknown.append(key)
            # Options of parameter groups that mean nothing here.
            unknown += [key for key in ("frozen", "layers") if getattr(rule, key)]
            for key in unknown:
                hint = did_you_mean(key, valid_keys)
                problems.append(Problem(f"{rule.key}.{key}", "unknown key", hint))
            with collect_problems(problems), problems_at(rule.key):
                rules.append((rule, Settings(**settings)))
    if not rules and not problems:
        problems.append(Problem("rules", "there is none", "such as {convs: {module: conv}}"))
    _refuse(problems)
    return rules


def _pools(rules: Sequence[tuple[GroupRule, Settings]], model: nn.Module) -> list[Pool]:
    """Divide the parameters of a model: the first rule that accepts one takes it.

    Raises ConfigError where a rule takes none, or one that its method cannot prune.
    """
    all_rules = [rule for rule, _ in rules]
    candidates = param_groups.named_parameters(model)
    members_of = dict[str, dict[str, nn.Parameter]]()  # by rule and name
    for candidate in candidates:
        owner = param_groups.first_rule(all_rules, candidate)
        if owner is not None:
            members = members_of.setdefault(owner.key, {})
            members[candidate.name] = candidate.tensor
    problems = list(param_groups.unused_rules(all_rules, set(members_of), candidates))
    pools = []
    for rule, settings in rules:
        members = members_of.get(rule.key, {})
        if settings.method == "ln_structured":
            problems += _without_slices(rule, settings, members)
        if not settings.sparsity:
            continue
        if settings.scope == "global":
            pools.append(Pool(rule.key, settings, members))
        else:
            for name, weight in members.items():
                pools.append(Pool(rule.key, settings, {name: weight}))
    _refuse(problems)
    return pools


def _without_slices(
    rule: GroupRule, settings: Settings, members: Mapping[str, Tensor]
) -> Iterator[Problem]:
    """Yield a problem for each parameter that has no slices along the chosen dimension."""
    for name, weight in members.items():
        ndim = weight.ndim
        if ndim < 2 or not -ndim <= settings.dim < ndim:
            yield Problem(
                rule.key,
                f"{name} {list(weight.shape)} has no slices along {settings.dim}",
                "ln_structured takes matrices and kernels: add kind: [matrix, kernel]",
            )


def _refuse(problems: Iterable[Problem]) -> None:
    raise_problems(Problem("", str(problem)) for problem in problems)  # the caller adds its key


@torch.no_grad()
def extend(pool: Pool, pruned: Mapping[str, Tensor], level: float, seed: int) -> None:
    """Add to the masks `pruned` (True: zero) until a share `level` of the pool's units is pruned.

    A unit is a weight, or a slice where the method is structured. Pruned units stay pruned. The
    units with the lowest scores follow; of equal scores the first, so that every process prunes
    the same. torch.nn.utils.prune would rename the parameters, draw from the global generator and
    break ties by device.
    """
    scores = {}
    for name, weight in pool.members.items():
        scores[name] = _scores(name, weight, pruned[name], pool.settings, seed)
    all_scores = torch.cat([score.flatten() for score in scores.values()])
    count = round(level * len(all_scores))
    lowest = all_scores.argsort(stable=True)[:count]
    is_chosen = torch.zeros_like(all_scores, dtype=torch.bool)
    is_chosen.index_fill_(0, lowest, True)
    for name, score in scores.items():
        chosen = is_chosen[: score.numel()]
        is_chosen = is_chosen[score.numel() :]  # those of the parameters that follow
        pruned[name].logical_or_(chosen.view_as(score))


def _scores(name: str, weight: Tensor, pruned: Tensor, settings: Settings, seed: int) -> Tensor:
    """Return the score of each unit of a parameter, -1 where it is pruned.

    The shape has 1 in the dimensions that a unit spans. l1: Han et al., Learning both Weights and
    Connections for Efficient Neural Networks, 2015. ln_structured: Li et al., Pruning Filters for
    Efficient ConvNets, 2017.
    """
    if settings.method == "ln_structured":
        other_dims = list(range(weight.ndim))
        del other_dims[settings.dim]
        # The mean over a slice, so that slices of different sizes compare.
        powers = weight.abs().pow(settings.norm)
        scores = powers.mean(other_dims, keepdim=True)
        pruned = pruned.all(other_dims, keepdim=True)
    elif settings.method == "random":
        # The same numbers at every step: a higher sparsity prunes all that a lower one does.
        generator = torch.Generator()
        generator.manual_seed(derived_seed(seed, "pruning", name))
        drawn = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
        scores = drawn.to(weight.device)
    else:
        scores = weight.abs()
    return scores.masked_fill(pruned, -1)


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
        defaults = {field.name: getattr(self, field.name) for field in fields(Settings)}
        self._rules = _parsed(self.rules, defaults)
        check_least(every_n_steps=self.every_n_steps)
        self.schedule(1)  # checks both steps
        start = self.start_step
        end = self.end_step
        # A share of the run and a number of updates are only compared when the run is known.
        if end is not None and isinstance(end, float) == isinstance(start, float):
            require(end >= start, f"end_step={end}: choose at least start_step={start}")
        self.pools = list[Pool]()
        self._weights = dict[str, nn.Parameter]()
        self._pruned = dict[str, Tensor]()  # by name of the parameter, True where it is zero
        self._hooks = list[Any]()

    def schedule(self, total: int | None) -> range:
        """Return the steps at which a run of `total` updates prunes. Raises CallbackError."""
        start = steps_of("start_step", self.start_step, total)
        end = start
        if self.end_step is not None:
            end = max(start, steps_of("end_step", self.end_step, total))
        return range(start, end + 1, self.every_n_steps)

    def check(self, model: nn.Module) -> None:
        """Divide the parameters of the model by the rules."""
        self.pools = _pools(self._rules, model)

    def setup(self, trainer: Trainer) -> None:
        """Find the weights, their averages, and the steps."""
        with problems_at(f"callbacks.{self.name}"):
            self.check(trainer.model)
            self._plan = self.schedule(trainer.total_steps)
            self._averages = self._find_averages(list(trainer.callbacks.values()))
        for pool in self.pools:
            self._weights |= pool.members
        for name, weight in self._weights.items():
            if name not in self._pruned:  # a further `fit` goes on with the masks of the first
                self._pruned[name] = torch.zeros_like(weight, dtype=torch.bool)
            if weight.requires_grad:
                mask = partial(_masked, self._pruned[name])
                hook = weight.register_hook(mask)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _find_averages(self, callbacks: list[Callback]) -> list[Average]:
        averages = []
        for place, callback in enumerate(callbacks):
            if not isinstance(callback, Average):
                continue
            require(
                type(callback).tensors is not Average.tensors,
                f"callbacks.{callback.name} would keep what is pruned: give it `tensors`",
            )
            require(
                self in callbacks[:place],
                f"must come before callbacks.{callback.name}, which reads the weights",
            )
            averages.append(callback)
        return averages

    def on_fit_start(self, trainer: Trainer) -> None:
        """Prune what is due: at the first step, or after a resume from a run without masks."""
        if trainer.state.global_step >= self._plan.start:
            self._prune(trainer)

    def on_update_end(self, trainer: Trainer) -> None:
        """Prune if it is due, and mask what the update has changed."""
        state = trainer.state
        if state.skipped_in_a_row:
            return
        if state.global_step in self._plan:
            trainer.updater.check_deferred_nonfinite()
            self._prune(trainer)
        else:
            self._apply(self._weights)

    def _prune(self, trainer: Trainer) -> None:
        step = trainer.state.global_step
        for pool in self.pools:
            level = pool.settings.level(self._plan, step)
            extend(pool, self._pruned, level, trainer.options.seed)
        self._apply(self._weights)
        # Only after the masks have changed: an average of zero weights stays zero by itself.
        for average in self._averages:
            self._apply(average.tensors())

    @torch.no_grad()
    def _apply(self, tensors: Mapping[str, Tensor]) -> None:
        for name, pruned in self._pruned.items():
            if name in tensors:
                tensors[name].masked_fill_(pruned, 0)

    def scalars(self, trainer: Trainer) -> Mapping[str, float]:
        """Log the share of pruned weights among those that the rules take.

        Waits for the device, at a log line, where that is allowed.
        """
        total = 0
        pruned = 0
        for mask in self._pruned.values():
            total += mask.numel()
            pruned += int(mask.sum())
        # With a sparsity of 0, as that of a sweep may be, no weight is taken.
        return {"pruning/sparsity": pruned / max(total, 1)}

    def teardown(self, trainer: Trainer) -> None:
        """Remove the hooks of the gradients."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def explain(self, trainer: Trainer) -> Iterator[str]:
        """Describe what will be pruned, when, and to which sparsity."""
        plan = self.schedule(trainer.total_steps)
        when = f"at step {plan.start}"
        if len(plan) > 1:
            when = f"from step {plan.start} to {plan[-1]}, every {plan.step}"
        yield f"callbacks.{self.name} prunes {when}:"
        for rule, settings, members in _pools(self._rules, trainer.model):
            how = f"{settings.sparsity:.1%} ({rule}, {settings.method}, {settings.scope})"
            for name, weight in members.items():
                yield f"  {name}: {weight.numel():,} weights, {how}"

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, True where a weight is pruned."""
        return {"pruned": dict(self._pruned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the masks of the parameters that the rules take."""
        for name, mask in state["pruned"].items():
            if name in self._pruned:
                self._pruned[name].copy_(mask)


def _masked(pruned: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient that is zero for pruned weights: its norm is that of the others."""
    if grad.is_sparse:
        return grad
    return grad.masked_fill(pruned, 0)
