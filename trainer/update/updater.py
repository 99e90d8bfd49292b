"""One optimizer update: the exact mean over the samples of all its micro-batches (I3)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from data.batch import MicroBatch, joined
from trainer.errors import DivergedError, ModelError, SampleError
from trainer.optimizers.optimizers import needs_closure
from trainer.task import StepOutput, as_output, unsound
from trainer.update.copies import Backup
from trainer.update.gradients import add_noise, clip, largest, total_norm, without_effect
from trainer.update.guard import Guard, guard_of
from trainer.update.labels import Labels, refuse_without
from trainer.update.misfit import MISFITS, misfit
from trainer.update.nonfinite import explain
from trainer.update.parts import Parts
from trainer.update.shares import Shares, Total, add_up
from trainer.update.sums import Sums
from trainer.update.turn import Turn, refuse_missing_turns, turns_of


class Updater:
    """Apply updates to a model, and skip those that are not finite."""

    def __init__(self, parts: Parts) -> None:
        device = parts.strategy.device
        self.epoch_sums = Sums(device)
        self.sums = Sums(device, over=self.epoch_sums)  # since the last log
        self._shares = Shares(parts.task, parts.strategy, self.sums.dtype)
        self.keeps_updates = False  # for callbacks that ask for an update's batch and outputs
        self._last_batches: Sequence[MicroBatch] = ()
        self._last_outputs: dict[str, list[StepOutput]] = {}
        self._labels = Labels()
        self._parts = parts
        self._turns = turns_of(parts.optimizers, parts.task)
        others = list(parts.task.own_modules().values())
        # A non-finite turn undoes those before it; a search may end at any evaluation.
        early = [t for t in self._turns if t is not self._turns[-1] or t.searching]
        optimizers = list({o: None for t in early for o in t.every})
        self._backup = Backup([parts.model, *others], optimizers)
        self._apart = [p for module in others for p in module.parameters()]
        _refuse_what_a_search_leaves_out(parts)

    @functools.cached_property
    def _guard(self) -> Guard:
        refuse_missing_turns(self._turns, self._parts.optimizers, self._parts.task)
        return guard_of(self._parts, self._backup)

    def apply(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Run micro-batches (forward, scaled backward) -> unscale -> clip -> step -> zero.

        Once for each turn. Returns False if the update was skipped.
        """
        parts, guard, taken = self._parts, self._guard, []
        guard.remember()
        if self.keeps_updates:
            self._last_batches, self._last_outputs = micro_batches, {}
        for turn in self._turns:
            outputs, shares = self._accumulate(turn, micro_batches)
            parts.timer.lap("forward + backward")
            parts.precision.unscale(turn.optimizers)
            parameters = turn.parameters
            norm = total_norm(parameters, parts.options.clipping.norm_type, turn.alike)
            if guard.refuses(norm):
                return self._refuse(micro_batches, shares)
            clip(parts.options.clipping, parts.optimizers, parameters, norm, turn.alike)
            if parts.options.gradient_noise is not None:
                add_noise(parts.options.gradient_noise, parameters, parts.state.updates, turn.name)
            parts.hooks.emit("on_gradients", parts)
            for optimizer in turn.optimizers:
                guard.step(optimizer)
            if turn.searching:
                self._search(turn, micro_batches, shares)
                if guard.refuses(largest(parameters)):
                    return self._refuse(micro_batches, shares)
            parts.precision.update_scale()
            parts.optimizers.zero_grad()
            taken.append((turn, outputs, norm))
        self._backup.settle()
        for turn, outputs, norm in taken:
            self._add_sums(turn, micro_batches, outputs, norm)
        self.sums.pack()
        parts.timer.lap("optimizer")
        return True

    def try_out(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Compute an update's gradients and drop them: for `Strategy.warm_up` and a dry run."""
        self._guard.remember()
        for turn in self._turns:
            outputs, _ = self._accumulate(turn, micro_batches)
            self._parts.optimizers.zero_grad()
            self._add_outputs(Sums(self._parts.strategy.device), turn, micro_batches, outputs)
        self._guard.restore()

    def _accumulate(
        self, turn: Turn, micro_batches: Sequence[MicroBatch]
    ) -> tuple[list[StepOutput], list[Tensor]]:
        """Return each micro-batch's results and its share of the update's loss."""
        parts, totals = self._parts, self._totals(micro_batches)
        outputs, shares = [], []
        for micro_batch in micro_batches:
            last, counts = micro_batch is micro_batches[-1], micro_batch.piece.count > 0
            with parts.strategy.accumulate(parts.wrapped, last, counts):
                with parts.precision.autocast():
                    output = self._forward(turn, micro_batch.batch)
                try:
                    share = self._shares.of(output, micro_batch.piece, totals)
                    # The process that owns a borrowed sample checks its loss.
                    parts.precision.backward(share if counts else share.nan_to_num())
                except MISFITS as error:
                    raise self._unsound(turn, output) or error from None
            outputs.append(output)
            shares.append(share)
        if parts.strategy.group.world_size > 1:
            self._exchange_apart()
        if self.keeps_updates:
            self._last_outputs[turn.name] = outputs
        return outputs, shares

    def last_update(self) -> dict[str, Any]:
        """Return `batch` and `outputs` of the last update, for `Callback.on_update_end`."""
        batches = [m.batch for m in self._last_batches if m.piece.count]
        outputs = [output for turn in self._last_outputs.values() for output in turn]
        return {"batch": joined(batches) if batches else None, "outputs": outputs}

    def _exchange_apart(self) -> None:
        # The strategy's wrapper knows the model's parameters, not those of losses.
        strategy = self._parts.strategy
        for parameter in self._apart:
            if parameter.grad is not None:
                parameter.grad = strategy.group.reduce(parameter.grad) / strategy.gradient_scale

    def _totals(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Total]:
        try:
            return self._shares.totals(micro_batches)
        except MISFITS as error:
            batch, updates = micro_batches[0].batch, self._parts.state.updates
            if (known := misfit(error, batch, updates)) is not None:
                raise known from error
            raise

    def _forward(self, turn: Turn, batch: Any) -> StepOutput:
        parts = self._parts
        try:
            if turn.name:
                result = parts.task.turn_step(parts.wrapped, batch, turn.name)
                return as_output(result, parts.task, "turn_step")
            result = parts.task.training_step(parts.wrapped, batch)
            return as_output(result, parts.task, "training_step")
        except MISFITS as error:
            if "more than 1 value per channel" in str(error):
                raise SampleError(
                    "BatchNorm has no statistics of a single sample: leave a short last batch out "
                    "with loader.drop_last=true, or change loader.batch_size"
                ) from error
            if (known := misfit(error, batch, parts.state.updates)) is not None:
                raise known from error
            raise

    def _unsound(self, turn: Turn, output: StepOutput) -> Exception | None:
        step = "turn_step" if turn.name else "training_step"
        return unsound(output, self._parts.task, step, self._parts.model)

    def _search(
        self, turn: Turn, micro_batches: Sequence[MicroBatch], shares: Sequence[Tensor]
    ) -> None:
        """Let optimizers step that evaluate loss and gradients by themselves."""
        # The gradients are those of their first evaluation, unless other optimizers have stepped.
        known = [] if turn.optimizers else [self._loss(shares)]

        def evaluate() -> Tensor:
            if known:
                return known.pop()
            self._parts.optimizers.zero_grad()
            return self._loss(self._accumulate(turn, micro_batches)[1])

        for optimizer in turn.searching:
            optimizer.step(evaluate)  # type: ignore[arg-type]

    def _loss(self, shares: Sequence[Tensor]) -> Tensor:
        strategy = self._parts.strategy
        return strategy.group.reduce(add_up(shares).detach()) / strategy.gradient_scale

    def _refuse(self, micro_batches: Sequence[MicroBatch], shares: Sequence[Tensor]) -> bool:
        parts = self._parts
        self._guard.restore()
        if parts.precision.scales:
            parts.precision.update_scale()
        elif parts.options.on_nonfinite == "stop":
            here = explain(parts.model, parts.state, micro_batches, shares)
            raise DivergedError(min(parts.strategy.group.gather(here)).text)
        parts.optimizers.zero_grad()
        return False

    def _add_sums(
        self,
        turn: Turn,
        micro_batches: Sequence[MicroBatch],
        outputs: Sequence[StepOutput],
        norm: Tensor,
    ) -> None:
        suffix = f"_{turn.name}" if turn.name else ""
        self._add_outputs(self.sums, turn, micro_batches, outputs)
        # The norm is the same on every process, so one of them counts it.
        once = int(self._parts.strategy.group.is_main)
        self.sums.add(f"grad_norm{suffix}", norm, once, once)

    def _add_outputs(
        self,
        sums: Sums,
        turn: Turn,
        micro_batches: Sequence[MicroBatch],
        outputs: Sequence[StepOutput],
    ) -> None:
        name = f"loss_{turn.name}" if turn.name else "loss"
        for micro_batch, output in zip(micro_batches, outputs, strict=True):
            try:
                sums.add_output(output, micro_batch.piece.count, name)
            except MISFITS as error:
                raise self._unsound(turn, output) or error from None

    def take_means(self) -> dict[str, float]:
        """Return `train/<name>`, the means since the last call. Raises DivergedError."""
        parts = self._parts
        means = self.sums.means(parts.strategy.group.reduce)
        self.sums.reset()
        self._labels.look("train", self.sums, parts.strategy.group.is_main)
        bad = [name for name, value in means.items() if not math.isfinite(value)]
        if bad and parts.options.on_nonfinite == "stop":
            raise DivergedError(
                f"train/{bad[0]} is {means[bad[0]]} (step {parts.state.global_step}, epoch "
                f"{parts.state.epoch}): lower optimizer.lr, or go on with trainer.on_nonfinite=skip"
            )
        return {f"train/{name}": value for name, value in means.items()}

    def epoch_means(self, ended: bool) -> dict[str, float]:
        """Return `train/epoch_<name>`: the means over the epoch so far; reset them if `ended`."""
        means = self.epoch_sums.means(self._parts.strategy.group.reduce)
        if ended:
            self.epoch_sums.reset()
            refuse_without(self.epoch_sums, self._parts.state.epoch - 1)
        return {f"train/epoch_{name}": value for name, value in means.items()}

    def counts(self) -> dict[str, float]:
        """Return the loss scale and the number of skipped updates, where there are any."""
        precision, skipped = self._parts.precision, self._parts.state.skipped_updates
        scale = {"train/loss_scale": precision.scale} if precision.scales else {}
        return scale | ({"train/skipped_updates": skipped} if skipped else {})

    def count_skipped(self, count: int) -> None:
        """Count updates that were not applied; too many in a row end the run."""
        parts, state = self._parts, self._parts.state
        state.skipped_updates += count
        state.skipped_in_a_row += count
        if state.skipped_in_a_row >= parts.options.max_skipped_in_a_row:
            scale = parts.precision.scale if parts.precision.scales else None
            raise DivergedError(
                f"the last {state.skipped_in_a_row} updates were not finite (after step "
                f"{state.global_step}, epoch {state.epoch}"
                + (f", loss scale {scale:g}" if scale is not None else "")
                + "): lower optimizer.lr, or allow more with trainer.max_skipped_in_a_row"
            )

    def confirm(self) -> None:
        """Ask the device whether all updates were applied; the host waits for it.

        With a guard on the device a skipped update ends the run: parameters, buffers, optimizer
        state and `global_step` are then those from before it. Raises DivergedError.
        """
        count, state = self._guard.confirm(), self._parts.state
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
