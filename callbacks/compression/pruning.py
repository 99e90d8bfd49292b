"""Prune weights while the network trains."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from callbacks.compression.masks import (
    Pool,
    PruningSettings,
    Rules,
    Schedule,
    check_step,
    extend,
)
from callbacks.support.errors import CallbackError
from conf.errors import problems_at
from trainer.callback import Average, Callback
from trainer.summary.text import table, to_text

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_log = logging.getLogger(__name__)


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
