"""Show the progress of a run: bars and a table on a terminal, otherwise lines at intervals."""

import logging
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from regimen.callbacks.support import require
from regimen.trainer.callback import Callback, losses_of, saver_of
from regimen.trainer.files.layout import is_dumb, packed, size_of
from regimen.trainer.trainer import Trainer

_LOSS, _EPOCH_LOSS = "train/loss", "train/epoch_loss"
_log = logging.getLogger(__name__)


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no thread beside the training
    _lock = threading.RLock()  # tqdm's own settles how processes are started


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

    def __init__(self, bar: bool | None = None, every_seconds: float = 10.0) -> None:
        require(every_seconds > 0, f"every_seconds={every_seconds}: choose more than 0")
        self._wants_bar = bar
        self._every_seconds = every_seconds
        self._bars = list[_Bar]()  # of the run and of its epoch
        self._best: float | None = None  # of the monitored metric, so far
        self._columns = dict[str, str]()  # of the table, empty
        self._fresh = dict[str, float]()  # of an epoch and a validation, not shown yet
        self._due = self._begun = self._started = 0.0  # times: next line, epoch, run
        self._first_step = 0  # of this process

    def on_fit_start(self, trainer: Trainer) -> None:
        """Choose between bars and lines."""
        self._started, self._first_step = time.monotonic(), trainer.state.global_step
        # In a notebook each drawing would be a line of its own.
        moves = not is_dumb() and "ipykernel" not in sys.modules
        wanted = sys.stderr.isatty() if self._wants_bar is None else self._wants_bar
        if not (trainer.is_main and wanted and moves):
            return
        saver = saver_of(trainer.callbacks)
        found = saver.best_result() if saver is not None else None
        self._best = found[1] if found else None
        self._add_bar("run", self._first_step, trainer.total_steps)
        for handler in logging.getLogger().handlers:
            stream = getattr(handler, "stream", None)
            if stream is not None and stream in (sys.stderr, sys.stdout):
                handler.addFilter(self._make_room)

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Start the bar of an epoch."""
        self._begun = time.monotonic()
        self._due = self._begun + self._every_seconds
        if self._bars:
            self._close_bars(1)
            name = f"epoch {_numbered(trainer, trainer.state.epoch + 1)}"
            self._add_bar(name, trainer.state.position, trainer.steps_per_epoch)

    def on_update_end(self, trainer: Trainer) -> None:
        """Advance the bars, which are drawn now and then."""
        if self._bars:
            run, epoch = self._bars
            run.update(trainer.state.global_step - run.n)
            epoch.update()

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Show the logged values."""
        epoch_losses = losses_of(trainer, _EPOCH_LOSS)
        self._fresh |= {k: v for k, v in scalars.items() if k in epoch_losses}
        losses = {key: scalars[key] for key in losses_of(trainer, _LOSS) if key in scalars}
        if not losses or not trainer.is_main:
            return
        state, loss = trainer.state, _text(losses)
        if self._bars:
            self._bars[1].set_postfix_str(loss, refresh=False)
        elif state.position and self._is_due():
            pace: dict[str, Any] = {"initial": self._first_step, "total": trainer.total_steps}
            pace["elapsed"] = time.monotonic() - self._started
            form = "step {n_fmt}/{total_fmt}: " + loss + " ({rate_fmt}, {remaining} left)"
            text = tqdm.format_meter(state.global_step, **pace, unit="step", bar_format=form)
            _say(f"epoch {_numbered(trainer, state.epoch + 1)}, {text}")

    def on_validation_start(self, trainer: Trainer) -> None:
        """Show that the run validates."""
        self._due = time.monotonic() + self._every_seconds
        if self._bars:
            self._bars[1].set_postfix_str("validating")

    def on_evaluation_batch(
        self, trainer: Trainer, stage: str, done: int, batches: int | None
    ) -> None:
        """Show how far a validation or test is."""
        if done == batches or not trainer.is_main or not self._is_due():
            return
        text = f"{stage} {done}/{batches or '?'} batches"
        if self._bars:
            self._bars[1].set_postfix_str(text)
        else:
            _say(f"epoch {_numbered(trainer, trainer.state.epoch)}: {text}")

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Keep the metrics for the line of the epoch that ends here, or for one of their own."""
        self._fresh |= metrics

    def on_boundary(self, trainer: Trainer) -> None:
        """Show an epoch with its validation, or a validation within it."""
        if self._fresh or not trainer.state.position:
            self._show(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Show an epoch that a stop has ended early."""
        if trainer.state.position and not trainer.done:
            # Of such an epoch no mean was logged; on all processes, as it adds up.
            self._fresh = trainer.updater.epoch_means(ended=False)
            self._show(trainer)

    def teardown(self, trainer: Trainer) -> None:
        """Remove the bars and the log filters."""
        self._close_bars(0)
        for handler in logging.getLogger().handlers:
            handler.removeFilter(self._make_room)

    def _is_due(self) -> bool:
        now = time.monotonic()
        due = now >= self._due
        self._due = now + self._every_seconds if due else self._due
        return due

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
            miniters=1,  # each update looks at the clock: a pace may change
            smoothing=0,  # what is left includes validations
        )
        self._bars.append(bar)

    def _close_bars(self, first: int) -> None:
        for bar in reversed(self._bars[first:]):
            bar.close()
        del self._bars[first:]

    def _show(self, trainer: Trainer) -> None:
        """Log what is fresh as a line; below bars the terminal has it as a row instead."""
        values, self._fresh = self._fresh, {}
        if not trainer.is_main:
            return
        losses = losses_of(trainer, _EPOCH_LOSS)
        shown = {k: values[k] for k in sorted(values) if k in losses or k.startswith("val/")}
        step, within = trainer.state.global_step, trainer.state.position > 0
        number = _numbered(trainer, trainer.state.epoch + within)
        took = f"{time.monotonic() - self._begun:.1f} s"
        _say(f"epoch {number}, step {step}: {_text(shown)} ({took})")
        if not self._bars:
            return
        saver, mark = saver_of(trainer.callbacks), ""
        value = shown.get(saver.monitor or "") if saver is not None else None
        if saver is not None and value is not None and saver.improves(value, self._best):
            self._best, mark = value, "*"
        cells = {"epoch": number, "step": str(step), "time": took, "best": mark}
        row = self._columns | cells | {name: f"{value:.4g}" for name, value in shown.items()}
        width = size_of(sys.stderr).columns  # what does not fit goes on in further lines
        names, texts = (
            packed([f"{text:>{max(9, len(name))}}" for name, text in given], width, "  ")
            for given in (zip(row, row, strict=True), row.items())
        )
        header = [] if row.keys() == self._columns.keys() else names
        _Bar.write("\n".join([*header, *texts]), sys.stderr)  # above the bars
        self._columns = dict.fromkeys(row, "")

    def _make_room(self, record: logging.LogRecord) -> bool:
        """Clear the bars before a line is written; rows of the table stand for our own lines."""
        for bar in self._bars:
            bar.clear()
        return record.name != _log.name


def _say(line: str) -> None:
    """Log a line, or print it if logging has no handlers; the bars' filter keeps it from them."""
    _log.info("%s", line)
    if not logging.getLogger().handlers:
        print(line, file=sys.stderr, flush=True)


def _numbered(trainer: Trainer, epoch: int) -> str:
    last = trainer.options.max_epochs
    return f"{epoch}/{last}" if last is not None else str(epoch)


def _text(values: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in values.items())
