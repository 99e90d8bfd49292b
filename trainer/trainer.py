"""The loop: fit, one update, validation; everything else is a collaborator's."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from regimen.conf.python_words import in_python
from regimen.conf.schema_trainer import TrainerConfig
from regimen.data.batch import MicroBatch, to_device
from regimen.trainer import snapshot
from regimen.trainer.callback import (
    Callback,
    Hooks,
    Media,
    PRCurve,
    Results,
    as_image,
    evaluated_average,
    histogram_of,
)
from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.device import module_to_device
from regimen.trainer.errors import ModelError, SampleError, describe_user_error
from regimen.trainer.evaluation import (
    EvaluationAbandoned,
    check_metrics,
    evaluate,
    predict,
    prepared,
)
from regimen.trainer.lr_schedulers.schedule import Interval, as_schedule
from regimen.trainer.optimizers.optimizers import Optimizers
from regimen.trainer.options import TrainerOptions, batches_of, horizon
from regimen.trainer.rng import RandomStates, derived_seed
from regimen.trainer.runs import from_python
from regimen.trainer.runs.directory import make_folder
from regimen.trainer.runs.from_python import PythonRun
from regimen.trainer.runs.interrupt import stopping_on_interrupt
from regimen.trainer.state import MAX_TIME, LogPoint, Timer, TrainState
from regimen.trainer.strategies.strategy import NULL_CONTEXT, Strategy
from regimen.trainer.task import Task, batch_dependence_warning, named_modules
from regimen.trainer.update.batch import Waiting, as_source, as_val_sources, order_remark
from regimen.trainer.update.precision import Precision
from regimen.trainer.update.setup import (
    is_from_python,
    refuse_misplaced,
    refuse_monitors,
    set_up,
    tell_in_python,
)
from regimen.trainer.update.updater import Updater

_log = logging.getLogger(__name__)


class Trainer:
    """Train a model: objects in, no config.

    `train_loader` and `val_loader` (or several, by stage: `{"val/clean": ...}`) are
    `regimen.data.loading.loader.Loader`s, or any iterable of batches
    on one process; `optimizer` and `lr_scheduler` may be torch's own. A scheduler of torch's is
    stepped after each epoch, OneCycleLR and CyclicLR after each update; `lr_interval`, "step" or
    "epoch", says otherwise. `callbacks` are a list, or a dict by name. Each epoch prints a line,
    unless a callback shows the progress, `verbose` is false or `callbacks` is empty. With a
    `run_dir`, which is made where it is missing, `fit` writes a run there, as the command `train`
    does; one that is there is refused, unless `fit(resume=...)` goes on with it, or `overwrite`
    lets a new one take its place. Without `run_dir` nothing is written.
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
        precision: Precision | str | None = None,
        callbacks: Mapping[str, Callback] | Iterable[Callback] | None = None,
        options: TrainerConfig | None = None,
        compiled: nn.Module | None = None,
        run_dir: Path | str | None = None,
        config_text: str = "",
        lr_interval: Interval | None = None,
        overwrite: bool = False,
        verbose: bool = True,
    ) -> None:
        refuse_misplaced(model, task, optimizer)
        self.options = options or TrainerOptions(max_epochs=1)
        self.strategy = strategy or Strategy()
        self.group, device = self.strategy.group, self.strategy.device
        self.is_main = self.group.is_main  # whether this process writes and prints
        asked = precision or self.options.precision
        self.precision = Precision(asked, device.type) if isinstance(asked, str) else asked
        self.model = model if strategy else module_to_device(self.precision.convert(model), device)
        self.task = task
        task.to(device, self.precision.dtype)
        self.strategy.check(named_modules(task))
        self.optimizers = Optimizers.wrap(optimizer, model, named_modules(task))
        self.lr_schedule = as_schedule(lr_scheduler, lr_interval)
        self.run = None if run_dir is None else PythonRun(Path(run_dir), overwrite)
        self.callbacks = from_python.callbacks_of(callbacks, self.run is not None, verbose)
        self.average = evaluated_average(self.callbacks)
        self.hooks = Hooks(self.callbacks.values())
        self.compiled = set_up(self.model, compiled, self.options, self.precision.name)
        freezes = any(callback.freezes for callback in self.callbacks.values())
        self.strategy.some_unused = bool(task.turns) or freezes
        self.strategy.autocast = self.precision.autocast
        self.wrapped = self.strategy.wrap(self.compiled)
        self.train_loader = as_source(
            train_loader, "train_loader", self.options.micro_batches, self.options.seed
        )
        self.val_loaders = as_val_sources(
            val_loader, self.options.limit_val_batches, self.options.seed
        )
        self.lr_schedule.refuse_to_wait(bool(self.val_loaders), self.options.validates)
        self.run_dir = None if run_dir is None else Path(run_dir)
        if self.run_dir is not None and self.is_main:
            make_folder(self.run_dir)  # one that cannot be is found before anything is computed
        self.config_text = config_text  # kept in every checkpoint
        self.data_facts: dict[str, Any] = {}  # of the data sets, as plain values; kept likewise
        self.state = TrainState()
        self.random = RandomStates(self.strategy.computing, self._seed_aside)
        self.metrics: dict[str, float] = {}  # the last value of everything logged
        # Rows for `pandas.DataFrame`: what was logged at a step. None: nobody reads them.
        self.history: list[dict[str, float]] | None = []
        self.timer = Timer()
        self.resumed = self.branched = False  # branched: with other hyper-parameters than before
        self._is_set_up = self._has_ended = False
        self._has_fitted = False
        self._log_point: LogPoint | None = None
        self._deadline: float | None = None
        self.waiting = Waiting(self.state, alone=self.group.world_size == 1)
        self._attend_loaders()
        self.updater = Updater(self)
        self.unsaved = snapshot.Unsaved(model, task)
        check_metrics(task.metrics(), self.strategy)

    def _seed_aside(self) -> int:
        return derived_seed(self.options.seed, "isolated", self.state.updates, self.group.data_rank)

    def _attend_loaders(self) -> None:
        steps = self.options.micro_batches
        self.train_loader = self.waiting.attend(self.for_this_run(self.train_loader, steps))
        for stage, loader in self.val_loaders.items():
            self.val_loaders[stage] = self.for_this_run(loader)

    def for_this_run(self, loader: Any, gradient_accumulation_steps: int = 1) -> Any:
        """Return a loader that knows how this run splits its updates, and its device.

        Only one of `regimen.loader` is another than before: it was made before any run was known.
        """
        if not hasattr(loader, "for_run"):
            return loader
        return loader.for_run(
            gradient_accumulation_steps,
            rank=self.group.data_rank,
            world_size=self.group.data_size,
            device=self.strategy.device,
            dtype=self.parameter_dtype,
        )

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """The type of the model's floating-point parameters; None if it has none."""
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
        return None

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates of an epoch; None for a stream of unknown length."""
        limit = self.options.limit_train_batches
        return batches_of(self.train_loader, limit, "trainer.limit_train_batches")

    @property
    def total_steps(self) -> int | None:
        """Updates of the whole run, if its horizon is not a time."""
        return horizon(self.options, self.steps_per_epoch)

    @property
    def _epochs(self) -> float | None:
        """Epochs of the whole run, if that is known."""
        if self.total_steps is None or not self.steps_per_epoch:
            return self.options.max_epochs
        return self.total_steps / self.steps_per_epoch

    @property
    def updates_left(self) -> int | None:
        """Updates from here to the horizon; None if that is a time."""
        options, length, left = self.options, self.steps_per_epoch, []
        if options.max_steps is not None:
            left.append(options.max_steps - self.state.global_step)
        if options.max_epochs is not None and length is not None:
            left.append((options.max_epochs - self.state.epoch) * length - self.state.position)
        return max(0, min(left)) if left else None

    @property
    def done(self) -> bool:
        """Whether the horizon is reached."""
        epochs, steps = self.options.max_epochs, self.options.max_steps
        return (epochs is not None and self.state.epoch >= epochs) or (
            steps is not None and self.state.global_step >= steps
        )

    @property
    def _ended(self) -> bool:
        return self.done or self.state.stop_reason is not None

    def fit(self, resume: Path | str | None = None, max_epochs: int | None = None) -> None:
        """Train until the horizon, or until a stop is requested; again: go on from there.

        `resume`: a checkpoint or the directory of a run to go on from; "auto" goes on with what
        `run_dir` holds, and starts there if it holds nothing. `max_epochs` takes the place of the
        options', such as a larger one to train further. A first Ctrl-C ends the training after its
        update; then KeyboardInterrupt leaves `fit`. Raises RunDirectoryError where `run_dir` holds
        a run that is neither gone on with nor overwritten.

        setup, resume (`regimen.trainer.snapshot.restore`), on_fit_start
        each epoch:             on_epoch_start
            each update:        on_update_start, (forward, backward) x micro-batches -> unscale
                                -> clip -> on_gradients -> step -> zero -> scheduler, on_update_end
                boundary:       scalars, on_log -> on_validation_start, _batch, _end -> on_boundary
            after the last one: on_epoch_end, before its boundary
        on_fit_end | on_exception, and teardown always
        `end`, after the test: on_run_end
        """
        if max_epochs is not None:
            self.options = from_python.longer(self.options, max_epochs)
        from_python.clear_stop(self.state, longer=max_epochs is not None)
        if self._has_fitted and resume is None and (remark := from_python.end_remark(self)):
            _log.warning("%s", remark)
            return
        with self._fitting():
            with self.random.isolated():
                self._begin(resume)
            while not self._ended:
                length = self.steps_per_epoch
                with self.random.isolated():
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
            with self.timer.spending("start and end"), self.random.isolated():
                self.hooks.emit("on_fit_end", self)

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Do what the end of a training asks for, however it ends."""
        recorded = from_python.recorded(self)
        with recorded, stopping_on_interrupt(self), suppress(EvaluationAbandoned):
            try:
                yield
            except BaseException as error:
                said = describe_user_error(error)
                if is_from_python(self.options):
                    tell_in_python(error)
                    said = None if said is None else in_python(said)
                if said is not None:
                    error.add_note(said)  # below the traceback, in a notebook too
                self.hooks.emit("on_exception", self, error)
                raise
            finally:
                for loader in (self.train_loader, *self.val_loaders.values()):
                    loader.close()
                with self.timer.spending("start and end"):
                    self.hooks.emit("teardown", self)

    def setup(self) -> None:
        """Let the callbacks prepare; `fit` does it, a resume needs it before."""
        if not self._is_set_up:
            self._is_set_up = True
            self.hooks.emit("setup", self)

    def _begin(self, resume: Path | str | None) -> None:
        found = None if resume is None else snapshot.find(self, resume)
        if self.run is not None and self.is_main:
            self.run.hold(self, self.run.goes_on(resume, found and found[0]))
        if self.is_main and (remark := from_python.unsaved_remark(self)):
            _log.warning("%s", remark)
        if found is not None:
            snapshot.go_on(self, *found)
            from_python.restore_history(self)
            if self.is_main and (remark := from_python.end_remark(self)):
                _log.warning("%s", remark)
        if self._has_fitted:  # an interrupt may have left a part of a gradient
            self.optimizers.zero_grad()
        self._has_fitted = True
        options = self.options
        if is_from_python(options):
            refuse_monitors(self.callbacks.values(), self.task, self.val_loaders)
        self.timer.start()
        with self.timer.spending("start and end"):
            self.setup()
            split = options.micro_batches, self.strategy.data_parallel_size
            remarks = [batch_dependence_warning(self.task, *split), order_remark(self.train_loader)]
            for remark in (*remarks, *self.lr_schedule.remarks(self.total_steps, self._epochs)):
                if self.is_main and remark is not None:
                    _log.warning("%s", in_python(remark) if is_from_python(options) else remark)
            self.wrapped.train()
            if options.seconds is not None:
                self._deadline = time.monotonic() + options.seconds
            if options.validate_at_start and not self.resumed:
                for stage, loader in self.val_loaders.items():
                    self.evaluate(loader, stage, limit=options.validate_at_start)
            self.hooks.emit("on_fit_start", self)
            if self._validation_is_due():
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
        group: list[MicroBatch] = []
        for micro_batch in self.train_loader.epoch(epoch, start, stop):
            micro_batch.batch = self.to_device(micro_batch.batch)
            group.append(micro_batch)
            if len(group) == micro_batch.batch_slice.micro_batches:
                yield group
                group = []

    def to_device(self, batch: Any) -> Any:
        """Move a batch to this process's device, in the run's number format."""
        form = self.precision.dtype, self.options.channels_last
        return to_device(batch, self.strategy.device, *form)

    def update(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Apply one optimizer update, or skip it, and count; `Updater.apply` draws it."""
        applied = self.updater.apply(micro_batches)
        self.state.count(len(micro_batches), micro_batches[0].batch_slice.total, applied)
        if applied:
            self.optimizers.keep_rates()
            self.lr_schedule.after_update()
        else:
            self.updater.count_skipped()

    def _end_epoch(self) -> None:
        self.updater.confirm()  # before anything counts or averages what the epoch ended with
        self.state.epoch += 1
        self.state.position = 0
        self.state.epoch_samples = 0
        self.lr_schedule.after_epoch()
        with self.random.isolated():
            self.hooks.emit("on_epoch_end", self)
            self._boundary()

    def _boundary(self) -> bool:
        """Do what is due between two updates; each part once, also across a resume.

        Returns whether the run ends here.
        """
        logs, validates = self._log_is_due(), self._validation_is_due()
        # A log without callbacks draws nothing.
        with self.random.isolated() if validates or (logs and self.callbacks) else NULL_CONTEXT:
            if logs:
                self._log()
            if validates:
                self._validate()
            self.hooks.emit("on_boundary", self)
        self._agree()
        return self._ended

    def _log_is_due(self) -> bool:
        state = self.state
        if not state.position and self.updater.epoch_sums:
            return True  # an epoch whose last update was skipped is logged as well
        regular = state.global_step % self.options.log_every_n_steps == 0
        return state.global_step > state.logged_at and (regular or not state.position or self.done)

    def _validation_is_due(self) -> bool:
        state, options = self.state, self.options
        if not self.val_loaders or state.global_step <= state.validated_at:
            return False
        epochs, steps = options.validate_every_n_epochs, options.validate_every_n_steps
        by_epoch = epochs and not state.position and not state.epoch % epochs
        return bool(by_epoch or (steps and not state.global_step % steps) or self.done)

    def _agree(self) -> None:
        """Agree with the other processes on whether this update was the last."""
        state = self.state
        if self._deadline is not None and time.monotonic() >= self._deadline:
            state.request_stop(MAX_TIME)
        # Where all wait for each other anyway, all learn at once of one process's request.
        meeting = self.done or not state.position or state.validated_at == state.global_step
        self.group.agree_on_stop(state, at_once=meeting)

    def _log(self) -> None:
        self.updater.confirm()
        ended = not self.state.position
        scalars = self.updater.pop_means()
        epoch = self.updater.epoch_means(ended) if ended or self.done else {}
        scalars |= epoch
        for contribute in self.hooks.listeners("scalars"):
            scalars |= contribute(self)
        self.state.logged_at = self.state.global_step
        self.timer.reset()
        if ended:
            self.lr_schedule.after_validation(epoch)
        self.log(scalars)

    def _validate(self) -> None:
        with self.timer.spending("evaluation"), suppress(EvaluationAbandoned):
            self.updater.confirm()
            self.hooks.emit("on_validation_start", self)
            metrics: dict[str, float] = {}
            for stage, loader in self.val_loaders.items():
                limit = self._validation_limit(loader)
                step = self.state.global_step
                metrics |= evaluate(self, loader, stage, limit, step, shown=not metrics)
            self.state.validated_at = self.state.global_step
            self.lr_schedule.after_validation(metrics)
            self.log(metrics)
            self.hooks.emit("on_validation_end", self, metrics)

    def _validation_limit(self, loader: Any) -> int | None:
        return batches_of(loader, self.options.limit_val_batches, "trainer.limit_val_batches")

    def evaluate(
        self,
        loader: Any = None,
        stage: str = "val",
        limit: int | None = None,
        step: int | None = None,
    ) -> dict[str, float]:
        """Return the metrics over a data set, each sample counted once (I4): `<stage>/<name>`.

        Without a `loader`: those of the validation sets, as a validation computes them. What is
        drawn at random is keyed by the seed and the `step` of the weights (default: the run's), and
        leaves the training's random state untouched. Raises ModelError where there is no loader.
        """
        step = self.state.global_step if step is None else step
        sets = self.val_loaders if loader is None else {stage: loader}
        if not sets:
            raise ModelError("the Trainer was given no val_loader: evaluate(loader) takes one")
        metrics: dict[str, float] = {}
        with self.timer.spending("evaluation"):
            for name, one in sets.items():
                most = self._validation_limit(one) if loader is None and limit is None else limit
                metrics |= evaluate(self, one, name, most, step)
        return metrics

    def predict(self, data: Any, batch_size: int = 256) -> Any:
        """Return what the task makes of the model's outputs, [n, ...] on the host: probabilities...

        data: a loader or any iterable of batches, whose targets are left out; or a tensor, an array
        or a DataFrame of inputs [n, ...], of which `batch_size` are computed at a time. Outputs
        that are dicts or tuples are joined part by part. With the weights that are evaluated: those
        of an average, if there is one.
        """
        return predict(self, data, batch_size)

    def load_best(self) -> LogPoint:
        """Give the model the weights of the best checkpoint; return their step and epoch.

        Without a monitored metric it is the last one. A `fit` after it goes on from these weights,
        with the optimizer as it is. Raises CheckpointError where none was saved.
        """
        path = from_python.best_checkpoint(self.run_dir)
        payload = self.group.broadcast(read_checkpoint(path) if self.is_main else None)
        snapshot.load_weights(self, payload, path)
        return snapshot.log_point_of(payload)

    def __repr__(self) -> str:
        return from_python.plan_of(self)

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context in which the model answers as in a validation, for callbacks."""
        return prepared(self, self.state.global_step)

    def evaluation_weights(self) -> AbstractContextManager[Any]:
        """Return the context in which the model has the weights to evaluate, or an average's."""
        return NULL_CONTEXT if self.average is None else self.average.swap(self)

    def learning_rates(self) -> dict[str, float]:
        """Return each parameter group's learning rate: that of the next update."""
        return self.optimizers.learning_rates()

    @property
    def log_point(self) -> LogPoint:
        """Where the values that are logged now stand: mostly at the run's own step."""
        return self._log_point or LogPoint(self.state.global_step, self.state.epoch)

    def log(self, scalars: Mapping[str, float], at: LogPoint | None = None) -> None:
        """Hand values to the callbacks, at the current step or that of the weights they are of."""
        self.metrics |= scalars
        self._log_point = at
        from_python.add_row(self.history, self.log_point, scalars)
        try:
            self.hooks.emit("on_log", self, scalars)
        finally:
            self._log_point = None

    def log_image(self, name: str, image: Any) -> None:
        """Hand an image to the callbacks; `regimen.trainer.callback.as_image` says what may be one.

        This and the next four do nothing, and read nothing from the device, where no callback of
        the run receives such things, and on other processes than the main one.
        """
        self._show(name, as_image, image)

    def log_histogram(self, name: str, values: Any, bins: int = 64) -> None:
        """Hand the histogram of a tensor to the callbacks."""
        self._show(name, histogram_of, values, bins)

    def log_text(self, name: str, text: str) -> None:
        """Hand a text, in Markdown, to the callbacks."""
        self._show(name, str, text)

    def log_figure(self, name: str, figure: Any) -> None:
        """Hand a figure of matplotlib's to the callbacks, as an image; it stays open."""
        self._show(name, as_image, figure)

    def log_pr_curve(self, name: str, curve: PRCurve) -> None:
        """Hand precision and recall over thresholds to the callbacks."""
        self._show(name, PRCurve._make, curve)

    def _show(self, name: str, convert: Callable[..., Media], *values: Any) -> None:
        if self.is_main and self.hooks.listeners("on_media"):
            self.hooks.emit("on_media", self, name, convert(*values))

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
