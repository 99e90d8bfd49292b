"""Show the progress of a run: a bar on a terminal, otherwise lines at intervals."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from tqdm import tqdm

from callbacks.support.errors import CallbackError
from trainer.callback import Callback

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_LOSS, _EPOCH_LOSS = "train/loss", "train/epoch_loss"
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{left}, {rate_fmt}{postfix}]"
_log = logging.getLogger(__name__)


class _Bar(tqdm):  # type: ignore[type-arg]
    # Disables tqdm's monitor thread: forking loader workers from a process with threads is unsafe.
    monitor_interval: ClassVar[int] = 0
    left: Callable[[], str] = staticmethod(lambda: "?")  # of the run: tqdm knows that of the bar

    @property
    def format_dict(self) -> Any:
        """Add what `bar_format` shows beyond tqdm's own."""
        return {**super().format_dict, "left": self.left()}


class Progress(Callback):
    """Show epoch, rate, time left and the last train/loss; log a line after every epoch.

    `bar`: true, false, or None for a bar if stderr is a terminal. Without a bar, the progress of
    the epoch is logged at most every `every_seconds`. The line of an epoch has train/epoch_loss,
    the mean over its samples, and the validation at its end, if there was one; a validation within
    it has a line of its own. Only logged values are shown, so that nothing is read from the device
    for them.
    """

    def __init__(self, bar: bool | None = None, every_seconds: float = 10.0) -> None:
        if not every_seconds > 0:
            raise CallbackError(f"every_seconds={every_seconds}: choose more than 0")
        self._wants_bar = bar
        self._every_seconds = every_seconds
        self._shown = False
        self._bar: _Bar | None = None
        self._loss: dict[str, float] = {}  # of the last log line
        self._closing: dict[str, float] = {}  # of the epoch that ends here
        self._begun = self._told = 0.0  # time: the epoch's start, the last line
        self._position = 0  # in the epoch, when this process started it
        self._started, self._first_step = 0.0, 0  # of the run, in this process
        self._looked = 0.0  # time of the last word from an evaluation
        self._consoles: list[logging.Handler] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        """Choose between a bar and lines."""
        self._started, self._first_step = time.monotonic(), trainer.state.global_step
        self._shown = trainer.is_main
        self._loss = {k: v for k, v in trainer.metrics.items() if k == _LOSS}
        self._wants_bar = sys.stderr.isatty() if self._wants_bar is None else self._wants_bar
        if self._shown and self._wants_bar:
            self._consoles = _console_handlers()
            for handler in self._consoles:
                handler.addFilter(self._make_room)

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Start a bar."""
        self._begun = self._told = time.monotonic()
        self._closing = {}
        self._position = trainer.state.position
        if self._shown and self._wants_bar:
            self._bar = _Bar(
                desc=_epoch(trainer, trainer.state.epoch + 1),
                total=trainer.steps_per_epoch,
                initial=trainer.state.position,
                unit=" steps",
                leave=False,
                dynamic_ncols=True,
                bar_format=_BAR,
                miniters=1,  # tqdm's default would freeze the bar when steps become slower
                mininterval=0.2,
            )
            self._bar.left = lambda: self._left(trainer, time.monotonic())
            self._bar.set_postfix_str(_text(self._loss), refresh=False)

    def on_update_end(self, trainer: Trainer) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.update()

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Show the logged values."""
        self._loss |= {k: v for k, v in scalars.items() if k == _LOSS}
        self._closing |= {k: v for k, v in scalars.items() if k == _EPOCH_LOSS}
        if self._bar is not None:
            self._bar.set_postfix_str(_text(self._loss), refresh=False)
        elif self._shown and trainer.state.position and _LOSS in scalars:
            self._tell(trainer)

    def on_validation_start(self, trainer: Trainer) -> None:
        """Show that the run validates."""
        self._looked = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(f"{_text(self._loss)}, validating")

    def on_evaluation_batch(
        self, trainer: Trainer, stage: str, done: int, batches: int | None
    ) -> None:
        """Show how far a validation or test is."""
        now = time.monotonic()
        if not self._shown or done == batches or now - self._looked < self._every_evaluation():
            return
        self._looked = now
        where = f"{stage} {done}/{batches or '?'}"
        if self._bar is not None:
            self._bar.set_postfix_str(where)
        else:
            _say(f"{_epoch(trainer, trainer.state.epoch)}: {where} batches")

    def _every_evaluation(self) -> float:
        return 0.2 if self._bar is not None else self._every_seconds

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Show the metrics: with the line of the epoch that ends here, or in one of their own."""
        values = {key: metrics[key] for key in sorted(metrics)}
        if not trainer.state.position or trainer.done:
            self._closing |= values
        elif self._shown:
            where = f"{_epoch(trainer, trainer.state.epoch + 1)}, step {trainer.state.global_step}"
            _say(f"{where}: {_text(values)}")
        if self._bar is not None:
            self._bar.set_postfix_str(_text(self._loss), refresh=False)

    def on_boundary(self, trainer: Trainer) -> None:
        """Log the line of an epoch, after its validation."""
        if not trainer.state.position:
            self._close(trainer, trainer.state.epoch)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Log the line of an incomplete epoch, after `max_steps` or a signal."""
        if trainer.state.position:
            # Of an epoch that a signal ends no mean was logged; on all processes, as it adds up.
            self._closing = trainer.updater.epoch_means(ended=False) | self._closing
            self._close(trainer, trainer.state.epoch + 1)

    def teardown(self, trainer: Trainer) -> None:
        """Remove the bar and the log filters."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        for handler in self._consoles:
            handler.removeFilter(self._make_room)
        self._consoles = []

    def _close(self, trainer: Trainer, epoch: int) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._shown:
            seconds = time.monotonic() - self._begun
            step, values = trainer.state.global_step, _text(_closing(self._closing))
            _say(f"{_epoch(trainer, epoch)}, step {step}: {values} ({seconds:.1f} s)")

    def _tell(self, trainer: Trainer) -> None:
        now, state = time.monotonic(), trainer.state
        if now - self._told < self._every_seconds:
            return
        self._told = now
        rate = (state.position - self._position) / (now - self._begun)
        total = trainer.steps_per_epoch
        left = f", {self._left(trainer, now)} left" if trainer.total_steps else ""
        where = f"{_epoch(trainer, state.epoch + 1)}, {state.position}/{total or '?'}"
        _say(f"{where}: {_text(self._loss)} ({rate:.3g} steps/s{left})")

    def _left(self, trainer: Trainer, now: float) -> str:
        """Return the time that is left of the run, validations included."""
        state, seconds = trainer.state, now - self._started
        steps = state.global_step - self._first_step
        total = trainer.total_steps
        rest = (total or 0) - state.global_step
        return str(_Bar.format_interval(rest * seconds / steps)) if total and steps > 0 else "?"

    def _make_room(self, record: logging.LogRecord) -> bool:
        """Clear the bar before a log record is written to its line."""
        if self._bar is not None:
            self._bar.clear()
        return True


def _console_handlers() -> list[logging.Handler]:
    """Return the handlers that write log lines to the terminal."""
    streams = (sys.stderr, sys.stdout)
    handlers = logging.getLogger().handlers
    return [h for h in handlers if isinstance(h, logging.StreamHandler) and h.stream in streams]


def _say(line: str) -> None:
    """Log a line, or print it if logging has no handlers."""
    if logging.getLogger().handlers:
        _log.info("%s", line)
    else:
        print(line, file=sys.stderr, flush=True)


def _closing(values: Mapping[str, float]) -> dict[str, float]:
    """Return what the line of an epoch shows: its loss, then its validation."""
    shown = [key for key in sorted(values) if key == _EPOCH_LOSS or key.startswith("val/")]
    return {key: values[key] for key in shown}


def _epoch(trainer: Trainer, epoch: int) -> str:
    last = trainer.options.max_epochs
    return f"epoch {epoch}/{last}" if last is not None else f"epoch {epoch}"


def _text(values: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in values.items())
