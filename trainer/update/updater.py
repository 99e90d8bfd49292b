"""One optimizer update: the exact mean over the samples of all its micro-batches (I3)."""

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from regimen.data.batch import concat_batches
from regimen.trainer.callback import Hooks
from regimen.trainer.components.components import Components
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
from regimen.trainer.task import StepOutput, as_output, diagnose_step_output, take_turn
from regimen.trainer.update import gradients
from regimen.trainer.update.gradients import ADVICE
from regimen.trainer.update.guard import Guard, make_guard
from regimen.trainer.update.loss import MicroBatches, add_up, scaled_loss, update_counts
from regimen.trainer.update.means import MeanAccumulator, metric_key

_log = logging.getLogger(__name__)
# Names that training logs by itself, beside the norms of gradients.
_RESERVED_NAMES = ("loss_scale", "skipped_updates")
WHY_NO_LABEL_COUNTS = (
    "the loss leaves each of them out (its ignore_index, by default -100, or a class weight of "
    "0); does the data set return the right labels?"
)


class Phase:
    """Optimizers that step together on one loss: all of them, or one of a GAN's, by its name."""

    def __init__(self, name: str, optimizers: Sequence[Optimizer], index: int = 0) -> None:
        self.name = name  # empty if it has all optimizers
        self.index = index  # how many turns of the update are before
        self.step_name = "turn_step" if name else "training_step"  # the task's method
        self.key = f"{name}.{index}" if index else name  # a turn may come twice
        self.loss_name = f"loss_{name}" if name else "loss"
        self.norm_name = f"grad_norm_{name}" if name else "grad_norm"
        self.optimizers = optimizers
        # Those whose step needs the loss again, as that of LBFGS does, and all others.
        self.closure_optimizers = [o for o in optimizers if needs_closure(type(o))]
        self.plain_optimizers = [o for o in optimizers if not needs_closure(type(o))]

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all groups; a callback may add groups during the run."""
        return [p for o in self.optimizers for group in o.param_groups for p in group["params"]]


class PhaseResult(NamedTuple):
    """What a phase of an update has computed, to be logged once the whole update is applied."""

    phase: Phase
    micro_batches: MicroBatches
    outputs: list[StepOutput]  # of each micro-batch
    norm: Tensor  # of the gradients, before clipping


class Updater:
    """Apply updates to the model of `components`, and skip those that are not finite."""

    def __init__(self, components: Components, hooks: Hooks) -> None:
        device = components.strategy.device
        self._components = components
        self._hooks = hooks
        self.epoch_accumulator = MeanAccumulator(device)
        self.log_accumulator = MeanAccumulator(
            device, parent=self.epoch_accumulator
        )  # since the last log
        # For callbacks that ask for an update's batch and outputs.
        self._keeps_batches = hooks.asks_for_batches
        self._last_batches: MicroBatches = ()
        self._last_outputs: dict[Phase, list[StepOutput]] = {}
        self._phases = _phases_of(components)
        self._norm_names = [phase.norm_name for phase in self._phases]
        self._refuse_misfits()

    def _refuse_misfits(self) -> None:
        components = self._components
        keys = components.options.idle_with_closure(components.precision.name)
        optimizers = [o for phase in self._phases for o in phase.closure_optimizers]
        if keys and optimizers:
            raise ModelError(
                f"{type(optimizers[0]).__name__} computes its gradients by itself, where trainer."
                f"{', trainer.'.join(keys)} cannot reach them: leave that out"
            )
        if components.task.persistent and optimizers:
            raise ModelError(
                f"{type(optimizers[0]).__name__} computes the loss of a batch several times, which "
                f"would advance {qualified_name(components.task)}.persistent each time: take "
                "another optimizer"
            )

    @functools.cached_property
    def guard(self) -> Guard:
        """What keeps non-finite updates from being applied; made by the first update.

        Raises ModelError where the optimizers are not those of the task's turns.
        """
        turns = self._components.task.turns
        if turns and [phase.name for phase in self._phases] != list(turns):
            raise ModelError(
                f"the optimizers are {', '.join(self._components.optimizers.optimizers)}, but "
                f"those of task.turns {', '.join(turns)}"
            )
        # A non-finite phase undoes those before it, and LBFGS steps before its last evaluation.
        early: list[Optimizer] = []
        for phase in self._phases:
            if phase is not self._phases[-1] or phase.closure_optimizers:
                early += [o for o in phase.optimizers if o not in early]
        return make_guard(self._components, early)

    def apply(self, micro_batches: MicroBatches) -> bool:
        """Apply one update; return False if it was skipped.

        for each phase (one, except for a GAN):
            forward, backward  x micro-batches
            unscale -> norm -> clip -> noise -> on_gradients -> step -> zero_grad

        An update that is not finite is undone as a whole. Raises DivergedError for it with
        `on_nonfinite=stop`, unless the decision is left to the device (see `DeviceGuard`).
        """
        components = self._components
        options = components.options
        scaler = components.precision.scaler
        guard = self.guard
        guard.begin_update()
        if self._keeps_batches:
            self._last_batches = micro_batches
            self._last_outputs = {}
        results = []
        for phase, batches in self._with_batches(micro_batches):
            outputs, losses = self._accumulate(phase, batches)
            components.timer.lap("forward + backward")

            for optimizer in phase.plain_optimizers:
                # Divides by the loss scale of fp16; else does nothing. GradScaler's own `step` is
                # not needed: a norm that is not finite returns below.
                scaler.unscale_(optimizer)
            parameters = phase.parameters()
            # The norm over the shards of all processes: equal on each, so all decide alike.
            norm = gradients.total_norm(parameters, options.clip_grad_norm_type)
            # The host waits for the device here, once per phase, unless the device decides.
            if guard.is_nonfinite(norm):
                return self._skip(batches, losses)
            gradients.clip(options, components.optimizers, parameters, norm)
            if options.gradient_noise is not None:
                gradients.add_noise(options, parameters, components.state.updates, phase.key)
            self._hooks.emit("on_gradients")

            for optimizer in phase.plain_optimizers:
                guard.step(optimizer)
            if phase.closure_optimizers:
                self._step_with_closure(phase, batches, losses)
                # The gradients of its own evaluations were not looked at: their result is.
                if guard.is_nonfinite(gradients.largest_entry(parameters)):
                    return self._skip(batches, losses)
            scaler.update()
            components.optimizers.zero_grad()
            results.append(PhaseResult(phase, batches, outputs, norm))
        guard.end_update()
        self._record(results)
        components.timer.lap("optimizer")
        return True

    def dry_run_backward(self, micro_batches: MicroBatches) -> None:
        """Compute an update's gradients and drop them: for `Strategy.warm_up` and a dry run."""
        means = MeanAccumulator(self._components.strategy.device)  # only to find mistakes
        self.guard.begin_update()
        for phase, batches in self._with_batches(micro_batches):
            outputs, _ = self._accumulate(phase, batches)
            self._components.optimizers.zero_grad()
            self._add_outputs(means, phase, batches, outputs)
        self.guard.restore()

    def _with_batches(self, micro_batches: MicroBatches) -> Iterator[tuple[Phase, MicroBatches]]:
        """Yield each phase with its micro-batches: all of the update, or those of its own batch."""
        if not self._components.task.fresh_batches:
            for phase in self._phases:
                yield phase, micro_batches
            return
        by_batch = itertools.groupby(micro_batches, lambda m: m.batch_slice.update)
        own = [list(group) for _, group in by_batch]
        is_whole = len(own) == len(self._phases)  # a dry run computes a part of an update only
        for phase in self._phases:
            yield phase, own[phase.index] if is_whole else micro_batches

    def _accumulate(
        self, phase: Phase, micro_batches: MicroBatches
    ) -> tuple[list[StepOutput], list[Tensor]]:
        """Run forward and backward of all micro-batches; return their outputs and losses."""
        components = self._components
        strategy = components.strategy
        outputs: list[StepOutput] = []
        losses: list[Tensor] = []
        batch = micro_batches[0].batch
        output = None  # of the micro-batch in which an error arises
        try:
            totals = update_counts(components.task, strategy, micro_batches)
            for micro_batch in micro_batches:
                batch = micro_batch.batch
                output = None
                has_samples = micro_batch.batch_slice.count > 0
                is_last = micro_batch is micro_batches[-1]
                # Processes exchange gradients in the backward pass of the last micro-batch.
                with strategy.accumulate(components.training_model, is_last, has_samples):
                    output = self._training_step(phase, batch)
                    scale = strategy.gradient_scale
                    loss = scaled_loss(output, micro_batch.batch_slice, totals, scale)
                    # A borrowed sample has weight 0: a NaN in it is reported by its owner.
                    components.precision.backward(loss if has_samples else loss.nan_to_num())
                outputs.append(output)
                losses.append(loss)
        except SHAPE_ERRORS as error:
            if output is not None:
                raise self._diagnose(output, phase, error) from None
            explained = explain_shape_error(error, batch, components.state.updates)
            if explained is not None:
                raise explained from error
            raise
        self._exchange_task_gradients()
        if self._keeps_batches:
            self._last_outputs[phase] = outputs
        return outputs, losses

    def _training_step(self, phase: Phase, batch: Any) -> StepOutput:
        components = self._components
        task = components.task
        with components.precision.autocast():
            model = components.training_model
            if phase.name:
                result = take_turn(task, model, batch, phase.index)
            else:
                result = task.training_step(model, batch)
            return as_output(result, task, phase.step_name)

    def _diagnose(self, output: StepOutput, phase: Phase, error: Exception) -> Exception:
        """Return what is wrong with a step's output; the error that it led to if nothing is."""
        components = self._components
        wrong = diagnose_step_output(output, components.task, phase.step_name, components.model)
        return error if wrong is None else wrong

    def _exchange_task_gradients(self) -> None:
        """Average the gradients of the task's own parameters over the processes; a collective.

        The strategy's wrapper exchanges those of the model's parameters, and knows no others.
        """
        strategy = self._components.strategy
        if strategy.group.world_size == 1:
            return
        for module in self._components.task.own_modules().values():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    # A collective, which all processes reach in the order of the parameters.
                    whole = strategy.group.reduce(parameter.grad)
                    parameter.grad = whole / strategy.gradient_scale

    def last_update(self) -> dict[str, Any]:
        """Return `batch` and `outputs` of the last update, for `Callback.on_update_end`."""
        batches = [m.batch for m in self._last_batches if m.batch_slice.count]
        outputs = [output for phase in self._last_outputs.values() for output in phase]
        return {"batch": concat_batches(batches) if batches else None, "outputs": outputs}

    def _step_with_closure(
        self, phase: Phase, micro_batches: MicroBatches, losses: Sequence[Tensor]
    ) -> None:
        """Let optimizers step that evaluate loss and gradients by themselves."""
        # The gradients are those of their first evaluation, unless other optimizers have stepped.
        first_losses = [] if phase.plain_optimizers else [losses]

        def evaluate() -> Tensor:
            if first_losses:
                return self._whole_loss(first_losses.pop())
            self._components.optimizers.zero_grad()
            return self._whole_loss(self._accumulate(phase, micro_batches)[1])

        closure: Callable[[], Any] = evaluate
        for optimizer in phase.closure_optimizers:
            optimizer.step(closure)

    def _whole_loss(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the loss over all micro-batches and processes; a collective."""
        strategy = self._components.strategy
        # All processes have to search alike, so each needs the loss of all.
        total = strategy.group.reduce(add_up(losses).detach())
        return total / strategy.gradient_scale

    def _skip(self, micro_batches: MicroBatches, losses: Sequence[Tensor]) -> bool:
        """Undo an update that is not finite; return False.

        Raises DivergedError with `on_nonfinite=stop`, but not in fp16: there an infinity belongs to
        the search for the loss scale, and `count_skipped` ends a run with too many.
        """
        components = self._components
        self.guard.restore()
        if components.precision.scales:
            components.precision.scaler.update()
        elif components.options.on_nonfinite == "stop":
            origin = gradients.explain_nonfinite(
                components.model, components.state, micro_batches, losses
            )
            # All processes end with the message of the one that is closest to the origin, the
            # others see its effects only. It is no collective: where processes train alone, as
            # with a strategy of the user's, the others may be in another one.
            raise DivergedError(components.group.nearest_cause(origin))
        components.optimizers.zero_grad()
        return False

    def _record(self, results: Sequence[PhaseResult]) -> None:
        """Add what an applied update has computed to the means that are logged."""
        is_first = self._components.group.data_rank == 0
        for phase, micro_batches, outputs, norm in results:
            self._add_outputs(self.log_accumulator, phase, micro_batches, outputs)
            # The norm is the same on every process: it counts once.
            if is_first:
                self.log_accumulator.add(metric_key(phase.norm_name), norm, 1)
            else:
                self.log_accumulator.add(metric_key(phase.norm_name), 0.0, 0)
        self.log_accumulator.stack_pending()

    def _add_outputs(
        self,
        means: MeanAccumulator,
        phase: Phase,
        micro_batches: MicroBatches,
        outputs: Sequence[StepOutput],
    ) -> None:
        for micro_batch, output in zip(micro_batches, outputs, strict=True):
            for name in self._norm_names:
                if name in output.sums:
                    raise self._name_is_reserved(name)
            try:
                means.add_output(output, micro_batch.batch_slice.count, phase.loss_name)
            except SHAPE_ERRORS as error:
                raise self._diagnose(output, phase, error) from None

    def _name_is_reserved(self, name: str) -> UserCodeError:
        """Return the error for a metric or loss that would be mixed with what training logs."""
        return UserCodeError(
            f"{qualified_name(self._components.task)}: a StepOutput has a metric or loss that is "
            f"logged as train/{name}, which the trainer logs itself: give it a name that does not "
            f"begin with epoch_ and is none of {', '.join((*self._norm_names, *_RESERVED_NAMES))}"
        )

    def pop_means(self) -> dict[str, float]:
        """Return `train/<name>`: the means since the last call, what was skipped, the loss scale.

        Waits for the device; a collective. Raises DivergedError.
        """
        components = self._components
        state = components.state
        means = self.log_accumulator.means(components.group.reduce)
        self.log_accumulator.reset()
        for name in means:
            if name in _RESERVED_NAMES or name.startswith("epoch_"):
                raise self._name_is_reserved(name)
        if self.log_accumulator.has_no_labels:
            warn_without_labels(
                components,
                "train",
                f"no label counts in train, whose figures are 0: {WHY_NO_LABEL_COUNTS}",
            )
        if components.options.on_nonfinite == "stop":
            for name, value in means.items():
                if not math.isfinite(value):
                    raise DivergedError(
                        f"train/{name} is {value} (step {state.global_step}, epoch "
                        f"{state.epoch}): {ADVICE}"
                    )
        if components.precision.scales:
            means["loss_scale"] = components.precision.scale
        if state.skipped_updates:
            means["skipped_updates"] = state.skipped_updates
        return {f"train/{name}": value for name, value in means.items()}

    def epoch_means(self, ended: bool) -> dict[str, float]:
        """Return `train/epoch_<name>`: the means over the epoch so far; reset them if `ended`.

        Waits for the device; a collective. Raises SampleError where no label of a whole epoch
        counted: nothing was trained.
        """
        self.log_accumulator.flush()
        means = self.epoch_accumulator.means(self._components.group.reduce)
        if ended:
            self.epoch_accumulator.reset()
            if self.epoch_accumulator.has_no_labels:
                epoch = self._components.state.epoch - 1  # the loop has counted it already
                raise SampleError(
                    f"no label of epoch {epoch} counts: nothing is trained; {WHY_NO_LABEL_COUNTS}"
                )
        return {f"train/epoch_{name}": value for name, value in means.items()}

    def count_skipped(self) -> None:
        """Count an update that was not applied. Raises DivergedError for too many in a row."""
        components = self._components
        state = components.state
        state.skipped_updates += 1
        state.skipped_in_a_row += 1
        if state.skipped_in_a_row >= components.options.max_skipped_in_a_row:
            scale = ""
            if components.precision.scales:
                scale = f", loss scale {components.precision.scale:g}"
            raise DivergedError(
                f"the last {state.skipped_in_a_row} updates were not finite (after step "
                f"{state.global_step}, epoch {state.epoch}{scale}): lower optimizer.lr, or allow "
                "more with trainer.max_skipped_in_a_row"
            )

    def check_deferred_nonfinite(self) -> None:
        """Ask the device whether all updates were applied; the host waits for it.

        With a guard on the device a skipped update ends the run: parameters, buffers, optimizer
        state and `global_step` are then those from before it. Raises DivergedError.
        """
        count = self.guard.undo_skipped()
        if not count:
            return
        state = self._components.state
        state.global_step -= count
        state.skipped_updates += count
        later = f", nor were the {count - 1} after it" if count > 1 else ""
        raise DivergedError(
            f"the loss or a gradient is not finite at update {state.updates - count + 1} (step "
            f"{state.global_step + 1}, epoch {state.epoch}): the update was not applied{later}; "
            f"{ADVICE}"
        )


def _phases_of(components: Components) -> list[Phase]:
    optimizers = components.optimizers.optimizers
    turns = components.task.turns
    if not turns:
        return [Phase("", list(optimizers.values()))]
    # A turn without an optimizer is refused by the first update: an evaluation needs none.
    return [
        Phase(name, [optimizers[name]], index)
        for index, name in enumerate(turns)
        if name in optimizers
    ]


def warn_without_labels(components: Components, stage: str, text: str) -> None:
    """Warn once for each stage of which no label counts."""
    stages = components.unlabelled_stages
    if components.is_main and stage not in stages:
        stages.add(stage)
        _log.warning("%s", text)
