"""Show the progress of a run: bars and a table on a terminal, otherwise lines at intervals."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from callbacks.support.bars import SECONDS, Bars, View, in_short
from callbacks.support.errors import CallbackError
from callbacks.support.metric_table import MetricTable, Row
from trainer.callback import Callback, saver_of
from trainer.files.layout import is_dumb, pair_lines, size_of

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_LOSS, _EPOCH_LOSS = "train/loss", "train/epoch_loss"
_log = logging.getLogger(__name__)


class Progress(Callback):
    """Show how far the run and its epoch are, and the metrics of each epoch and validation.

    `bar`: true, false, or None for bars if stderr is a terminal; a notebook and a terminal that
    cannot move its cursor (TERM=dumb) get lines in any case. Below bars, metrics are a table whose
    `best` column marks the best value so far of what `callbacks.checkpoint` monitors. Without bars,
    an epoch is a line, with train/epoch_loss, the mean over its samples, and the validation at its
    end; a validation within it has a line of its own, and the progress of the epoch is logged at
    most every `every_seconds`. Lines have at most 100 characters. Only logged values are shown, so
    that nothing is read from the device for them.
    """

    def __init__(self, bar: bool | None = None, every_seconds: float = 10.0) -> None:
        if not every_seconds > 0:
            raise CallbackError(f"every_seconds={every_seconds}: choose more than 0")
        self._wants_bar = bar
        self._every_seconds = every_seconds
        self._shown = False
        self._bars: Bars | None = None
        self._table = MetricTable("", None, marks_best=False)
        self._best: float | None = None  # of the monitored metric, so far
        self._loss: dict[str, float] = {}  # of the last log line
        self._closing: dict[str, float] = {}  # of the epoch that ends here
        self._begun = self._told = 0.0  # time: the epoch's start, the last line
        self._position = 0  # in the epoch, when this process started it
        self._started, self._first_step = 0.0, 0  # of the run, in this process
        self._looked = 0.0  # time of the last word from an evaluation
        self._consoles: list[logging.Handler] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        """Choose between bars and lines."""
        self._started, self._first_step = time.monotonic(), trainer.state.global_step
        self._shown = trainer.is_main
        self._loss = {k: v for k, v in trainer.metrics.items() if k == _LOSS}
        if self._shown and _takes_bars(self._wants_bar):
            self._begin_bars(trainer)

    def _begin_bars(self, trainer: Trainer) -> None:
        saver, last = saver_of(trainer.callbacks), trainer.options.max_epochs
        monitored = saver is not None and saver.monitor is not None
        found = saver.best_result() if saver is not None else None
        self._best = found[1] if found else None
        self._table = MetricTable(f"{last}/{last}" if last else "", trainer.total_steps, monitored)
        self._bars = Bars(lambda: self._of_run(trainer))
        self._consoles = _console_handlers()
        for handler in self._consoles:
            handler.addFilter(self._make_room)

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Start the bar of an epoch."""
        self._begun = self._told = time.monotonic()
        self._closing = {}
        self._position = trainer.state.position
        if self._bars is not None:
            label = f"epoch {_numbered(trainer, trainer.state.epoch + 1)}"
            self._bars.loss = _text(self._loss)
            self._bars.begin(label, trainer.state.position, trainer.steps_per_epoch)

    def on_update_end(self, trainer: Trainer) -> None:
        """Advance the bars."""
        if self._bars is not None:
            self._bars.advance()

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Show the logged values."""
        self._loss |= {k: v for k, v in scalars.items() if k == _LOSS}
        self._closing |= {k: v for k, v in scalars.items() if k == _EPOCH_LOSS}
        if self._bars is not None:
            self._bars.loss = _text(self._loss)
        elif self._shown and trainer.state.position and _LOSS in scalars:
            self._tell(trainer)

    def on_validation_start(self, trainer: Trainer) -> None:
        """Show that the run validates."""
        self._looked = time.monotonic()
        if self._bars is not None:
            self._bars.doing = "validating"
            self._bars.show()

    def on_evaluation_batch(
        self, trainer: Trainer, stage: str, done: int, batches: int | None
    ) -> None:
        """Show how far a validation or test is."""
        now = time.monotonic()
        every = self._every_seconds if self._bars is None else SECONDS
        if not self._shown or done == batches or now - self._looked < every:
            return
        self._looked = now
        where = f"{stage} {done}/{batches or '?'}"
        if self._bars is not None:
            self._bars.doing = where
            self._bars.show()
        else:
            _say([f"epoch {_numbered(trainer, trainer.state.epoch)}: {where} batches"])

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Show the metrics: with the line of the epoch that ends here, or in one of their own."""
        values = {key: metrics[key] for key in sorted(metrics)}
        if self._bars is not None:
            self._bars.doing = ""
        if not trainer.state.position or trainer.done:
            self._closing |= values
        elif self._shown:
            self._show(trainer, trainer.state.epoch + 1, values)

    def on_boundary(self, trainer: Trainer) -> None:
        """Show an epoch, after its validation."""
        if not trainer.state.position:
            self._close(trainer, trainer.state.epoch)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Show an incomplete epoch, after `max_steps` or a signal."""
        if trainer.state.position:
            # Of an epoch that a signal ends no mean was logged; on all processes, as it adds up.
            self._closing = trainer.updater.epoch_means(ended=False) | self._closing
            self._close(trainer, trainer.state.epoch + 1)

    def teardown(self, trainer: Trainer) -> None:
        """Remove the bars and the log filters."""
        if self._bars is not None:
            self._bars.close()
            self._bars = None
        for handler in self._consoles:
            handler.removeFilter(self._make_room)
        self._consoles = []

    def _close(self, trainer: Trainer, epoch: int) -> None:
        if self._bars is not None:
            self._bars.end()
        if self._shown:
            seconds = time.monotonic() - self._begun
            self._show(trainer, epoch, _closing(self._closing), seconds)

    def _show(
        self,
        trainer: Trainer,
        epoch: int,
        values: Mapping[str, float],
        seconds: float | None = None,
    ) -> None:
        """Log values as a line; below bars the terminal has them as a row instead."""
        number, step = _numbered(trainer, epoch), trainer.state.global_step
        took = "" if seconds is None else f"({seconds:.1f} s)"
        if self._bars is None:
            _say(pair_lines(f"epoch {number}, step {step}", values, took))
            return
        _to_files(pair_lines(f"epoch {number}, step {step}", values, took))
        best = self._is_best(trainer, values)
        took = "" if seconds is None else _duration(seconds)
        row = Row(number, step, values, took, best)
        self._bars.clear()
        print(*self._table.lines(row, *size_of(sys.stderr)), sep="\n", file=sys.stderr)
        self._bars.show()

    def _is_best(self, trainer: Trainer, values: Mapping[str, float]) -> bool:
        saver = saver_of(trainer.callbacks)
        value = None if saver is None or saver.monitor is None else values.get(saver.monitor)
        if saver is None or value is None or not saver.improves(value, self._best):
            return False
        self._best = value
        return True

    def _tell(self, trainer: Trainer) -> None:
        now, state = time.monotonic(), trainer.state
        if now - self._told < self._every_seconds:
            return
        self._told = now
        rate = (state.position - self._position) / (now - self._begun)
        left = self._left(trainer, now)
        where = f"epoch {_numbered(trainer, state.epoch + 1)}, "
        where += f"{state.position}/{trainer.steps_per_epoch or '?'}"
        tail = f"({rate:.3g} steps/s{'' if left is None else f', {in_short(left)} left'})"
        _say(pair_lines(where, self._loss, tail))

    def _of_run(self, trainer: Trainer) -> View:
        """Return what the bar of the run shows."""
        now, steps = time.monotonic(), trainer.state.global_step
        total, limit = trainer.total_steps, trainer.options.max_time
        shares = [steps / total] if total else []
        shares += [(now - self._started) / limit] if limit else []
        left = self._left(trainer, now)
        items = [f"{steps}/{total} updates" if total else f"{steps} updates"]
        items += [] if left is None else [f"{in_short(left)} left"]
        return View(min(1.0, max(shares)) if shares else None, "run", items)

    def _left(self, trainer: Trainer, now: float) -> float | None:
        """Return the seconds that are left of the run, validations included; None if unknown."""
        seconds, total = now - self._started, trainer.total_steps
        steps = trainer.state.global_step - self._first_step
        limit = trainer.options.max_time
        left = [] if limit is None else [max(0.0, limit - seconds)]
        if total and steps > 0:
            left.append((total - trainer.state.global_step) * seconds / steps)
        return min(left, default=None)

    def _make_room(self, record: logging.LogRecord) -> bool:
        """Clear the bars before a log record is written; rows of the table stand for our own."""
        if record.name == _log.name:
            return self._bars is None
        if self._bars is not None:
            self._bars.clear()
        return True


def _console_handlers() -> list[logging.Handler]:
    """Return the handlers that write log lines to the terminal."""
    streams = (sys.stderr, sys.stdout)
    handlers = logging.getLogger().handlers
    return [h for h in handlers if isinstance(h, logging.StreamHandler) and h.stream in streams]


def _takes_bars(wanted: bool | None) -> bool:
    """Return whether stderr shows bars: in a notebook, each drawing would be a line of its own."""
    if wanted is False or is_dumb() or "ipykernel" in sys.modules:
        return False
    return wanted or sys.stderr.isatty()


def _say(lines: Sequence[str]) -> None:
    """Log lines, or print them if logging has no handlers."""
    _to_files(lines)
    if not logging.getLogger().handlers:
        print(*lines, sep="\n", file=sys.stderr, flush=True)


def _to_files(lines: Sequence[str]) -> None:
    """Log lines; the filter of the bars keeps them from the terminal."""
    for line in lines:
        _log.info("%s", line)


def _closing(values: Mapping[str, float]) -> dict[str, float]:
    """Return what the line of an epoch shows: its loss, then its validation."""
    shown = [key for key in sorted(values) if key == _EPOCH_LOSS or key.startswith("val/")]
    return {key: values[key] for key in shown}


def _numbered(trainer: Trainer, epoch: int) -> str:
    last = trainer.options.max_epochs
    return f"{epoch}/{last}" if last is not None else str(epoch)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else in_short(seconds)


def _text(values: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in values.items())
