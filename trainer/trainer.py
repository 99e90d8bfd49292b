"""The loop: fit, one update, validation; everything else is a collaborator's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.callback import Callback, Hooks, evaluated_average
from trainer.checkpoints.unsaved import Unsaved
from trainer.distributed.group import Group
from trainer.errors import SampleError
from trainer.evaluation import EvaluationAbandoned, Evaluator
from trainer.lr_schedulers.horizon import refuse_to_wait
from trainer.lr_schedulers.schedule import LRSchedule
from trainer.optimizers.optimizers import Optimizers
from trainer.options import TrainerOptions, horizon
from trainer.state import MAX_TIME, TrainState
from trainer.strategies.strategy import Strategy
from trainer.task import Task, named_modules
from trainer.timer import Timer, Waiting
from trainer.update.batch import BatchSource, MicroBatch, as_source, repeatable, updates
from trainer.update.parts import Parts
from trainer.update.precision import Precision
from trainer.update.updater import Updater


class Trainer:
    """Train a model: objects in, no config.

    `train_loader` and `val_loader` are `data.loading.loader.Loader`s, or any iterable of batches
    on one process; `optimizer` and `lr_scheduler` may be torch's own.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: Optimizers | Optimizer,
        train_loader: Any,
        val_loader: Any = None,
        lr_scheduler: Any = None,
        strategy: Strategy | None = None,
        precision: Precision | str = "fp32",
        callbacks: Mapping[str, Callback] | None = None,
        options: TrainerOptions | None = None,
        compiled: nn.Module | None = None,
        run_dir: Path | None = None,
        config_text: str = "",
    ) -> None:
        self.options = options or TrainerOptions()
        self.strategy = strategy or Strategy()
        device = self.strategy.device
        self.precision = (
            Precision(precision, device.type) if isinstance(precision, str) else precision
        )
        self.model = model if strategy else self.precision.convert(model).to(device)
        self.task = task
        task.to(device, self.precision.dtype)
        self.strategy.check(named_modules(task))
        self.optimizers = Optimizers.wrap(optimizer, model, named_modules(task))
        self.lr_schedule = LRSchedule.wrap(lr_scheduler)
        steps = self.options.gradient_accumulation_steps
        self.train_loader: BatchSource = as_source(repeatable(train_loader, "train_loader"), steps)
        held_out = val_loader is not None  # its truth would be its length, which it may lack
        self.val_loader: BatchSource | None = (
            as_source(repeatable(val_loader, "val_loader"), 1) if held_out else None
        )
        self.callbacks = dict(callbacks or {})
        for name, callback in self.callbacks.items():
            callback.name = name
        self.average = evaluated_average(self.callbacks)
        self.hooks = Hooks(self.callbacks.values())
        self.run_dir = run_dir
        self.config_text = config_text  # kept in every checkpoint
        self.state = TrainState()
        self.metrics: dict[str, float] = {}  # the last value of everything logged
        self.timer = Timer()
        self.resumed = False
        self._is_set_up = False
        self.waiting = Waiting(self.timer, self.state, alone=self.group.world_size == 1)
        self.waiting.attend(self.train_loader)
        self.parts = self._assembled(compiled)
        self.updater = Updater(self.parts)
        self.unsaved = Unsaved(model, task)
        self._evaluator = Evaluator(self.parts, self.waiting)
        self._deadline: float | None = None
        self._used_rates: list[Any] = []  # of each group, in the last update
        validated = self.val_loader is not None
        refuse_to_wait(self.lr_schedule.monitors, validated, self.options.validates)

    def _assembled(self, compiled: nn.Module | None) -> Parts:
        forward = self.model if compiled is None else compiled  # its truth would be its length
        return Parts(
            self.model,
            forward,
            self.strategy.wrap(forward),
            self.task,
            self.optimizers,
            self.strategy,
            self.precision,
            self.options,
            self.state,
        )

    @property
    def group(self) -> Group:
        """The processes of the run."""
        return self.strategy.group

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.group.is_main

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates of an epoch; None for a stream of unknown length."""
        try:
            length = len(self.train_loader)
        except TypeError:
            return self.options.limit_train_batches
        return min(length, self.options.limit_train_batches or length)

    @property
    def total_steps(self) -> int | None:
        """Updates of the whole run, if its horizon is not a time."""
        return horizon(self.options.max_epochs, self.options.max_steps, self.steps_per_epoch)

    @property
    def done(self) -> bool:
        """Whether the horizon is reached."""
        o, s = self.options, self.state
        return (o.max_epochs is not None and s.epoch >= o.max_epochs) or (
            o.max_steps is not None and s.global_step >= o.max_steps
        )

    def learning_rates(self) -> dict[str, float]:
        """Return each parameter group's learning rate: that of the next update."""
        return {group.name: float(group.options["lr"]) for group in self.optimizers.groups()}

    def used_learning_rates(self) -> dict[str, float]:
        """Return the learning rate that each parameter group's last update was made with."""
        if not self._used_rates:
            return self.learning_rates()
        groups = self.optimizers.groups()
        return {g.name: float(lr) for g, lr in zip(groups, self._used_rates, strict=False)}

    def fit(self) -> None:
        """Train until the horizon, or until a stop is requested.

        setup, resume (`trainer.snapshot.restore`), on_fit_start
        each epoch:             on_epoch_start
            each update:        (forward, backward) x micro-batches -> unscale -> clip -> step
                                -> scheduler -> zero, on_update_end
                boundary:       scalars, on_log -> on_validation_start, _end -> on_boundary
            after the last one: on_epoch_end, before its boundary
        on_fit_end | on_exception, and teardown always
        """
        try:
            self._begin()
            while not (self.done or self.state.stop_reason):
                self.hooks.emit("on_epoch_start", self)
                self._run_epoch()
            self.updater.confirm()
            self.hooks.emit("on_fit_end", self)
        except BaseException as error:
            self.hooks.emit("on_exception", self, error)
            raise
        finally:
            self.train_loader.close()
            if self.val_loader is not None:
                self.val_loader.close()
            self.hooks.emit("teardown", self)

    def setup(self) -> None:
        """Let the callbacks prepare; `fit` does it, a resume needs it before."""
        if not self._is_set_up:
            self._is_set_up = True
            self.hooks.emit("setup", self)

    def _begin(self) -> None:
        self.setup()
        self.parts.wrapped.train()
        if self.options.max_time is not None:
            self._deadline = time.monotonic() + self.options.max_time
        if self.options.sanity_batches and self.val_loader is not None and not self.resumed:
            self.evaluate(self.val_loader, "val", limit=self.options.sanity_batches)
        self.hooks.emit("on_fit_start", self)
        if self._validation_due():  # a signal came while the run before this one validated
            self._boundary()
        self._must_stop()
        self.timer.reset()

    def _run_epoch(self) -> None:
        state, length = self.state, self.steps_per_epoch
        stream = updates(self.train_loader.epoch(state.epoch, state.position, length))
        while length is None or state.position < length:
            micro_batches = self.waiting.next(stream)
            if micro_batches is None:
                if state.stop_code:
                    return
                if not state.position:
                    raise SampleError(
                        f"train_loader gave no batch in epoch {state.epoch}: what it reads from "
                        "is empty, or can be read only once"
                    )
                break
            self.update(micro_batches)
            self.hooks.emit("on_update_end", self)
            if state.position != length:
                self._boundary()
                if self._must_stop():
                    return
        self._end_epoch()

    def _end_epoch(self) -> None:
        self.updater.confirm()  # before anything counts or averages what the epoch ended with
        self.state.epoch += 1
        self.state.position = 0
        self.lr_schedule.after_epoch()
        self.hooks.emit("on_epoch_end", self)
        self._boundary()
        self._must_stop()

    def _must_stop(self) -> bool:
        """Agree with the other processes on whether this update was the last."""
        state = self.state
        if self._deadline is not None and time.monotonic() >= self._deadline:
            state.request_stop(MAX_TIME)
        # Where all wait for each other anyway they learn at once what one of them wishes.
        meeting = self.done or not state.position or state.validated_at == state.global_step
        self.group.agree(state, at_once=meeting, in_step=not meeting)
        return self.done or state.stop_reason is not None

    def update(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Apply one optimizer update, or skip it, and count; `trainer.update.updater` draws it."""
        state = self.state
        applied = self.updater.apply(micro_batches)
        state.updates += 1
        state.position += 1
        state.micro_batches += len(micro_batches)
        state.samples += micro_batches[0].piece.total
        if applied:
            state.global_step += 1
            state.skipped_in_a_row = 0
            self._used_rates = self.optimizers.rates()
            self.lr_schedule.after_update()
        else:
            self.updater.count_skipped(1)

    def _boundary(self) -> None:
        """Do what is due between two updates; each part once, also across a resume."""
        if self._log_due():
            self._log()
        if self._validation_due():
            self._validate()
        self.hooks.emit("on_boundary", self)

    def _log_due(self) -> bool:
        step, at_end = self.state.global_step, not self.state.position or self.done
        fresh = step > self.state.logged_at
        if not self.state.position and self.updater.epoch_sums:  # its last update may be skipped
            return True
        return fresh and (step % self.options.log_every_n_steps == 0 or at_end)

    def _validation_due(self) -> bool:
        o, s = self.options, self.state
        if self.val_loader is None or s.global_step <= s.validated_at:
            return False
        by_epoch = (
            o.validate_every_n_epochs and not s.position and not s.epoch % o.validate_every_n_epochs
        )
        by_step = o.validate_every_n_steps and not s.global_step % o.validate_every_n_steps
        return bool(by_epoch or by_step or self.done)

    def _log(self) -> None:
        self.updater.confirm()
        means = self.updater.take_means()
        ended = not self.state.position
        epoch = self.updater.epoch_means(ended) if ended or self.done else {}
        scalars = {f"train/{name}": value for name, value in (means | epoch).items()}
        if self.precision.scales:
            scalars["train/loss_scale"] = self.precision.scale
        if self.state.skipped_updates:
            scalars["train/skipped_updates"] = self.state.skipped_updates
        for contribute in self.hooks.listeners("scalars"):
            scalars |= contribute(self)
        self.state.logged_at = self.state.global_step
        self.timer.reset()
        if ended:
            self.lr_schedule.after_validation({f"train/{name}": v for name, v in epoch.items()})
        self.log(scalars)

    def log(self, scalars: Mapping[str, float]) -> None:
        """Hand values at the current step to the callbacks."""
        self.metrics |= scalars
        self.hooks.emit("on_log", self, scalars)

    def _validate(self) -> None:
        assert self.val_loader is not None
        started = time.monotonic()
        self.updater.confirm()
        self.hooks.emit("on_validation_start", self)
        try:
            metrics = self.evaluate(self.val_loader, "val", self.options.limit_val_batches)
        except EvaluationAbandoned:
            return
        self.state.validated_at = self.state.global_step
        self.lr_schedule.after_validation(metrics)
        self.log(metrics)
        self.hooks.emit("on_validation_end", self, metrics)
        self.timer.pause += time.monotonic() - started

    def evaluate(
        self, loader: Any, stage: str, limit: int | None = None, step: int | None = None
    ) -> dict[str, float]:
        """Return the metrics over a data set, each sample counted once (I4): `<stage>/<name>`.

        What is drawn at random is keyed by the seed and the `step` of the weights (default: the
        run's), and leaves the training's random state untouched.
        """
        step = self.state.global_step if step is None else step
        return self._evaluator.run(loader, stage, self.evaluation_weights(), limit, step)

    def evaluation_weights(self) -> AbstractContextManager[Any]:
        """Return the context in which the model has the weights to evaluate, or an average's."""
        return nullcontext() if self.average is None else self.average.swap(self)

    def to_device(self, batch: Any) -> Any:
        """Move a batch to this process's device, in the run's number format."""
        return self.parts.to_device(batch)
