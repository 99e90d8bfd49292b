"""One optimizer update: the exact mean over the samples of all its micro-batches (I3)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import DivergedError, ModelError, SampleError
from trainer.optimizers.optimizers import needs_closure
from trainer.task import StepOutput
from trainer.update.batch import MicroBatch
from trainer.update.copies import HeldBuffers
from trainer.update.gradients import add_noise, clip, largest, total_norm, without_effect
from trainer.update.guard import Guard, guard_of
from trainer.update.misfit import MISFITS, misfit
from trainer.update.nonfinite import explain
from trainer.update.parts import Parts
from trainer.update.shares import Shares, add_up
from trainer.update.sums import Sums


@dataclass(frozen=True, slots=True)
class _Turn:
    """Optimizers that step together on one loss; unnamed where all do."""

    name: str
    every: list[Optimizer]
    optimizers: list[Optimizer]  # those that only step
    searching: list[Optimizer]  # those that evaluate the loss again within a step, as LBFGS does

    @property
    def parameters(self) -> list[Tensor]:
        """Return what is trained now: a callback may add groups on the way."""
        return [p for o in self.every for group in o.param_groups for p in group["params"]]

    @classmethod
    def of(cls, name: str, optimizers: Iterable[Optimizer]) -> _Turn:
        """Sort the optimizers once: asking each of them at every step would cost."""
        every = list(optimizers)
        return cls(
            name,
            every,
            [o for o in every if not needs_closure(o)],
            [o for o in every if needs_closure(o)],
        )


class Updater:
    """Apply updates to a model, or refuse those that are not finite."""

    def __init__(self, parts: Parts) -> None:
        device = parts.strategy.device
        self.epoch_sums = Sums(device)
        self.sums = Sums(device, over=self.epoch_sums)  # since the last log
        self._shares = Shares(parts.task, parts.strategy, self.sums.dtype)
        self._parts = parts
        self._task = parts.task
        self._optimizers = parts.optimizers
        self._strategy = parts.strategy
        self._group = parts.strategy.group
        self._precision = parts.precision
        self._options = parts.options
        self._state = parts.state
        others = list(parts.task.own_modules().values())
        self._buffers = HeldBuffers([parts.model, *others])
        self._apart = [p for module in others for p in module.parameters()]
        _refuse_what_a_search_leaves_out(parts)

    @functools.cached_property
    def _turns(self) -> list[_Turn]:
        optimizers = dict(self._optimizers.items())
        if not self._task.turns:
            return [_Turn.of("", optimizers.values())]
        return [_Turn.of(name, [optimizers[name]]) for name in self._task.turns]

    @functools.cached_property
    def _guard(self) -> Guard:
        # A turn that is refused takes those before it along; a search may end anywhere.
        early = [t for t in self._turns if t is not self._turns[-1] or t.searching]
        return guard_of(self._parts, list({o: None for t in early for o in t.every}))

    def apply(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Run micro-batches (forward, scaled backward) -> unscale -> clip -> step -> zero."""
        batches = [self._parts.to_device(m.batch) for m in micro_batches]
        self._guard.remember()
        taken = []
        for turn in self._turns:
            result = self._take_turn(turn, micro_batches, batches)
            if result is None:
                return False
            taken.append((turn, *result))
        self._buffers.settle()
        for turn, outputs, norm in taken:
            self._add_sums(turn, micro_batches, outputs, norm)
        return True

    def rehearse(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Compute an update's gradients and drop them, for `Strategy.rehearse`."""
        batches = [self._parts.to_device(m.batch) for m in micro_batches]
        self._guard.remember()
        for turn in self._turns:
            self._accumulate(turn, micro_batches, batches)
            self._optimizers.zero_grad()
        self._guard.restore()

    def _take_turn(
        self, turn: _Turn, micro_batches: Sequence[MicroBatch], batches: list[Any]
    ) -> tuple[list[StepOutput], Tensor] | None:
        """Return what the sums need; None if the turn, and so the update, was refused."""
        outputs, shares = self._accumulate(turn, micro_batches, batches)
        self._precision.unscale(turn.optimizers)
        parameters = turn.parameters
        norm = total_norm(parameters, self._options.clipping.norm_type)
        if self._guard.refuses(norm):
            self._refuse(micro_batches, batches, shares)
            return None
        clip(self._options.clipping, self._optimizers, parameters, norm)
        if self._options.gradient_noise is not None:
            add_noise(self._options.gradient_noise, parameters, self._state.updates, turn.name)
        for optimizer in turn.optimizers:
            self._guard.step(optimizer)
        if turn.searching:
            self._search(turn, micro_batches, batches, shares)
            if self._guard.refuses(largest(parameters)):
                self._refuse(micro_batches, batches, shares)
                return None
        self._precision.update_scale()
        self._optimizers.zero_grad()
        return outputs, norm

    def _accumulate(
        self, turn: _Turn, micro_batches: Sequence[MicroBatch], batches: list[Any]
    ) -> tuple[list[StepOutput], list[Tensor]]:
        """Return each micro-batch's results and its share of the update's loss."""
        totals = self._shares.totals(micro_batches, batches)
        outputs, shares = [], []
        for micro_batch, batch in zip(micro_batches, batches, strict=True):
            last, counts = micro_batch is micro_batches[-1], micro_batch.piece.count > 0
            with self._strategy.accumulate(self._parts.wrapped, last, counts):
                with self._precision.autocast():
                    output = self._forward(turn, batch)
                share = self._shares.of(output, micro_batch.piece, totals)
                # A borrowed sample's loss is not this process's to judge.
                self._precision.backward(share if counts else share.nan_to_num())
            outputs.append(output)
            shares.append(share)
        self._exchange_apart()
        return outputs, shares

    def _exchange_apart(self) -> None:
        # The strategy's wrapper knows the model's parameters, not those of losses.
        if self._group.world_size > 1:
            for parameter in self._apart:
                if parameter.grad is not None:
                    whole = self._group.reduce(parameter.grad)
                    parameter.grad = whole / self._strategy.gradient_scale

    def _forward(self, turn: _Turn, batch: Any) -> StepOutput:
        try:
            if turn.name:
                return self._task.turn_step(self._parts.wrapped, batch, turn.name)
            return self._task.training_step(self._parts.wrapped, batch)
        except MISFITS as error:
            if "more than 1 value per channel" in str(error):
                raise SampleError(
                    "BatchNorm has no statistics of a single sample: leave a short last batch out "
                    "with loader.drop_last=true, or change loader.batch_size"
                ) from error
            if (known := misfit(error, batch, self._state.updates)) is not None:
                raise known from error
            raise

    def _search(
        self,
        turn: _Turn,
        micro_batches: Sequence[MicroBatch],
        batches: list[Any],
        shares: Sequence[Tensor],
    ) -> None:
        """Let optimizers step that evaluate loss and gradients by themselves."""
        # What was computed is their first evaluation, unless other optimizers have stepped since.
        known = [] if turn.optimizers else [self._loss(shares)]

        def evaluate() -> Tensor:
            if known:
                return known.pop()
            self._optimizers.zero_grad()
            return self._loss(self._accumulate(turn, micro_batches, batches)[1])

        for optimizer in turn.searching:
            optimizer.step(evaluate)  # type: ignore[arg-type]

    def _loss(self, shares: Sequence[Tensor]) -> Tensor:
        return self._group.reduce(add_up(shares).detach()) / self._strategy.gradient_scale

    def _refuse(
        self, micro_batches: Sequence[MicroBatch], batches: list[Any], shares: Sequence[Tensor]
    ) -> None:
        self._guard.restore()
        if self._precision.scales:
            self._precision.update_scale()
        elif self._options.on_nonfinite == "stop":
            here = explain(self._parts.model, self._state, micro_batches, batches, shares)
            raise DivergedError(min(self._group.gather(here)).text)
        self._optimizers.zero_grad()

    def _add_sums(
        self,
        turn: _Turn,
        micro_batches: Sequence[MicroBatch],
        outputs: Sequence[StepOutput],
        norm: Tensor,
    ) -> None:
        suffix = f"_{turn.name}" if turn.name else ""
        for micro_batch, output in zip(micro_batches, outputs, strict=True):
            self.sums.add_output(output, micro_batch.piece.count, f"loss{suffix}")
        # The norm is the same on every process, so one of them counts it.
        once = int(self._group.is_main)
        self.sums.add(f"grad_norm{suffix}", norm, once, once)

    def take_means(self) -> dict[str, float]:
        """Return the means since the last call; one that is not finite ends the run."""
        means = self.sums.means(self._group.reduce)
        self.sums.reset()
        bad = [name for name, value in means.items() if not math.isfinite(value)]
        if bad and self._options.on_nonfinite == "stop":
            raise DivergedError(
                f"train/{bad[0]} is {means[bad[0]]} (step {self._state.global_step}, epoch "
                f"{self._state.epoch}): lower optimizer.lr, or go on with trainer.on_nonfinite=skip"
            )
        return means

    def epoch_means(self, ended: bool) -> dict[str, float]:
        """Return `epoch_<name>`: the means over the epoch so far; forget them where it `ended`."""
        means = self.epoch_sums.means(self._group.reduce)
        if ended:
            self.epoch_sums.reset()
        return {f"epoch_{name}": value for name, value in means.items()}

    def count_skipped(self, count: int) -> None:
        """Count updates that were not applied; too many in a row end the run."""
        state, bound = self._state, self._options.max_skipped_in_a_row
        state.skipped_updates += count
        state.skipped_in_a_row += count
        if state.skipped_in_a_row >= bound:
            scale = self._precision.scale if self._precision.scales else None
            raise DivergedError(
                f"the last {state.skipped_in_a_row} updates were not finite (after step "
                f"{state.global_step}, epoch {state.epoch}"
                + (f", loss scale {scale:g}" if scale is not None else "")
                + "): lower optimizer.lr, or allow more with trainer.max_skipped_in_a_row"
            )

    def confirm(self) -> None:
        """Learn from the device whether all updates were applied; the host waits for it.

        Where the device decides, an update that it left out ends the run: parameters, buffers,
        optimizer state and `global_step` are then what they were before it. Raises DivergedError.
        """
        count, state = self._guard.confirm(), self._state
        if not count:
            return
        state.global_step -= count
        state.skipped_updates += count
        later = f", nor were the {count - 1} after it" if count > 1 else ""
        raise DivergedError(
            f"the loss or a gradient is not finite at update {state.updates - count + 1} (step "
            f"{state.global_step + 1}, epoch {state.epoch}): the update was not applied{later}; "
            "lower optimizer.lr, bound it with trainer.clip_grad_norm, or leave such updates out "
            "with trainer.on_nonfinite=skip"
        )


def _refuse_what_a_search_leaves_out(parts: Parts) -> None:
    clipping, options = parts.options.clipping, parts.options
    keys = without_effect(
        parts.precision.name, clipping.norm, clipping.value, options.gradient_noise
    )
    searching = [o for o in parts.optimizers.optimizers.values() if needs_closure(o)]
    if keys and searching:
        raise ModelError(
            f"{type(searching[0]).__name__} computes its gradients by itself, where trainer."
            f"{', trainer.'.join(keys)} cannot reach them: leave that out"
        )
