"""Show the progress of a run: bars and a table on a terminal, otherwise lines at intervals."""

import logging
import sys
import time
from collections.abc import Mapping, Sequence

from tqdm import tqdm

from callbacks.support import require
from trainer.callback import Callback, saver_of
from trainer.files.layout import is_dumb, packed, size_of
from trainer.trainer import Trainer

_LOSS, _EPOCH_LOSS = "train/loss", "train/epoch_loss"
_DRAWN = 0.2  # seconds between two drawings of the bars
_NUMBER = 9  # characters of a value such as 1.234e-05
_CLEAR = (
    "\r\x1b[K\n\x1b[K\x1b[A"  # of the line of the cursor and the one below, to stay in the first
)
_log = logging.getLogger(__name__)


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

    def __init__(self, bar: bool | None = None, every_seconds: float = 10.0) -> None:
        require(every_seconds > 0, f"every_seconds={every_seconds}: choose more than 0")
        self._wants_bar = bar
        self._every_seconds = every_seconds
        self._shown = False  # by this process
        self._bars = False  # as bars of the run and of its epoch
        self._best: float | None = None  # of the monitored metric, so far
        self._widths: dict[str, int] = {}  # of the columns of the table
        self._header: list[str] = []
        self._rows = 0  # lines below the header
        self._loss: dict[str, float] = {}  # of the last log line
        self._closing: dict[str, float] = {}  # of the epoch that ends here
        self._doing = ""  # beside training, such as a validation
        self._due = 0.0  # time of the next drawing or line
        self._started, self._first_step = 0.0, 0  # of the run, in this process
        self._begun, self._position = 0.0, 0  # of the epoch, in this process

    def on_fit_start(self, trainer: Trainer) -> None:
        """Choose between bars and lines."""
        self._started, self._first_step = time.monotonic(), trainer.state.global_step
        self._shown = trainer.is_main
        self._loss = {k: v for k, v in trainer.metrics.items() if k == _LOSS}
        # In a notebook each drawing would be a line of its own.
        moves = not is_dumb() and "ipykernel" not in sys.modules
        wanted = sys.stderr.isatty() if self._wants_bar is None else self._wants_bar
        self._bars = self._shown and wanted and moves
        if self._bars:
            saver = saver_of(trainer.callbacks)
            found = saver.best_result() if saver is not None else None
            self._best = found[1] if found else None
            for handler in logging.getLogger().handlers:
                stream = getattr(handler, "stream", None)
                if stream is not None and stream in (sys.stderr, sys.stdout):
                    handler.addFilter(self._make_room)

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Start the bar of an epoch."""
        self._begun, self._position = time.monotonic(), trainer.state.position
        self._due = self._begun + self._every_seconds
        self._closing = {}
        self._draw(trainer)

    def on_update_end(self, trainer: Trainer) -> None:
        """Advance the bars."""
        if self._bars and time.monotonic() >= self._due:
            self._draw(trainer)

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Show the logged values."""
        self._loss |= {k: v for k, v in scalars.items() if k == _LOSS}
        self._closing |= {k: v for k, v in scalars.items() if k == _EPOCH_LOSS}
        state, now = trainer.state, time.monotonic()
        within = self._shown and not self._bars and state.position and _LOSS in scalars
        if within and now >= self._due:
            self._due = now + self._every_seconds
            where = f"epoch {_numbered(trainer, state.epoch + 1)}, {state.position}"
            rate = (state.position - self._position) / (now - self._begun)
            left = ", ".join([f"{rate:.3g} steps/s", *self._left(trainer, now)])
            _say(f"{where}/{trainer.steps_per_epoch or '?'}: {_text(self._loss)} ({left})")

    def on_validation_start(self, trainer: Trainer) -> None:
        """Show that the run validates."""
        self._doing = "validating"
        self._due = time.monotonic() + self._every_seconds
        self._draw(trainer)

    def on_evaluation_batch(
        self, trainer: Trainer, stage: str, done: int, batches: int | None
    ) -> None:
        """Show how far a validation or test is."""
        now = time.monotonic()
        if not self._shown or done == batches or now < self._due:
            return
        self._due = now + self._every_seconds
        self._doing = f"{stage} {done}/{batches or '?'}"
        if not self._bars:
            _say(f"epoch {_numbered(trainer, trainer.state.epoch)}: {self._doing} batches")
        self._draw(trainer)

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Show the metrics: with the line of the epoch that ends here, or in one of their own."""
        self._doing = ""
        if not trainer.state.position or trainer.done:
            self._closing |= metrics
        elif self._shown:
            self._show(trainer, trainer.state.epoch + 1, metrics)

    def on_boundary(self, trainer: Trainer) -> None:
        """Show an epoch, after its validation."""
        if self._shown and not trainer.state.position:
            self._show(trainer, trainer.state.epoch, self._closing, closes=True)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Show an incomplete epoch, after `max_steps` or a signal."""
        if trainer.state.position:
            # Of an epoch that a signal ends no mean was logged; on all processes, as it adds up.
            self._closing = trainer.updater.epoch_means(ended=False) | self._closing
            if self._shown:
                self._show(trainer, trainer.state.epoch + 1, self._closing, closes=True)

    def teardown(self, trainer: Trainer) -> None:
        """Remove the bars and the log filters."""
        self._make_room()
        for handler in logging.getLogger().handlers:
            handler.removeFilter(self._make_room)
        self._bars = False

    def _show(
        self, trainer: Trainer, epoch: int, values: Mapping[str, float], closes: bool = False
    ) -> None:
        """Log values as a line; below bars the terminal has them as a row instead."""
        shown = {k: values[k] for k in sorted(values) if k == _EPOCH_LOSS or k.startswith("val/")}
        number, step = _numbered(trainer, epoch), trainer.state.global_step
        took = f"{time.monotonic() - self._begun:.1f} s" if closes else ""
        _say(f"epoch {number}, step {step}: {_text(shown)}{f' ({took})' if took else ''}")
        if not self._bars:
            return
        saver = saver_of(trainer.callbacks)
        cells = {"epoch": number, "step": str(step)}
        if saver is not None and saver.monitor is not None:
            value = shown.get(saver.monitor)
            best = value is not None and saver.improves(value, self._best)
            self._best = value if best else self._best
            cells["best"] = "*" if best else ""
        cells |= {name: "" for name in self._widths if "/" in name}
        cells |= {name: f"{value:.4g}" for name, value in shown.items()} | {"time": took}
        self._make_room()
        print(*self._table(cells, *size_of(sys.stderr)), sep="\n", file=sys.stderr)
        self._draw(trainer)

    def _table(self, cells: Mapping[str, str], width: int, height: int) -> list[str]:
        """Return a row, below the names of its columns where these change, or every screenful.

        Columns that do not fit the width go on in further lines of both.
        """
        for name, text in cells.items():
            least = max(len(name), len(text), _NUMBER if "/" in name else 0)
            self._widths[name] = max(self._widths.get(name, 0), least)
        header, row = (
            packed([text.rjust(self._widths[name]) for name, text in given], width, "  ")
            for given in (zip(cells, cells, strict=True), cells.items())
        )
        if header != self._header or self._rows + len(row) > height - len(header) - 3:
            self._header, self._rows = header, 0
        lines = row if self._rows else [*header, *row]
        self._rows += len(row)
        return lines

    def _draw(self, trainer: Trainer) -> None:
        """Draw the bar of the run and that of its epoch."""
        if not self._bars:
            return
        now, state = time.monotonic(), trainer.state
        self._due = now + _DRAWN
        total, limit = trainer.total_steps, trainer.options.seconds
        shares = [state.global_step / total] if total else []
        shares += [(now - self._started) / limit] if limit else []
        updates = f"{state.global_step}{f'/{total}' if total else ''} updates"
        items = [updates, *self._left(trainer, now)]
        width = size_of(sys.stderr).columns - 1  # a full line would move the cursor to the next
        run = bar_line(max(shares) if shares else None, "run", items, width)
        length, done = trainer.steps_per_epoch, state.position
        head = f"epoch {_numbered(trainer, state.epoch + 1)}"
        if not done and state.updates and self._doing:  # the epoch has been counted already
            head, done = f"epoch {_numbered(trainer, state.epoch)}", length or 0
        rate = (state.position - self._position) / max(now - self._begun, 1e-9)
        count = f"{done}/{length}" if length else f"{done} updates"
        items = [count, self._doing, f"{rate:.3g} updates/s" if rate > 0 else "", _text(self._loss)]
        epoch = bar_line(done / length if length else None, head, items, width)
        lines = f"\r{run}\x1b[K\n{epoch}\x1b[K\x1b[A"
        print(lines, end="", file=sys.stderr, flush=True)

    def _left(self, trainer: Trainer, now: float) -> list[str]:
        """Return how long the rest of the run takes, validations included, where it is known."""
        seconds, total = now - self._started, trainer.total_steps
        steps = trainer.state.global_step - self._first_step
        limit = trainer.options.seconds
        left = [] if limit is None else [max(0.0, limit - seconds)]
        if total and steps > 0:
            left.append((total - trainer.state.global_step) * seconds / steps)
        return [f"{tqdm.format_interval(min(left))} left"] if left else []

    def _make_room(self, record: logging.LogRecord | None = None) -> bool:
        """Clear the bars before a line is written; rows of the table stand for our own lines."""
        if record is not None and record.name == _log.name:
            return not self._bars
        if self._bars:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
        return True


def bar_line(share: float | None, head: str, items: Sequence[str], width: int) -> str:
    """Return a bar with as many of the items beside it as fit whole; without a share no bar."""
    start = head if share is None else f"{head} {min(share, 1.0):4.0%}"
    room = width - len(start) - (2 if share is None else len("||") + 9)
    shown = next(iter(packed([*filter(None, items)], room, ", ")), "")
    shown = shown if len(shown) <= room else ""
    if share is None:
        return f"{start}  {shown}"
    form = f"{start}|\0| {shown}".replace("{", "{{").replace("}", "}}").replace("\0", "{bar}")
    return str(tqdm.format_meter(min(share, 1.0), 1.0, 0.0, ncols=width, bar_format=form))


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
