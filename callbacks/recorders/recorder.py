"""The interface of what records a run: values, what is shown beside them, and its end."""

import csv
import io
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image as Pillow

from trainer.callback import Callback, Results
from trainer.files.atomic import storage_error
from trainer.media import Histogram, Image, Media, PRCurve
from trainer.state import LogPoint
from trainer.trainer import Trainer

UNFINISHED = ("preempted", "stopped")  # ends after which a run can go on
_log = logging.getLogger(__name__)


class Recorder(Callback):
    """Base class of callbacks that record a run; on the main process, where it has a directory.

    Whatever fails is one warning, and the run goes on.
    """

    of_run = True

    def __init__(self) -> None:
        self.run: Path | None = None  # the run directory, once it is recorded
        self._warned = False

    def begin(self, trainer: Trainer) -> None:
        """Begin, or go on with what a resumed run has recorded up to its checkpoint."""
        raise NotImplementedError

    def record(self, trainer: Trainer, at: LogPoint, values: Mapping[str, float]) -> None:
        """Record values."""
        raise NotImplementedError

    def show(self, trainer: Trainer, at: LogPoint, name: str, value: Media) -> None:
        """Record an image, a histogram, a text or a curve."""
        raise NotImplementedError

    def end(self, trainer: Trainer, results: Results) -> None:
        """Record how the run ended."""
        raise NotImplementedError

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin."""
        if trainer.is_main and trainer.run_dir is not None:
            self.run = trainer.run_dir.absolute()
            self.attempt(lambda: self.begin(trainer))

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Record values."""
        if self.run is not None:
            self.attempt(lambda: self.record(trainer, trainer.log_point, scalars))

    def on_media(self, trainer: Trainer, name: str, media: Media) -> None:
        """Record an image, a histogram, a text or a curve."""
        if self.run is not None:
            self.attempt(lambda: self.show(trainer, trainer.log_point, name, media))

    def on_run_end(self, trainer: Trainer, results: Results) -> None:
        """Record the end, unless the run was discarded."""
        if self.run is not None and self.run.is_dir():
            self.attempt(lambda: self.end(trainer, results))

    def attempt(self, work: Callable[[], None]) -> bool:
        """Do something that may fail; return whether it was done."""
        try:
            work()
        except Exception as error:  # a tracker may raise anything
            if not self._warned:
                self._warned = True
                path = error.filename if isinstance(error, OSError) else None
                told = storage_error(Path(path), error) if path else error  # type: ignore[arg-type]
                reason = str(told).strip().partition("\n")[0] or type(error).__name__
                message = "callbacks.%s: %s; training continues without it"
                _log.warning(message, self.name, reason)
            return False
        return True


def as_file(value: Media) -> tuple[str, bytes]:
    """Return the ending and the content of the file that shows something."""
    if isinstance(value, str):
        return "md", value.encode()
    if not isinstance(value, Histogram | PRCurve):
        return "png", png(value)
    names, columns = "threshold,precision,recall", list[Any]()
    if isinstance(value, PRCurve):
        columns += value.thresholds, value.precision, value.recall
    else:
        names = "left,right,count"
        columns += value.edges[:-1], value.edges[1:], value.counts
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return "csv", table([names.split(","), *rows]).encode()


def png(image: Image) -> bytes:
    """Return an image as a PNG file."""
    file = io.BytesIO()
    Pillow.fromarray(image).save(file, "PNG")
    return file.getvalue()


def table(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()
