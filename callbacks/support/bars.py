"""Two bars at the foot of a terminal: the run above, its epoch below."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from tqdm import tqdm
from tqdm.utils import disp_len

_SHORTEST = 8  # characters of a bar; below it, what stands beside it gives way
_WIDTH = 80  # where the terminal does not know its own
SECONDS, _SECONDS_RUN = 0.2, 1.0  # between two drawings


class View(NamedTuple):
    """What a bar shows."""

    share: float | None  # of the whole; None where that is unknown: no bar
    head: str
    items: Sequence[str] = ()  # beside the bar, the most important first


class _Bar(tqdm):  # type: ignore[type-arg]
    # Disables tqdm's monitor thread: forking loader workers from a process with threads is unsafe.
    monitor_interval: ClassVar[int] = 0
    rate: float = 0.0  # updates a second, the last ones counting most

    def __init__(self, view: Callable[[_Bar], View], **options: Any) -> None:
        self._view = view
        super().__init__(
            leave=False,
            dynamic_ncols=True,
            miniters=0,  # tqdm's default would freeze the bar when steps become slower
            mininterval=0,  # it is updated where it is to be drawn
            **options,
        )

    @property
    def format_dict(self) -> Any:
        """Add the format that fits the terminal as it is now."""
        given = super().format_dict
        width = (given["ncols"] or _WIDTH) - 1  # a full line would move the cursor to the next
        elapsed, done = given["elapsed"], self.n - self.initial
        self.rate = given["rate"] or (done / elapsed if elapsed > 0 else 0.0)
        view = self._view(self)
        total = None if view.share is None else 1.0
        fitting = {"ncols": width, "bar_format": bar_format(view, width)}
        return {**given, **fitting, "n": view.share or 0.0, "total": total}

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """Erase what is left of a longer text; tqdm's spaces would wrap on a narrower terminal."""

        def show(text: str) -> None:
            file.write(f"\r{text}\x1b[K")
            file.flush()

        return show


class Bars:
    """The bars of a run and of its epoch, drawn once and five times a second at most."""

    def __init__(self, run: Callable[[], View]) -> None:
        self.doing = ""  # beside training, such as a validation
        self.loss = ""
        self._run = run
        self._label = ""
        self._above: _Bar | None = None
        self._below: _Bar | None = None
        self._uncounted = 0  # updates that the bar has not been told of: each call costs 0.3 us
        self._due = self._due_run = 0.0  # time of the next drawing

    def begin(self, label: str, done: int, total: int | None) -> None:
        """Show an epoch that has so many updates, some of them done before."""
        self._label = label
        if self._above is None:  # a bar without a total has no truth value
            self._above = _Bar(lambda _: self._of_run(), position=0)
        self._below = _Bar(self._of_epoch, position=1, initial=done, total=total)

    def advance(self) -> None:
        """Count an update, and draw if the last drawing is old enough."""
        self._uncounted += 1
        now = time.monotonic()
        if now < self._due or self._below is None:
            return
        self._due = now + SECONDS
        done, self._uncounted = self._uncounted, 0
        self._below.update(done)
        if now >= self._due_run:
            self._due_run = now + _SECONDS_RUN
            self._refresh(self._above)

    def show(self) -> None:
        """Draw both now."""
        if self._below is not None:
            self._below.n += self._uncounted
            self._uncounted = 0
        self._refresh(self._above)
        self._refresh(self._below)

    def clear(self) -> None:
        """Make room for a line, until they are drawn again."""
        for bar in (self._below, self._above):
            if bar is not None:
                bar.clear()

    def end(self) -> None:
        """Remove the epoch's bar, and clear the run's."""
        self.doing, self._uncounted = "", 0
        if self._below is not None:
            self._below.close()
            self._below = None
        self.clear()

    def close(self) -> None:
        """Remove both."""
        self.end()
        if self._above is not None:
            self._above.close()
            self._above = None

    def _of_run(self) -> View:
        view = self._run()
        return view._replace(head=view.head.ljust(len(self._label)))

    def _of_epoch(self, bar: _Bar) -> View:
        share = min(1.0, bar.n / bar.total) if bar.total else None
        count = f"{bar.n}/{bar.total}" if bar.total else f"{bar.n} updates"
        rate = f"{bar.rate:.3g} updates/s" if bar.rate else ""
        items = (count, self.doing, rate, self.loss)
        return View(share, self._label, [item for item in items if item])

    @staticmethod
    def _refresh(bar: _Bar | None) -> None:
        if bar is not None:
            bar.refresh()


def bar_format(view: View, width: int) -> str:
    """Return tqdm's format of a bar: as many of the items as fit, none of them cut."""
    percent = "" if view.share is None else f" {view.share:4.0%}"
    head, shown = f"{view.head}{percent}", ""
    room = width - disp_len(head) - (_SHORTEST + len("|| ") if percent else len("  "))
    for item in view.items:
        longer = f"{shown}, {item}" if shown else item
        if disp_len(longer) > room:
            break
        shown = longer
    text = f"{head}|\0| {shown}" if percent else f"{head}  {shown}"
    return text.replace("{", "{{").replace("}", "}}").replace("\0", "{bar}")


def in_short(seconds: float) -> str:
    """Return a duration as `05:12` or `1:05:12`."""
    return str(tqdm.format_interval(seconds))
