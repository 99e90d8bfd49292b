"""Write what is logged to CSV files."""

from __future__ import annotations

import csv
import io
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.support.run_files import as_file
from callbacks.support.settings import leaves
from callbacks.support.shown import Shown, Shows
from callbacks.support.tracking import Names
from trainer.callback import Results
from trainer.errors import StorageError
from trainer.files.atomic import write_text
from trainer.files.storage import storage_error

if TYPE_CHECKING:
    from trainer.trainer import Trainer

FOLDER, METRICS, SHOWN = "csv", "metrics.csv", "shown"
_log = logging.getLogger(__name__)


class CSV(Shows):
    """Write `csv/` in the run directory, for spreadsheets and pandas.

    `metrics.csv` has a row for each time that values are logged and a column for each name;
    `config.csv` the settings, `results.csv` the last values and how the run ended. Images are PNG
    files in `shown/<name>/`, histograms and curves CSV files, texts Markdown. A resumed run removes
    what was written after its checkpoint. A full disk causes a warning, and the run continues.
    """

    of_run = True

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._columns: list[str] = ["step", "epoch"]
        self._rows = 0
        self._sent: dict[str, int] = {}  # the last step of each column
        self._warned = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """Write the settings; remove the rows and files of a resumed run after its checkpoint."""
        if trainer.run_dir is None or not trainer.is_main:
            return
        self._folder = folder = trainer.run_dir / FOLDER
        config = Names.of(trainer.run_dir, trainer.config_text).config
        step = trainer.state.global_step if self._rows or trainer.resumed else -1

        def begin() -> None:
            folder.mkdir(exist_ok=True)
            _remove_after(folder / SHOWN, step)
            write_text(folder / "config.csv", _text([("key", "value"), *leaves(dict(config))]))
            self._rewrite(self._read()[: self._rows])

        self._try(begin)

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Append a row."""
        if self._folder is None:
            return
        step, epoch = trainer.log_point
        fresh = {k: v for k, v in scalars.items() if step > self._sent.get(k, -1)}
        if fresh:
            self._sent |= dict.fromkeys(fresh, step)
            self._try(lambda: self._append({"step": step, "epoch": epoch, **fresh}))

    def on_shown(self, trainer: Trainer, name: str, value: Shown) -> None:
        """Write an image, a histogram, a text or a curve as a file."""
        if self._folder is not None:
            place = self._folder / SHOWN / re.sub(r"[^\w\-./ ]|\.\.", "_", name).strip("/")
            step = trainer.log_point.step
            self._try(lambda: _write(place, step, value))

    def on_run_end(self, trainer: Trainer, results: Results) -> None:
        """Write the last values and how the run ended."""
        if (folder := self._folder) is not None and folder.is_dir():
            rows = [("key", "value"), ("state", results.state), *results.metrics.items()]
            self._try(lambda: write_text(folder / "results.csv", _text(rows)))

    def state_dict(self) -> dict[str, Any]:
        """Return the columns, the number of rows, and the last step of each column."""
        return {"columns": list(self._columns), "rows": self._rows, "sent": dict(self._sent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what has been written."""
        self._columns, self._rows = list(state["columns"]), int(state["rows"])
        self._sent = dict(state["sent"])

    def _append(self, row: Mapping[str, Any]) -> None:
        assert self._folder is not None
        path = self._folder / METRICS
        if more := [name for name in row if name not in self._columns]:
            rows = self._read()  # before there are columns that the file does not have
            self._columns += more
            self._rewrite([*rows, row])
            return
        with path.open("ab", buffering=0) as file:
            size = path.stat().st_size
            content = _text([[row.get(name, "") for name in self._columns]]).encode()
            if file.write(content) < len(content):
                file.truncate(size)
                raise StorageError(f"cannot write {path}: no space left")
        self._rows += 1

    def _read(self) -> list[dict[str, str]]:
        assert self._folder is not None
        path = self._folder / METRICS
        if not path.exists():
            return []
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, restval=""))
        return [{k: v for k, v in row.items() if k is not None} for row in rows]

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._folder is not None
        table = [[row.get(name, "") for name in self._columns] for row in rows]
        write_text(self._folder / METRICS, _text([self._columns, *table]))
        self._rows = len(rows)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, StorageError, csv.Error) as error:
            if not self._warned and self._folder is not None:
                self._warned = True
                folder = self._folder
                reason = storage_error(folder, error) if isinstance(error, OSError) else error
                _log.warning("%s; training continues without it", reason)


def _write(place: Path, step: int, value: Shown) -> None:
    ending, content = as_file(value)
    place.mkdir(parents=True, exist_ok=True)
    (place / f"step-{step:08d}.{ending}").write_bytes(content)


def _text(rows: Iterable[Sequence[Any]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _remove_after(folder: Path, step: int) -> None:
    if step < 0:
        shutil.rmtree(folder, ignore_errors=True)
    for path in folder.rglob("step-*"):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()
