"""Show the progress of a run: bars and a table on a terminal, otherwise lines at intervals."""

import logging
import sys
import threading
import time
from collections.abc import Iterable, Mapping

from tqdm import tqdm

from regimen.callbacks.support import check_positive
from regimen.trainer.callback import Callback, losses_of, saver_of
from regimen.trainer.files.layout import is_dumb, terminal_size, wrap_items
from regimen.trainer.runs.epoch_lines import (
    EPOCH_LOSS,
    epoch_text,
    values_of_epoch,
    values_text,
)
from regimen.trainer.runs.results import best_of
from regimen.trainer.trainer import Trainer

_LOSS = "train/loss"
_log = logging.getLogger(__name__)


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # tqdm's monitor would be a thread beside the training
    _lock = threading.RLock()  # tqdm's own lock would set the start method of multiprocessing


class Progress(Callback):
    """Show how far the run and its epoch are, and the metrics of each epoch and validation.

    `bar`: true, false, or None for bars if stderr is a terminal; a notebook and a terminal that
    cannot move its cursor (TERM=dumb) get lines in any case. Below bars, metrics are a table whose
    `best` column marks the best value so far of what `callbacks.checkpoint` monitors. Without bars,
    an epoch is a line, with train/epoch_loss, the mean over its samples, and the validation at its
    end; a validation within it has a line of its own, and the progress of the epoch is logged at
    most every `every_seconds`. Only logged values are shown: nothing is read from the device for
    them.
    """

    shows_progress = True
    affects_result = False

    def __init__(self, bar: bool | None = None, every_seconds: float = 10.0) -> None:
        check_positive(every_seconds=every_seconds)
        self._wants_bar = bar
        self._every_seconds = every_seconds
        self._bars = list[_Bar]()  # of the run and of its epoch
        self._best: float | None = None  # the best value of the monitored metric so far
        self._columns = dict[str, str]()  # an empty row of the table
        self._pending = dict[str, float]()  # values of an epoch and a validation, not shown yet
        # Times of `time.monotonic`.
        self._next_line = 0.0
        self._epoch_start = 0.0
        self._run_start = 0.0
        self._first_step = 0  # of this process

    def on_fit_start(self, trainer: Trainer) -> None:
        """Choose between bars and lines."""
        self._run_start = time.monotonic()
        self._first_step = trainer.state.global_step
        if not trainer.is_main or not self._shows_bars():
            return
        best = best_of(trainer.callbacks)
        self._best = None if best is None else best[1]
        self._add_bar("run", self._first_step, trainer.total_steps)
        for handler in logging.getLogger().handlers:
            stream = getattr(handler, "stream", None)
            if stream is not None and stream in (sys.stderr, sys.stdout):
                handler.addFilter(self._make_room)

    def _shows_bars(self) -> bool:
        # In a notebook each time a bar is drawn would add a line.
        if is_dumb() or "ipykernel" in sys.modules:
            return False
        if self._wants_bar is None:
            return sys.stderr.isatty()
        return self._wants_bar

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Start the bar of an epoch."""
        self._epoch_start = time.monotonic()
        self._next_line = self._epoch_start + self._every_seconds
        state = trainer.state
        if self._bars:
            self._close_bars(1)
            self._add_bar(
                f"epoch {epoch_text(trainer, state.epoch + 1)}",
                state.position,
                trainer.steps_per_epoch,
            )

    def on_update_end(self, trainer: Trainer) -> None:
        """Advance the bars, which are drawn now and then."""
        if self._bars:
            run_bar, epoch_bar = self._bars
            run_bar.update(trainer.state.global_step - run_bar.n)
            epoch_bar.update()

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Show the logged values."""
        self._pending |= _losses(trainer, EPOCH_LOSS, scalars)
        losses = _losses(trainer, _LOSS, scalars)
        if not losses or not trainer.is_main:
            return
        if self._bars:
            self._bars[1].set_postfix_str(values_text(losses), refresh=False)
        elif trainer.state.position and self._is_line_due():
            self._log_pace(trainer, values_text(losses))

    def _log_pace(self, trainer: Trainer, losses: str) -> None:
        """Log the place within an epoch, with the speed and the time that is left."""
        state = trainer.state
        pace = tqdm.format_meter(
            state.global_step,
            total=trainer.total_steps,  # type: ignore[arg-type]  # None is a run without end
            elapsed=time.monotonic() - self._run_start,
            initial=self._first_step,
            unit="step",
            bar_format="step {n_fmt}/{total_fmt}: " + losses + " ({rate_fmt}, {remaining} left)",
        )
        _log_line(f"epoch {epoch_text(trainer, state.epoch + 1)}, {pace}")

    def on_validation_start(self, trainer: Trainer) -> None:
        """Show that the run validates."""
        self._next_line = time.monotonic() + self._every_seconds
        if self._bars:
            self._bars[1].set_postfix_str("validating")

    def on_evaluation_batch(
        self, trainer: Trainer, stage: str, done: int, batches: int | None
    ) -> None:
        """Show how far a validation or test is."""
        if done == batches or not trainer.is_main or not self._is_line_due():
            return
        text = f"{stage} {done}/{batches or '?'} batches"
        if self._bars:
            self._bars[1].set_postfix_str(text)
        else:
            _log_line(f"epoch {epoch_text(trainer, trainer.state.epoch)}: {text}")

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Keep the metrics for the line of the epoch that ends here, or for one of their own."""
        self._pending |= metrics

    def on_boundary(self, trainer: Trainer) -> None:
        """Show an epoch with its validation, or a validation within it."""
        if self._pending or not trainer.state.position:
            self._show(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Show an epoch that a stop has ended early."""
        if trainer.state.position and not trainer.done:
            # The mean of an incomplete epoch was not logged. A collective: it adds up over all
            # processes.
            self._pending = trainer.updater.epoch_means(ended=False)
            self._show(trainer)

    def teardown(self, trainer: Trainer) -> None:
        """Remove the bars and the log filters."""
        self._close_bars(0)
        for handler in logging.getLogger().handlers:
            handler.removeFilter(self._make_room)

    def _is_line_due(self) -> bool:
        now = time.monotonic()
        if now < self._next_line:
            return False
        self._next_line = now + self._every_seconds
        return True

    def _add_bar(self, name: str, done: int, total: int | None) -> None:
        bar = _Bar(
            desc=name,
            initial=done,
            total=total,
            position=len(self._bars),
            unit="step",
            leave=False,
            dynamic_ncols=True,
            mininterval=0.2,
            miniters=1,  # look at the clock at each update: the speed may change
            smoothing=0,  # the mean over the run: the time left includes validations
        )
        self._bars.append(bar)

    def _close_bars(self, first: int) -> None:
        for bar in reversed(self._bars[first:]):
            bar.close()
        del self._bars[first:]

    def _show(self, trainer: Trainer) -> None:
        """Log what is pending as a line; below bars the terminal has it as a row instead."""
        pending = self._pending
        self._pending = {}
        if not trainer.is_main:
            return
        values = values_of_epoch(trainer, dict(sorted(pending.items())))
        state = trainer.state
        seconds = f"{time.monotonic() - self._epoch_start:.1f} s"
        epoch = epoch_text(trainer, state.epoch + 1 if state.position else state.epoch)
        step = str(state.global_step)
        _log_line(f"epoch {epoch}, step {step}: {values_text(values)} ({seconds})")
        if self._bars:
            mark = "*" if self._is_new_best(trainer, values) else ""
            row = {"epoch": epoch, "step": step, "time": seconds, "best": mark}
            self._write_row(row | {name: f"{value:.4g}" for name, value in values.items()})

    def _is_new_best(self, trainer: Trainer, values: Mapping[str, float]) -> bool:
        saver = saver_of(trainer.callbacks)
        if saver is None or saver.monitor is None:
            return False
        value = values.get(saver.monitor)
        if value is None or not saver.improves(value, self._best):
            return False
        self._best = value
        return True

    def _write_row(self, cells: dict[str, str]) -> None:
        """Write a row of the table above the bars, below a header where columns are new."""
        row = self._columns | cells
        lines = []
        if row.keys() != self._columns.keys():
            lines += _table_lines(row, row.keys())
        lines += _table_lines(row, row.values())
        _Bar.write("\n".join(lines), sys.stderr)
        self._columns = dict.fromkeys(row, "")

    def _make_room(self, record: logging.LogRecord) -> bool:
        """Clear the bars before a line is written; drop our own lines, which the table repeats."""
        for bar in self._bars:
            bar.clear()
        return record.name != _log.name


def _table_lines(columns: Iterable[str], texts: Iterable[str]) -> list[str]:
    """Return texts aligned to their columns; what does not fit goes on in further lines."""
    width = terminal_size(sys.stderr).columns
    cells = []
    for name, text in zip(columns, texts, strict=True):
        cells.append(f"{text:>{max(9, len(name))}}")
    return wrap_items(cells, width, "  ")


def _log_line(line: str) -> None:
    """Log a line, or print it if logging has no handlers. Beside bars, it goes to files only."""
    _log.info("%s", line)
    if not logging.getLogger().handlers:
        print(line, file=sys.stderr, flush=True)


def _losses(trainer: Trainer, name: str, scalars: Mapping[str, float]) -> dict[str, float]:
    """Return those of the values that are the loss called `name`, or its turns'."""
    return {key: scalars[key] for key in losses_of(trainer, name) if key in scalars}
