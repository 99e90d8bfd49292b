"""The loop: fit, one update, validation; everything else is a collaborator's."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from data.batch import MicroBatch, to_device
from trainer import snapshot
from trainer.callback import Callback, Hooks, Results, evaluated_average, saver_of
from trainer.checkpoints.unsaved import Unsaved
from trainer.distributed.group import Group
from trainer.epoch_lines import EpochLines
from trainer.errors import SampleError
from trainer.evaluation import EvaluationAbandoned, Evaluator, Watcher
from trainer.files.storage import storage_error
from trainer.lr_schedulers.horizon import refuse_to_wait
from trainer.lr_schedulers.schedule import LRSchedule
from trainer.media import MediaLog
from trainer.optimizers.optimizers import Optimizers
from trainer.options import TrainerOptions, horizon
from trainer.pace import is_done, log_is_due, validation_is_due
from trainer.state import MAX_TIME, LogPoint, TrainState
from trainer.strategies.strategy import Strategy
from trainer.task import Task, coupling_remark, named_modules
from trainer.timer import Timer
from trainer.update.batch import BatchSource, as_source, repeatable, updates
from trainer.update.precision import Precision
from trainer.update.updater import Updater
from trainer.update.waiting import Waiting
from trainer.user_code import account

_log = logging.getLogger(__name__)


class Trainer(MediaLog):
    """Train a model: objects in, no config.

    `train_loader` and `val_loader` are `data.loading.loader.Loader`s, or any iterable of batches
    on one process; `optimizer` and `lr_scheduler` may be torch's own. Without `callbacks` each
    epoch prints a line. `run_dir` is where callbacks write: it is made where it is missing.
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
        run_dir: Path | str | None = None,
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
        self.compiled = self.model if compiled is None else compiled
        self.wrapped = self.strategy.wrap(self.compiled)
        self.train_loader = as_source(
            repeatable(train_loader, "train_loader"), self.options.gradient_accumulation_steps
        )
        self.val_loader: BatchSource | None = None
        if val_loader is not None:  # one of unknown length has no truth value
            self.val_loader = as_source(repeatable(val_loader, "val_loader"), 1)
        self.callbacks = dict({"epoch_lines": EpochLines()} if callbacks is None else callbacks)
        for name, callback in self.callbacks.items():
            callback.name = name
        self.average = evaluated_average(self.callbacks)
        self.hooks = Hooks(self.callbacks.values())
        self.run_dir = None if run_dir is None else self._made(Path(run_dir))
        self.config_text = config_text  # kept in every checkpoint
        self.data_facts: dict[str, Any] = {}  # of the data sets, as plain values; kept likewise
        self.state = TrainState()
        self.metrics: dict[str, float] = {}  # the last value of everything logged
        self.timer = Timer()
        self.resumed = False
        self.branched = False  # resumed with other hyper-parameters than before
        self._is_set_up = self._has_ended = False
        self._log_point: LogPoint | None = None
        self.waiting = Waiting(self.state, alone=self.group.world_size == 1)
        self.waiting.attend(self.train_loader)
        self.updater = Updater(self)
        self.updater.keeps_updates = self.hooks.asks_for_batches
        self.unsaved = Unsaved(model, task)
        self._evaluator = Evaluator(self, self.waiting)
        self._deadline: float | None = None
        validated = val_loader is not None
        refuse_to_wait(self.lr_schedule.monitors, validated, self.options.validates)

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
        return is_done(self.options, self.state)

    @property
    def _ended(self) -> bool:
        return self.done or self.state.stop_reason is not None

    def _made(self, run_dir: Path) -> Path:
        """Make the run directory now: one that cannot be is found before anything is computed."""
        if self.is_main:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise storage_error(run_dir, error) from error
        return run_dir

    def learning_rates(self) -> dict[str, float]:
        """Return each parameter group's learning rate: that of the next update."""
        return self.optimizers.learning_rates()

    def fit(self, resume: Path | str | None = None) -> None:
        """Train until the horizon, or until a stop is requested.

        `resume`: a checkpoint or the directory of a run to go on from; "auto" goes on with what
        `run_dir` holds, and starts there if it holds nothing.

        setup, resume (`trainer.snapshot.restore`), on_fit_start
        each epoch:             on_epoch_start
            each update:        on_update_start, (forward, backward) x micro-batches -> unscale
                                -> clip -> on_gradients -> step -> zero -> scheduler, on_update_end
                boundary:       scalars, on_log -> on_validation_start, _batch, _end -> on_boundary
            after the last one: on_epoch_end, before its boundary
        on_fit_end | on_exception, and teardown always
        `end`, after the test: on_run_end
        """
        try:
            self._warn_unsaved()
            if resume is not None:
                snapshot.go_on(self, resume)
            self._begin()
            while not self._ended:
                length = self.steps_per_epoch
                self.hooks.emit("on_epoch_start", self)
                for micro_batches in self._epoch(length):
                    self.hooks.emit("on_update_start", self, micro_batches)
                    self.update(micro_batches)
                    self.hooks.emit("on_update_end", self)
                    if self.state.position != length and self._boundary():
                        break
                else:
                    if not self.state.stop_code:  # else a signal ended the wait for a batch
                        self._end_epoch()
            self.updater.confirm()
            self.hooks.emit("on_fit_end", self)
        except BaseException as error:
            if (said := account(error)) is not None:
                error.add_note(said)  # below the traceback, in a notebook too
            self.hooks.emit("on_exception", self, error)
            raise
        finally:
            self.train_loader.close()
            if self.val_loader is not None:
                self.val_loader.close()
            self.hooks.emit("teardown", self)
            self.timer.lap("callbacks")

    def setup(self) -> None:
        """Let the callbacks prepare; `fit` does it, a resume needs it before."""
        if not self._is_set_up:
            self._is_set_up = True
            self.hooks.emit("setup", self)

    def _warn_unsaved(self) -> None:
        saver = saver_of(self.callbacks)
        if self.run_dir is None and saver is not None and self.is_main:
            _log.warning("callbacks.%s saves nothing: the Trainer was given no run_dir", saver.name)

    def _begin(self) -> None:
        self.timer.start()
        self.setup()
        pieces = self.options.gradient_accumulation_steps, self.strategy.devices
        if self.is_main and (remark := coupling_remark(self.task, *pieces)):
            _log.warning("%s", remark)
        self.wrapped.train()
        if self.options.max_time is not None:
            self._deadline = time.monotonic() + self.options.max_time
        if self.options.validate_at_start and self.val_loader is not None and not self.resumed:
            self.evaluate(self.val_loader, "val", limit=self.options.validate_at_start)
        self.hooks.emit("on_fit_start", self)
        if self.val_loader is not None and validation_is_due(self.options, self.state):
            self._boundary()  # a signal came while the run before this one validated
        else:
            self._agree()
        self.timer.reset()

    def _epoch(self, length: int | None) -> Iterator[list[MicroBatch]]:
        """Draw what is left of an epoch's updates, until a signal ends the wait for one."""
        state = self.state
        stream = self.draw(state.epoch, state.position, length)
        while length is None or state.position < length:
            self.timer.lap("callbacks")
            micro_batches = self.waiting.next(stream)
            self.timer.lap("data")
            if micro_batches is not None:
                yield micro_batches
            elif state.position or state.stop_code:
                return
            else:
                raise SampleError(
                    f"train_loader gave no batch in epoch {state.epoch}: what it reads from "
                    "is empty, or can be read only once"
                )

    def draw(
        self, epoch: int, start: int = 0, stop: int | None = None
    ) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of an epoch's updates `start` to `stop`, on the device."""
        return updates(self.train_loader.epoch(epoch, start, stop), self.to_device)

    def _end_epoch(self) -> None:
        self.updater.confirm()  # before anything counts or averages what the epoch ended with
        self.state.epoch += 1
        self.state.position = 0
        self.lr_schedule.after_epoch()
        self.hooks.emit("on_epoch_end", self)
        self._boundary()

    def _agree(self) -> None:
        """Agree with the other processes on whether this update was the last."""
        state = self.state
        if self._deadline is not None and time.monotonic() >= self._deadline:
            state.request_stop(MAX_TIME)
        # Where all wait for each other anyway, all learn at once of one process's request.
        meeting = self.done or not state.position or state.validated_at == state.global_step
        self.group.agree(state, at_once=meeting, in_step=not meeting)

    def update(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Apply one optimizer update, or skip it, and count; `trainer.update.updater` draws it."""
        applied = self.updater.apply(micro_batches)
        self.state.count(len(micro_batches), micro_batches[0].piece.total, applied)
        if applied:
            self.optimizers.keep_rates()
            self.lr_schedule.after_update()
        else:
            self.updater.count_skipped(1)

    def _boundary(self) -> bool:
        """Do what is due between two updates; each part once, also across a resume.

        Returns whether the run ends here.
        """
        if log_is_due(self.options, self.state, bool(self.updater.epoch_sums)):
            self._log()
        if self.val_loader is not None and validation_is_due(self.options, self.state):
            self._validate()
        self.hooks.emit("on_boundary", self)
        self._agree()
        return self._ended

    def _log(self) -> None:
        self.updater.confirm()
        ended = not self.state.position
        scalars = self.updater.take_means()
        epoch = self.updater.epoch_means(ended) if ended or self.done else {}
        scalars |= epoch | self.updater.counts()
        for contribute in self.hooks.listeners("scalars"):
            scalars |= contribute(self)
        self.state.logged_at = self.state.global_step
        self.timer.reset()
        if ended:
            self.lr_schedule.after_validation(epoch)
        self.log(scalars)

    @property
    def log_point(self) -> LogPoint:
        """Where the values that are logged now stand: mostly at the run's own step."""
        return self._log_point or LogPoint(self.state.global_step, self.state.epoch)

    def log(self, scalars: Mapping[str, float], at: LogPoint | None = None) -> None:
        """Hand values to the callbacks, at the current step or that of the weights they are of."""
        self.metrics |= scalars
        self._log_point = at
        try:
            self.hooks.emit("on_log", self, scalars)
        finally:
            self._log_point = None

    def end(self, results: Results) -> None:
        """Tell the callbacks how the run ended; once, after the test.

        `train` does it; who calls `fit` himself may do it as well.
        """
        if not self._is_set_up or self._has_ended:
            return
        self._has_ended = True
        for listener in self.hooks.listeners("on_run_end"):
            try:
                listener(self, results)
            except Exception as error:  # what was trained stays trained
                name = type(listener.__self__).__name__
                _log.warning("%s.on_run_end failed: %s", name, error, exc_info=True)

    def _validate(self) -> None:
        with self.timer.spending("evaluation"), suppress(EvaluationAbandoned):
            self.updater.confirm()
            self.hooks.emit("on_validation_start", self)
            watchers = self.hooks.listeners("on_validation_batch")
            limit = self.options.limit_val_batches
            metrics = self.evaluate(self.val_loader, "val", limit, watchers=watchers)
            self.state.validated_at = self.state.global_step
            self.lr_schedule.after_validation(metrics)
            self.log(metrics)
            self.hooks.emit("on_validation_end", self, metrics)

    def evaluate(
        self,
        loader: Any,
        stage: str,
        limit: int | None = None,
        step: int | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> dict[str, float]:
        """Return the metrics over a data set, each sample counted once (I4): `<stage>/<name>`.

        What is drawn at random is keyed by the seed and the `step` of the weights (default: the
        run's), and leaves the training's random state untouched.
        """
        step = self.state.global_step if step is None else step
        with self.timer.spending("evaluation"):
            weights = self.evaluation_weights()
            return self._evaluator.run(loader, stage, weights, limit, step, watchers)

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context in which the model answers as in a validation, for callbacks."""
        return self._evaluator.prepared(self.evaluation_weights(), self.state.global_step)

    def evaluation_weights(self) -> AbstractContextManager[Any]:
        """Return the context in which the model has the weights to evaluate, or an average's."""
        return nullcontext() if self.average is None else self.average.swap(self)

    def to_device(self, batch: Any) -> Any:
        """Move a batch to this process's device, in the run's number format."""
        dtype, channels_last = self.precision.dtype, self.options.channels_last
        return to_device(batch, self.strategy.device, dtype, channels_last)
