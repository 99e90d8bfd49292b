"""One optimizer update: the exact mean over the samples of all its micro-batches (I3)."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from regimen.data.batch import concat_batches
from regimen.trainer.errors import (
    SHAPE_ERRORS,
    DivergedError,
    ModelError,
    SampleError,
    UserCodeError,
    explain_shape_error,
    qualified_name,
)
from regimen.trainer.optimizers.state import needs_closure
from regimen.trainer.task import StepOutput, as_output, diagnose_step_output
from regimen.trainer.update import gradients
from regimen.trainer.update.gradients import LOWER, Guard
from regimen.trainer.update.sums import MicroBatches, Sums, add_up, metric, share_of, totals_of

if TYPE_CHECKING:
    from regimen.trainer.trainer import Trainer

_log = logging.getLogger(__name__)
_OWN_NAMES = ("loss_scale", "skipped_updates")  # logged in training, beside the norms of gradients
_LABELS = (
    "the loss leaves each of them out (its ignore_index, by default -100, or a class weight of "
    "0); does the data set return the right labels?"
)


class Phase:
    """Optimizers that step together on one loss; without a name if it has all of them."""

    def __init__(self, name: str, optimizers: Sequence[Optimizer]) -> None:
        self.name = name
        self.step = "turn_step" if name else "training_step"  # the task's method
        self.loss = f"loss_{name}" if name else "loss"
        self.norm = f"grad_norm_{name}" if name else "grad_norm"
        self.every = optimizers
        # Those that only step, and those that evaluate the loss again within one, as LBFGS does.
        self.optimizers = [o for o in optimizers if not needs_closure(type(o))]
        self.searching = [o for o in optimizers if needs_closure(type(o))]
        self._sizes: list[int] = []
        self._parameters: list[Tensor] = []
        self.alike = False  # whether they are plain tensors of one device and dtype

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all groups: a callback may add groups during the run."""
        groups = [group["params"] for o in self.every for group in o.param_groups]
        if (sizes := list(map(len, groups))) != self._sizes:
            self._sizes, self._parameters = sizes, [p for group in groups for p in group]
            kinds = {(type(p), p.device, p.dtype) for p in self._parameters}
            self.alike = len(kinds) == 1 and kinds.pop()[0] in (Tensor, nn.Parameter)
        return self._parameters


class Updater:
    """Apply updates to a trainer's model, and skip those that are not finite."""

    def __init__(self, trainer: Trainer) -> None:
        device, task = trainer.strategy.device, trainer.task
        self._trainer = trainer
        self.epoch_sums = Sums(device)
        self.sums = Sums(device, over=self.epoch_sums)  # since the last log
        self._told: set[str] = set()  # the stages without labels
        # For callbacks that ask for an update's batch and outputs.
        self._keeps = trainer.hooks.asks_for_batches
        self._last_batches: MicroBatches = ()
        self._last_outputs: dict[str, list[StepOutput]] = {}
        known = trainer.optimizers.optimizers
        # Turns without an optimizer are left out: an evaluation has none, and needs none.
        named = [Phase(name, [known[name]]) for name in task.turns if name in known]
        self._phases = named if task.turns else [Phase("", list(known.values()))]
        self._apart = [p for module in task.own_modules().values() for p in module.parameters()]
        searching = [o for phase in self._phases for o in phase.searching]
        keys = gradients.without_effect(trainer.precision.name, trainer.options)
        if keys and searching:
            raise ModelError(
                f"{type(searching[0]).__name__} computes its gradients by itself, where trainer."
                f"{', trainer.'.join(keys)} cannot reach them: leave that out"
            )

    @functools.cached_property
    def guard(self) -> Guard:
        """What keeps non-finite updates from being applied; made by the first update."""
        task, known = self._trainer.task, self._trainer.optimizers.optimizers
        if task.turns and [phase.name for phase in self._phases] != list(task.turns):
            raise ModelError(
                f"the optimizers are {', '.join(known)}, but those of task.turns "
                f"{', '.join(task.turns)}"
            )
        # A non-finite turn undoes those before it; a search may end at any evaluation.
        early = [t for t in self._phases if t is not self._phases[-1] or t.searching]
        return Guard(self._trainer, list({o: None for phase in early for o in phase.every}))

    def apply(self, micro_batches: MicroBatches) -> bool:
        """Run micro-batches (forward, scaled backward) -> unscale -> clip -> step -> zero.

        Once for each phase. Returns False if the update was skipped.
        """
        trainer, options, guard, taken = self._trainer, self._trainer.options, self.guard, []
        scaler = trainer.precision.scaler
        guard.remember()
        if self._keeps:
            self._last_batches, self._last_outputs = micro_batches, {}
        for phase in self._phases:
            outputs, shares = self._accumulate(phase, micro_batches)
            trainer.timer.lap("forward + backward")
            for optimizer in phase.optimizers:  # and check for infinities, of a format that scales
                scaler.unscale_(optimizer)
            parameters = phase.parameters
            norm = gradients.total_norm(parameters, options.clip_grad_norm_type, phase.alike)
            if guard.refuses(norm):
                return self._refuse(micro_batches, shares)
            gradients.clip(options, trainer.optimizers, parameters, norm)
            if options.gradient_noise is not None:
                gradients.add_noise(options, parameters, trainer.state.updates, phase.name)
            trainer.hooks.emit("on_gradients", trainer)
            for optimizer in phase.optimizers:
                guard.step(optimizer)
            if phase.searching:
                self._search(phase, micro_batches, shares)
                if guard.refuses(gradients.largest(parameters)):
                    return self._refuse(micro_batches, shares)
            scaler.update()
            trainer.optimizers.zero_grad()
            taken.append((phase, outputs, norm))
        guard.rebind_buffers()
        once = int(trainer.group.data_rank == 0)  # the norm is the same on every process
        for phase, outputs, norm in taken:
            self._add_outputs(self.sums, phase, micro_batches, outputs)
            self.sums.add(metric(phase.norm), norm if once else 0.0, once)
        self.sums.pack()
        trainer.timer.lap("optimizer")
        return True

    def dry_run_backward(self, micro_batches: MicroBatches) -> None:
        """Compute an update's gradients and drop them: for `Strategy.warm_up` and a dry run."""
        self.guard.remember()
        for phase in self._phases:
            outputs, _ = self._accumulate(phase, micro_batches)
            self._trainer.optimizers.zero_grad()
            self._add_outputs(Sums(self._trainer.strategy.device), phase, micro_batches, outputs)
        self.guard.restore()

    def _accumulate(
        self, phase: Phase, micro_batches: MicroBatches
    ) -> tuple[list[StepOutput], list[Tensor]]:
        trainer, task, model = self._trainer, self._trainer.task, self._trainer.wrapped
        strategy, precision = trainer.strategy, trainer.precision
        outputs = []
        shares = []
        batch, output = micro_batches[0].batch, None
        try:
            totals = totals_of(task, strategy, micro_batches)
            for micro_batch in micro_batches:
                batch, output, counts = micro_batch.batch, None, micro_batch.batch_slice.count > 0
                with strategy.accumulate(model, micro_batch is micro_batches[-1], counts):
                    with precision.autocast():
                        result = (
                            task.turn_step(model, batch, phase.name)
                            if phase.name
                            else task.training_step(model, batch)
                        )
                        output = as_output(result, task, phase.step)
                    share = share_of(strategy, output, micro_batch.batch_slice, totals)
                    # The process that owns a borrowed sample checks its loss.
                    precision.backward(share if counts else share.nan_to_num())
                outputs.append(output)
                shares.append(share)
        except SHAPE_ERRORS as error:
            if output is not None:
                raise (
                    diagnose_step_output(output, task, phase.step, trainer.model) or error
                ) from None
            if known := explain_shape_error(error, batch, trainer.state.updates):
                raise known from error
            raise
        if trainer.group.world_size > 1:  # the wrapper knows the model's parameters, not the task's
            for parameter in self._apart:
                if parameter.grad is not None:
                    parameter.grad = trainer.group.reduce(parameter.grad) / strategy.gradient_scale
        if self._keeps:
            self._last_outputs[phase.name] = outputs
        return outputs, shares

    def last_update(self) -> dict[str, Any]:
        """Return `batch` and `outputs` of the last update, for `Callback.on_update_end`."""
        batches = [m.batch for m in self._last_batches if m.batch_slice.count]
        outputs = [output for phase in self._last_outputs.values() for output in phase]
        return {"batch": concat_batches(batches) if batches else None, "outputs": outputs}

    def _search(self, phase: Phase, micro_batches: MicroBatches, shares: Sequence[Tensor]) -> None:
        """Let optimizers step that evaluate loss and gradients by themselves."""
        strategy = self._trainer.strategy

        def whole(shares: Sequence[Tensor]) -> Tensor:
            return strategy.group.reduce(add_up(shares).detach()) / strategy.gradient_scale

        # The gradients are those of their first evaluation, unless other optimizers have stepped.
        known = [] if phase.optimizers else [whole(shares)]

        def evaluate() -> Tensor:
            if known:
                return known.pop()
            self._trainer.optimizers.zero_grad()
            return whole(self._accumulate(phase, micro_batches)[1])

        for optimizer in phase.searching:
            optimizer.step(evaluate)  # type: ignore[arg-type]

    def _refuse(self, micro_batches: MicroBatches, shares: Sequence[Tensor]) -> bool:
        trainer = self._trainer
        self.guard.restore()
        if trainer.precision.scales:
            trainer.precision.scaler.update()
        elif trainer.options.on_nonfinite == "stop":
            here = gradients.explain(trainer.model, trainer.state, micro_batches, shares)
            raise DivergedError(min(trainer.group.gather(here))[1])
        trainer.optimizers.zero_grad()
        return False

    def _add_outputs(
        self,
        sums: Sums,
        phase: Phase,
        micro_batches: MicroBatches,
        outputs: Sequence[StepOutput],
    ) -> None:
        for micro_batch, output in zip(micro_batches, outputs, strict=True):
            if phase.norm in output.sums:
                raise self._taken(phase.norm)
            try:
                sums.add_output(output, micro_batch.batch_slice.count, phase.loss)
            except SHAPE_ERRORS as error:
                wrong = diagnose_step_output(
                    output, self._trainer.task, phase.step, self._trainer.model
                )
                raise wrong or error from None

    def _taken(self, name: str) -> UserCodeError:
        """Return that a metric or loss has a name of ours, under which both would mix."""
        return UserCodeError(
            f"{qualified_name(self._trainer.task)}: a StepOutput has a metric or loss that is "
            "logged as "
            f"train/{name}, which the trainer logs itself: give it a name that does not begin with "
            f"epoch_ and is none of grad_norm, {', '.join(_OWN_NAMES)}"
        )

    def pop_means(self) -> dict[str, float]:
        """Return `train/<name>`: the means since the last call, what was skipped, the loss scale.

        Raises DivergedError.
        """
        trainer, state = self._trainer, self._trainer.state
        means = self.sums.means(trainer.group.reduce)
        self.sums.reset()
        for name in means:
            if name in _OWN_NAMES or name.startswith("epoch_"):
                raise self._taken(name)
        self.warn_of_labels("train", self.sums)
        bad = [name for name, value in means.items() if not math.isfinite(value)]
        if bad and trainer.options.on_nonfinite == "stop":
            raise DivergedError(
                f"train/{bad[0]} is {means[bad[0]]} (step {state.global_step}, epoch "
                f"{state.epoch}): {LOWER}"
            )
        if trainer.precision.scales:
            means["loss_scale"] = trainer.precision.scale
        if state.skipped_updates:
            means["skipped_updates"] = state.skipped_updates
        return {f"train/{name}": value for name, value in means.items()}

    def epoch_means(self, ended: bool) -> dict[str, float]:
        """Return `train/epoch_<name>`: the means over the epoch so far; reset them if `ended`.

        Raises SampleError where no label of a whole epoch counted: it has trained nothing.
        """
        self.sums.flush()
        means = self.epoch_sums.means(self._trainer.group.reduce)
        if ended:
            self.epoch_sums.reset()
            if self.epoch_sums.without_labels:
                epoch = self._trainer.state.epoch - 1
                raise SampleError(
                    f"no label of epoch {epoch} counts: nothing is trained; {_LABELS}"
                )
        return {f"train/epoch_{name}": value for name, value in means.items()}

    def warn_of_labels(self, stage: str, sums: Sums) -> None:
        """Warn once for each stage of labels of which none counts, after their means were taken."""
        if sums.without_labels and self._trainer.is_main and stage not in self._told:
            self._told.add(stage)
            _log.warning("no label counts in %s/loss, which is 0: %s", stage, _LABELS)

    def count_skipped(self) -> None:
        """Count an update that was not applied; too many in a row end the run."""
        trainer, state = self._trainer, self._trainer.state
        state.skipped_updates += 1
        state.skipped_in_a_row += 1
        if state.skipped_in_a_row >= trainer.options.max_skipped_in_a_row:
            scale = f", loss scale {trainer.precision.scale:g}" if trainer.precision.scales else ""
            raise DivergedError(
                f"the last {state.skipped_in_a_row} updates were not finite (after step "
                f"{state.global_step}, epoch {state.epoch}{scale}): lower optimizer.lr, or allow "
                "more with trainer.max_skipped_in_a_row"
            )

    def confirm(self) -> None:
        """Ask the device whether all updates were applied; the host waits for it.

        With a guard on the device a skipped update ends the run: parameters, buffers, optimizer
        state and `global_step` are then those from before it. Raises DivergedError.
        """
        count, state = self.guard.confirm(), self._trainer.state
        if not count:
            return
        state.global_step -= count
        state.skipped_updates += count
        later = f", nor were the {count - 1} after it" if count > 1 else ""
        raise DivergedError(
            f"the loss or a gradient is not finite at update {state.updates - count + 1} (step "
            f"{state.global_step + 1}, epoch {state.epoch}): the update was not applied{later}; "
            f"{LOWER}"
        )
