"""The loop: fit, one update, validation; everything else is a collaborator's."""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from regimen.conf.schema_trainer import TrainerConfig
from regimen.data.batch import MicroBatch
from regimen.trainer import evaluation, snapshot
from regimen.trainer.callback import Callback, Hooks, Results, average_of
from regimen.trainer.checkpoints import reader
from regimen.trainer.checkpoints.archive import on_host
from regimen.trainer.components.components import build_components, start_remarks
from regimen.trainer.components.precision import Precision
from regimen.trainer.components.setup import (
    explain_error,
    is_from_python,
    refuse_misplaced,
    refuse_monitors,
)
from regimen.trainer.components.sources import as_val_sources, in_updates, order_remark
from regimen.trainer.errors import ModelError, SampleError
from regimen.trainer.lr_schedulers.schedule import Interval
from regimen.trainer.media import Media, PRCurve, as_image, histogram_of
from regimen.trainer.optimizers.optimizers import Optimizers
from regimen.trainer.options import is_reached, log_is_due, validation_is_due, validation_limit
from regimen.trainer.runs import from_python
from regimen.trainer.runs.directory import make_folder
from regimen.trainer.runs.from_python import PythonRun
from regimen.trainer.runs.interrupt import stopping_on_interrupt
from regimen.trainer.state import MAX_TIME, LogPoint
from regimen.trainer.strategies.strategy import NULL_CONTEXT, Strategy
from regimen.trainer.task import Task, batches_per_update
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

    _is_built = False  # while the constructor assigns the parts

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
        data_facts: Mapping[str, Any] | None = None,
    ) -> None:
        refuse_misplaced(model, task, optimizer)
        self.run: PythonRun | None = None
        self._run_dir: Path | None = None
        if run_dir is not None:
            self._run_dir = Path(run_dir)
            self.run = PythonRun(self._run_dir, overwrite)
        components = build_components(
            model,
            task,
            optimizer,
            train_loader,
            lr_scheduler,
            strategy=strategy,
            precision=precision,
            callbacks=from_python.callbacks_of(callbacks, self.run is not None, verbose),
            options=options,
            compiled=compiled,
            config_text=config_text,
            lr_interval=lr_interval,
            data_facts=data_facts,
        )
        self.components = components
        # What callbacks read; `__setattr__` refuses to replace it.
        self.model = components.model
        self.training_model = components.training_model
        self.task = components.task
        self.optimizers = components.optimizers
        self.lr_schedule = components.lr_schedule
        self.strategy = components.strategy
        self.group = components.group
        self.is_main = components.is_main  # whether this process writes and prints
        self.precision = components.precision
        self.options = components.options
        self.callbacks = components.callbacks
        self.average = components.average
        self.config_text = components.config_text  # in every checkpoint, as the next
        self.data_facts = components.data_facts
        self.state = components.state
        self.train_loader = components.train_loader
        self.random = components.random
        self.timer = components.timer
        self.metrics = components.metrics  # the last value of everything logged
        self.hooks = Hooks(self.callbacks.values(), self)
        options = components.options
        sources = as_val_sources(val_loader, options.limit_val_batches, options.seed)
        self.val_loaders = {
            stage: components.bind_loader(source) for stage, source in sources.items()
        }
        self.lr_schedule.check_monitors(bool(self.val_loaders), options.validates)
        if self._run_dir is not None and self.is_main:
            make_folder(self._run_dir)  # one that cannot be is found before anything is computed
        self.updater = Updater(components, self.hooks)
        evaluation.check_metrics(task.metrics(), self.strategy)
        self._history: list[dict[str, float]] | None = []
        self._is_set_up = False  # between `setup` and `teardown` of the callbacks
        self._was_set_up = False
        self._has_ended = False
        self._has_fitted = False
        self._log_point: LogPoint | None = None
        self._deadline: float | None = None
        self._is_built = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to replace a part once everything is built: the others would keep the former."""
        is_public = not name.startswith("_")
        if is_public and self._is_built and getattr(self, name, value) is not value:
            raise AttributeError(
                f"trainer.{name} cannot be replaced: the parts of a Trainer are those that it was "
                "made with"
            )
        super().__setattr__(name, value)

    @property
    def run_dir(self) -> Path | None:
        """The directory that callbacks write to; None: nothing is written."""
        return self._run_dir

    def use_run_dir(self, run_dir: Path | None) -> None:
        """Let callbacks write into a run directory that the caller has made.

        Its metrics.jsonl takes the place of `history`.
        """
        self._run_dir = run_dir
        self._history = None

    @property
    def history(self) -> list[dict[str, float]] | None:
        """Rows for `pandas.DataFrame`: what was logged at a step. None: nobody reads them."""
        return self._history

    @property
    def resumed(self) -> bool:
        """Whether the training goes on from a checkpoint."""
        return self.state.resumed

    @property
    def branched(self) -> bool:
        """Whether it goes on with other hyper-parameters than before."""
        return self.state.branched

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates of an epoch; None for a stream of unknown length."""
        return self.components.steps_per_epoch

    @property
    def total_steps(self) -> int | None:
        """Updates of the whole run, if its horizon is not a time."""
        return self.components.total_steps

    @property
    def done(self) -> bool:
        """Whether the horizon is reached."""
        return is_reached(self.options, self.state)

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

        setup, resume (`load_state_dict`), on_fit_start
        each epoch:             on_epoch_start, also of the task
            each update:        on_update_start, (forward, backward) x micro-batches -> unscale
                                -> clip -> on_gradients -> step -> zero -> scheduler, on_update_end
                boundary:       scalars, on_log -> on_validation_start, _batch, _end -> on_boundary
            after the last one: on_epoch_end, before its boundary
        on_fit_end | on_exception, and teardown always
        `end`, after the test: on_run_end
        """
        if max_epochs is not None:
            from_python.check_max_epochs(max_epochs)
            self.options.max_epochs = max_epochs
        from_python.clear_stop(self.state, longer=max_epochs is not None)
        if self._has_fitted and resume is None:
            remark = from_python.end_remark(self.components)
            if remark is not None:
                self._warn(remark)
                return
        with self._fitting():
            with self.random.isolated():
                self._begin(resume)
            while not self._ended:
                length = self.steps_per_epoch
                is_stopped = False
                with self.random.isolated():
                    if not self.state.position:
                        self.task.on_epoch_start(self.state.epoch)
                    self.hooks.emit("on_epoch_start")
                for micro_batches in self._epoch(length):
                    self.hooks.emit("on_update_start", micro_batches)
                    self.update(micro_batches)
                    self.hooks.emit("on_update_end")
                    # The last update of an epoch has its boundary behind `on_epoch_end`. Where the
                    # length is not known it has one here, too; nothing is logged twice.
                    is_last = self.state.position == length
                    if not is_last:
                        is_stopped = self._boundary()
                    if is_stopped:
                        break
                # The epoch is complete, unless a signal has ended the wait for a batch.
                if not is_stopped and not self.state.stop_code:
                    self._end_epoch()
            self.updater.check_deferred_nonfinite()
            with self.timer.spending("start and end"), self.random.isolated():
                self.hooks.emit("on_fit_end")

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Do what the end of a training asks for, however it ends."""
        recorded = from_python.recorded(self.run, self.components)
        interruptible = stopping_on_interrupt(self.components, self.run_dir)
        with recorded, interruptible, suppress(evaluation.EvaluationAbandoned):
            try:
                yield
            except evaluation.EvaluationAbandoned:
                raise  # a signal ended it: that is no failure
            except BaseException as error:
                explain_error(error, self.options)
                self.hooks.emit("on_exception", error)
                raise
            finally:
                for loader in (self.train_loader, *self.val_loaders.values()):
                    loader.close()
                self._is_set_up = False  # a further `fit` begins with `setup` again
                with self.timer.spending("start and end"):
                    self.hooks.emit("teardown")

    def setup(self) -> None:
        """Let the callbacks prepare; `fit` does it, a resume needs it before."""
        if not self._is_set_up:
            self._is_set_up = True
            self._was_set_up = True
            self.hooks.emit("setup")

    def _begin(self, resume: Path | str | None) -> None:
        selected = None
        if resume is not None:
            selected = snapshot.find(self.group, self.run_dir, resume)
        if self.run is not None and self.is_main:
            goes_on = self.run.goes_on(resume, None if selected is None else selected[0])
            self.run.hold(self.components, repr(self), goes_on)
        self._warn(from_python.unsaved_remark(self.run, self.callbacks, self.run_dir))
        if selected is not None:
            self._resume(*selected)
        if self._has_fitted:  # an interrupt may have left a part of a gradient
            self.optimizers.zero_grad()
        self._has_fitted = True
        options = self.options
        if is_from_python(options):
            refuse_monitors(self.callbacks.values(), self.task, self.val_loaders)
        self.timer.start()
        with self.timer.spending("start and end"):
            self.setup()
            order = order_remark(self.train_loader)
            rates = self.lr_schedule.remarks(self.total_steps, self.components.epochs)
            for remark in start_remarks(self.components, order, rates):
                self._warn(remark)
            self.training_model.train()
            if options.seconds is not None:
                self._deadline = time.monotonic() + options.seconds
            if self.val_loaders and options.validate_at_start and not self.resumed:
                # A signal ends it, and then the training before its first update, in good order.
                with suppress(evaluation.EvaluationAbandoned):
                    self.evaluate(limit=options.validate_at_start)
            self.hooks.emit("on_fit_start")
            if self.val_loaders and validation_is_due(options, self.state):
                self._boundary()  # a signal came while the run before this one validated
            else:
                self._agree()
        self.timer.reset()

    def _resume(self, path: Path, payload: Mapping[str, Any]) -> None:
        """Go on from a checkpoint that `snapshot.find` returned."""
        remarks = self.load_state_dict(payload, same_run=reader.is_inside(path, self.run_dir))
        for remark in remarks:
            self._warn(remark)
        if self.is_main:
            _log.info("resumed from %s at step %d", path, self.state.global_step)
        from_python.restore_history(self.run, self.history, self.state.global_step)
        self._warn(from_python.end_remark(self.components))

    def _warn(self, remark: str | None) -> None:
        if self.is_main and remark is not None:
            _log.warning("%s", remark)

    def _epoch(self, length: int | None) -> Iterator[list[MicroBatch]]:
        """Draw what is left of an epoch's updates, until a signal ends the wait for one."""
        state = self.state
        stream = self.draw(state.epoch, state.position, length)
        while length is None or state.position < length:
            self.timer.lap("callbacks")
            micro_batches = self.components.reader.next(stream)
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
        """Return the micro-batches of an epoch's updates `start` to `stop`, on the device."""
        each = batches_per_update(self.task)
        last = None if stop is None else stop * each
        stream = self.train_loader.epoch(epoch, start * each, last)
        return in_updates(stream, each, self.components.to_device)

    def update(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Apply one optimizer update, or skip it, and count; `Updater.apply` draws it."""
        applied = self.updater.apply(micro_batches)
        samples = micro_batches[0].batch_slice.total
        if self.task.fresh_batches:  # an update has a batch for each turn
            slices = [micro_batch.batch_slice for micro_batch in micro_batches]
            samples = sum(one.total for one in slices if one.micro_batch == 0)
        self.state.count(len(micro_batches), samples, applied)
        if applied:
            self.optimizers.record_rates()
            self.lr_schedule.after_update()
        else:
            self.updater.count_skipped()

    def _end_epoch(self) -> None:
        # Before anything counts or averages what the epoch ended with; waits for the device.
        self.updater.check_deferred_nonfinite()
        self.state.epoch += 1
        self.state.position = 0
        self.state.epoch_samples = 0
        self.lr_schedule.after_epoch()
        with self.random.isolated():
            self.hooks.emit("on_epoch_end")
            self._boundary()

    def _boundary(self) -> bool:
        """Do what is due between two updates; each part once, also across a resume.

        Returns whether the run ends here.
        """
        has_epoch_means = bool(self.updater.epoch_accumulator)
        logs = log_is_due(self.options, self.state, has_epoch_means)
        validates = bool(self.val_loaders) and validation_is_due(self.options, self.state)
        # A log without callbacks draws nothing.
        draws = validates or (logs and self.callbacks)
        with self.random.isolated() if draws else NULL_CONTEXT:
            if logs:
                self._log()
            if validates:
                self._validate()
            self.hooks.emit("on_boundary")
        self._agree()
        return self._ended

    def _agree(self) -> None:
        """Agree with the other processes on whether this update was the last; a collective."""
        state = self.state
        if self._deadline is not None and time.monotonic() >= self._deadline:
            state.request_stop(MAX_TIME)
        # Where processes wait for each other anyway, a stop request acts now; elsewhere one update
        # later.
        meeting = self.done or not state.position or state.validated_at == state.global_step
        self.group.agree_on_stop(state, at_once=meeting)

    def _log(self) -> None:
        self.updater.check_deferred_nonfinite()
        ended = not self.state.position
        scalars = self.updater.pop_means()
        of_epoch = {}
        if ended or self.done:
            of_epoch = self.updater.epoch_means(ended)
        scalars |= of_epoch
        for contribute in self.hooks.listeners("scalars"):
            scalars |= contribute(self)
        self.state.logged_at = self.state.global_step
        self.timer.reset()
        if ended:
            self.lr_schedule.after_validation(of_epoch)
        self.log(scalars)

    def _validate(self) -> None:
        with self.timer.spending("evaluation"), suppress(evaluation.EvaluationAbandoned):
            self.updater.check_deferred_nonfinite()
            self.hooks.emit("on_validation_start")
            metrics = self._evaluated(self.val_loaders, self.state.global_step, shows_batches=True)
            self.state.validated_at = self.state.global_step
            self.lr_schedule.after_validation(metrics)
            self.log(metrics)
            self.hooks.emit("on_validation_end", metrics)

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
        if step is None:
            step = self.state.global_step
        sets = self.val_loaders if loader is None else {stage: loader}
        if not sets:
            raise ModelError("the Trainer was given no val_loader: evaluate(loader) takes one")
        with self.timer.spending("evaluation"):
            return self._evaluated(sets, step, limit)

    def _evaluated(
        self,
        sets: Mapping[str, Any],
        step: int,
        limit: int | None = None,
        shows_batches: bool = False,
    ) -> dict[str, float]:
        """`shows_batches`: to the callbacks, those of the first set."""
        metrics: dict[str, float] = {}
        for stage, loader in sets.items():
            batches = limit
            # Of a loader that is given all batches are read.
            if limit is None and sets is self.val_loaders:
                batches = validation_limit(self.options, loader)
            shows = shows_batches and not metrics
            metrics |= evaluation.evaluate(
                self.components, loader, stage, batches, step, self.hooks, shows
            )
        return metrics

    def predict(self, data: Any, batch_size: int = 256) -> Any:
        """Return what the task makes of the model's outputs, [n, ...] on the host: probabilities...

        data: a loader or any iterable of batches, whose targets are left out; or a tensor, an array
        or a DataFrame of inputs [n, ...], of which `batch_size` are computed at a time. Outputs
        that are dicts or tuples are joined part by part. With the weights that are evaluated: those
        of an average, if there is one.
        """
        return evaluation.predict(self.components, data, batch_size)

    def load_best(self) -> LogPoint:
        """Give the model the weights of the best checkpoint; return their step and epoch.

        Without a monitored metric it is the last one. A `fit` after it goes on from these weights,
        with the optimizer as it is. Raises CheckpointError where none was saved.
        """
        path = from_python.best_checkpoint(self.run_dir)
        # A collective: the main process reads the file, which others may not see.
        payload = self.group.broadcast(reader.read_checkpoint(path) if self.is_main else None)
        snapshot.load_weights(self.components, payload, path)
        return snapshot.log_point_of(payload)

    def state_dict(self, on_main: Callable[[Any], Any] = on_host) -> dict[str, Any]:
        """Return what a checkpoint holds; a collective of all processes.

        `on_main`: what the main process, which writes it, does with the whole dict.
        """
        return snapshot.capture(self.components, self.updater, on_main)

    def load_state_dict(
        self, state: Mapping[str, Any], hyper_parameters: bool = True, same_run: bool = True
    ) -> list[str]:
        """Go on where `state` was captured; return what cannot be exact, in words.

        With `hyper_parameters` false those that the trainer was built with hold from here on.
        Unless it is the `same_run`, nothing is loaded that tells of a run directory's files. Raises
        CheckpointError for a checkpoint of something else.
        """
        reader.check_payload(state, None)
        self.setup()
        # DDP fixes the order of its buckets in the first backward pass, which is run here, before
        # the state is loaded.
        first_update = functools.cache(lambda: next(self.draw(self.state.epoch)))
        self.training_model.train()
        self.strategy.warm_up(
            self.training_model, lambda: self.updater.dry_run_backward(first_update())
        )
        snapshot.check_fit(self.components, state)
        with reader.loading("the state"):
            return snapshot.load(self.components, self.updater, state, hyper_parameters, same_run)

    def __repr__(self) -> str:
        return from_python.plan_of(self.components, list(self.val_loaders), self.run_dir)

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context in which the model answers as in a validation, for callbacks."""
        return evaluation.evaluation_mode(self.components)

    def evaluation_weights(self) -> AbstractContextManager[Any]:
        """Return the context in which the model has the weights to evaluate, or an average's."""
        return evaluation.evaluation_weights(self.components)

    def average_weights(self, name: str | None = None) -> AbstractContextManager[Any]:
        """Return the context in which the model has the weights of an average (EMA, SWA).

        `name`: of the callback; by default the one that is evaluated, or else the only one. Before
        that has averaged anything the model keeps its own weights. However the context ends, and
        also within another one, the weights and buffers are then as before, bit for bit. Raises
        ModelError where no callback keeps an average.
        """
        return average_of(self.callbacks, name).swap(self.model)

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
            self.hooks.emit("on_log", scalars)
        finally:
            self._log_point = None

    def log_image(self, name: str, image: Any) -> None:
        """Hand an image to the callbacks; `regimen.trainer.media.as_image` says what may be one.

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
            self.hooks.emit("on_media", name, convert(*values))

    def end(self, results: Results) -> None:
        """Tell the callbacks how the run ended; once, after the test.

        `train` does it; who calls `fit` himself may do it as well.
        """
        if not self._was_set_up or self._has_ended:
            return
        self._has_ended = True
        for listener in self.hooks.listeners("on_run_end"):
            try:
                listener(self, results)
            except Exception as error:  # what was trained stays trained
                name = type(listener.__self__).__name__
                _log.warning("%s.on_run_end failed: %s", name, error, exc_info=True)
