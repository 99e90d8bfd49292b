"""What a trainer is made of, and what it tells its callbacks; the loop is `trainer.trainer`'s."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from data.batch import to_device
from trainer.callback import Callback, Hooks, Results, evaluated_average
from trainer.checkpoints.unsaved import Unsaved
from trainer.distributed.group import Group
from trainer.epoch_lines import EpochLines
from trainer.evaluation import Evaluator
from trainer.files.storage import storage_error
from trainer.lr_schedulers.horizon import refuse_to_wait
from trainer.lr_schedulers.schedule import LRSchedule
from trainer.media import PRCurve, as_image, histogram_of
from trainer.optimizers.optimizers import Optimizers
from trainer.options import TrainerOptions, horizon
from trainer.pace import is_done
from trainer.state import LogPoint, TrainState
from trainer.strategies.strategy import Strategy
from trainer.task import Task, named_modules
from trainer.timer import Timer
from trainer.update.batch import BatchSource, as_source, repeatable
from trainer.update.precision import Precision
from trainer.update.updater import Updater
from trainer.update.waiting import Waiting

_log = logging.getLogger(__name__)


class TrainerBase:
    """The parts of a training and its counters, and the values that callbacks are told."""

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
        self.strategy.some_unused = _leaves_some_out(task, callbacks or {})
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

    def to_device(self, batch: Any) -> Any:
        """Move a batch to this process's device, in the run's number format."""
        dtype, channels_last = self.precision.dtype, self.options.channels_last
        return to_device(batch, self.strategy.device, dtype, channels_last)

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

    def log_image(self, name: str, image: Any) -> None:
        """Hand an image to the callbacks; `trainer.media.as_image` says what may be one.

        This and the next four do nothing, and read nothing from the device, where no callback of
        the run receives such a thing, and on other processes than the main one.
        """
        self._show("on_image", name, lambda: as_image(image))

    def log_histogram(self, name: str, values: Any, bins: int = 64) -> None:
        """Hand the histogram of a tensor to the callbacks."""
        self._show("on_histogram", name, lambda: histogram_of(values, bins))

    def log_text(self, name: str, text: str) -> None:
        """Hand a text, in Markdown, to the callbacks."""
        self._show("on_text", name, lambda: text)

    def log_figure(self, name: str, figure: Any) -> None:
        """Hand a figure of matplotlib's to the callbacks; it stays open."""
        self._show("on_figure", name, lambda: figure)

    def log_pr_curve(self, name: str, curve: PRCurve) -> None:
        """Hand precision and recall over thresholds to the callbacks."""
        self._show("on_pr_curve", name, lambda: curve)

    def _show(self, hook: str, name: str, value: Callable[[], Any]) -> None:
        if self.is_main and self.hooks.listeners(hook):
            self.hooks.emit(hook, self, name, value())

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


def _leaves_some_out(task: Task, callbacks: Mapping[str, Callback]) -> bool:
    """Return whether updates may leave parameters without a gradient."""
    return bool(task.turns) or any(callback.freezes for callback in callbacks.values())
