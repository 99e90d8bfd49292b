"""One optimizer update: the exact mean over the samples of all its micro-batches (I3)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.batch import MicroBatch, Piece
from trainer.errors import DivergedError, SampleError
from trainer.gradients import clip, is_finite, total_norm
from trainer.metrics import Sums, mean_of
from trainer.misfit import MISFITS, misfit
from trainer.nonfinite import Guard, explain
from trainer.optimizers import needs_closure
from trainer.parts import Parts
from trainer.task import SUM, StepOutput


@dataclass(frozen=True, slots=True)
class _Turn:
    """Optimizers that step together on one loss; unnamed where all do."""

    name: str
    optimizers: list[Optimizer]
    searching: list[Optimizer]  # those that evaluate the loss again within a step, as LBFGS does
    parameters: list[Tensor]

    @classmethod
    def of(cls, name: str, optimizers: Iterable[Optimizer]) -> _Turn:
        """Sort the optimizers once: asking each of them at every step would cost."""
        every = list(optimizers)
        return cls(
            name,
            [o for o in every if not needs_closure(o)],
            [o for o in every if needs_closure(o)],
            [p for o in every for group in o.param_groups for p in group["params"]],
        )


class Updater:
    """Apply updates to a model, or refuse those that are not finite."""

    def __init__(self, parts: Parts) -> None:
        device = parts.strategy.device
        self.sums = Sums(device)  # since the last log
        self._parts = parts
        self._task = parts.task
        self._optimizers = parts.optimizers
        self._strategy = parts.strategy
        self._precision = parts.precision
        self._options = parts.options
        self._state = parts.state
        self._guard = Guard(parts.model, device)
        # A scaled loss overflows now and then, and its scaler looks at the host anyway; else a
        # GPU decides by itself and is asked at the log boundary.
        self._verdict_on_host = device.type == "cpu" or parts.precision.scales

    @functools.cached_property
    def _turns(self) -> list[_Turn]:
        optimizers = dict(self._optimizers.items())
        if not self._task.turns:
            return [_Turn.of("", optimizers.values())]
        return [_Turn.of(name, [optimizers[name]]) for name in self._task.turns]

    def apply(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Run micro-batches (forward, scaled backward) -> unscale -> clip -> step -> zero."""
        batches = [self._parts.to_device(m.batch) for m in micro_batches]
        self._guard.remember()
        return all(self._take_turn(turn, micro_batches, batches) for turn in self._turns)

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
    ) -> bool:
        outputs, shares = self._accumulate(turn, micro_batches, batches)
        self._precision.unscale(turn.optimizers)
        norm = total_norm(turn.parameters, self._options.clipping.norm_type)
        if self._verdict_on_host and not (is_finite(norm) and self._is_finite(shares)):
            self._refuse(micro_batches, batches)
            return False
        clip(self._options.clipping, self._optimizers, turn.parameters, norm)
        if self._options.gradient_noise is not None:
            self._options.gradient_noise.add(turn.parameters, self._state.updates, turn.name)
        if self._verdict_on_host:
            for optimizer in turn.optimizers:
                optimizer.step()
            for optimizer in turn.searching:
                optimizer.step(self._closure(turn, micro_batches, batches))  # type: ignore[arg-type]
            self._precision.update_scale()
        else:
            self._guard.step(turn.optimizers, norm)
        self._optimizers.zero_grad()
        self._add_sums(turn, micro_batches, outputs, norm)
        return True

    def _is_finite(self, shares: Sequence[Tensor]) -> bool:
        # An infinite loss may have a finite gradient. Where several processes see different
        # losses their verdicts could differ: there the mean at the log boundary tells all.
        return self._strategy.world_size > 1 or all(is_finite(share) for share in shares)

    def _accumulate(
        self, turn: _Turn, micro_batches: Sequence[MicroBatch], batches: list[Any]
    ) -> tuple[list[StepOutput], list[Tensor]]:
        """Return each micro-batch's results and its share of the update's loss."""
        totals = self._totals(micro_batches, batches)
        outputs, shares = [], []
        for micro_batch, batch in zip(micro_batches, batches, strict=True):
            last, counts = micro_batch is micro_batches[-1], micro_batch.piece.count > 0
            with self._strategy.accumulate(self._parts.wrapped, last, counts):
                with self._precision.autocast():
                    output = self._forward(turn, batch)
                share = self._share(output, micro_batch.piece, totals)
                self._precision.backward(share)
            outputs.append(output)
            shares.append(share)
        return outputs, shares

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

    def _totals(self, micro_batches: Sequence[MicroBatch], batches: list[Any]) -> dict[str, Tensor]:
        """Return the update's denominators that depend on the data, over all devices."""
        totals = {}
        for name in self._task.count_names:
            total = torch.zeros((), dtype=self.sums.dtype, device=self._strategy.device)
            for micro_batch, batch in zip(micro_batches, batches, strict=True):
                if micro_batch.piece.count:
                    total = total + self._task.counts(batch)[name]
            totals[name] = self._strategy.reduce(total)
        return totals

    def _share(self, output: StepOutput, piece: Piece, totals: Mapping[str, Tensor]) -> Tensor:
        scale = self._strategy.gradient_scale
        share = piece.count * scale / piece.total
        if isinstance(output.loss, Tensor):
            loss = output.loss.mean() if output.loss.ndim else output.loss
            return loss if share == 1 else loss * share
        terms = []
        for name, term in output.loss.items():
            count = output.counts.get(name)
            if not piece.count:  # a borrowed sample: it takes part with weight zero
                terms.append(term.sum() * 0)
            elif count is SUM:
                terms.append(term.sum() * scale)
            elif isinstance(count, Tensor):
                part = count.to(self.sums.dtype) * scale / totals[name]
                terms.append(mean_of(term, count) * part.to(term.dtype))
            else:
                terms.append(term.mean() * share)
        return _add(terms)

    def _closure(
        self, turn: _Turn, micro_batches: Sequence[MicroBatch], batches: list[Any]
    ) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            self._optimizers.zero_grad()
            _, shares = self._accumulate(turn, micro_batches, batches)
            return self._strategy.reduce(_add(shares).detach()) / self._strategy.gradient_scale

        return evaluate

    def _refuse(self, micro_batches: Sequence[MicroBatch], batches: list[Any]) -> None:
        self._guard.restore()
        if self._precision.scales:
            self._precision.update_scale()
        elif self._options.on_nonfinite == "stop":
            here = explain(self._parts.model, self._state, micro_batches, batches)
            raise DivergedError(min(self._strategy.gather(here)).text)
        self._optimizers.zero_grad()

    def _add_sums(
        self,
        turn: _Turn,
        micro_batches: Sequence[MicroBatch],
        outputs: Sequence[StepOutput],
        norm: Tensor,
    ) -> None:
        suffix = f"_{turn.name}" if turn.name else ""
        finite = None if self._verdict_on_host else torch.isfinite(norm)
        for micro_batch, output in zip(micro_batches, outputs, strict=True):
            self.sums.add_output(output, micro_batch.piece.count, f"loss{suffix}", finite)
        # The norm is the same on every process, so one of them counts it.
        once = int(self._strategy.is_main)
        self.sums.add(f"grad_norm{suffix}", norm, once, once, finite)

    def take_means(self) -> dict[str, float]:
        """Return the means since the last call; one that is not finite ends the run."""
        means = self.sums.means(self._strategy.reduce)
        self.sums.reset()
        bad = [name for name, value in means.items() if not math.isfinite(value)]
        if bad and self._options.on_nonfinite == "stop":
            raise DivergedError(
                f"train/{bad[0]} is {means[bad[0]]} (step {self._state.global_step}, epoch "
                f"{self._state.epoch}): lower optimizer.lr, or go on with trainer.on_nonfinite=skip"
            )
        return means

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

    def learn_of_skipped(self) -> None:
        """Ask a GPU which updates it left out since the last time; waits for it."""
        if self._verdict_on_host:
            return
        count = self._guard.take_skipped()
        if count and self._options.on_nonfinite == "stop":
            raise DivergedError(
                f"{count} of the updates up to step {self._state.global_step} (epoch "
                f"{self._state.epoch}) were not finite and were not applied: lower optimizer.lr, "
                f"or go on over such updates with trainer.on_nonfinite=skip"
            )
        self._state.global_step -= count
        if count:
            self.count_skipped(count)


def _add(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)
