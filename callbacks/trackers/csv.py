"""Write what is logged to CSV files."""

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from callbacks.trackers.recorder import Recorder, as_file, config_of, leaves, table
from trainer.callback import Results
from trainer.files.atomic import AppendLog, write_text
from trainer.media import Media
from trainer.state import LogPoint
from trainer.trainer import Trainer


class CSV(Recorder):
    """Write `csv/` in the run directory, for spreadsheets and pandas.

    `metrics.csv` has a row for each time that values are logged and a column for each name;
    `config.csv` the settings, `results.csv` the last values and how the run ended. Images are PNG
    files in `shown/<name>/`, histograms and curves CSV files, texts Markdown. A resumed run removes
    what was written after its checkpoint. A full disk causes a warning, and the run continues.
    """

    persistent = ("rows",)

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path()
        self._log: AppendLog | None = None
        self.rows = 0
        self._last: dict[str, int] = {}  # the last step of each column

    def begin(self, trainer: Trainer) -> None:
        """Write the settings; remove the rows and files of a resumed run after its checkpoint."""
        self._folder = self.run / "csv"
        self._folder.mkdir(exist_ok=True)
        last = trainer.state.global_step if trainer.resumed else -1
        for path in (self._folder / "shown").rglob("step-*"):
            if int(path.stem.removeprefix("step-")) > last:
                path.unlink()
        settings = leaves(config_of(self.run, trainer.config_text))
        write_text(self._folder / "config.csv", table([("key", "value"), *settings]))
        self._rewrite(self._written())

    def record(self, at: LogPoint, values: Mapping[str, float]) -> None:
        """Append a row; new names are new columns."""
        fresh = {k: v for k, v in values.items() if at.step > self._last.get(k, -1)}
        row = {"step": at.step, "epoch": at.epoch, **fresh}
        if self._log is None or not row.keys() <= self._last.keys():
            self._rewrite([*self._written(), row])
        elif fresh:
            self._last |= dict.fromkeys(fresh, at.step)
            self._log.write(table([[row.get(name, "") for name in self._last]]))
            self.rows += 1

    def show(self, step: int, name: str, value: Media) -> None:
        """Write an image, a histogram, a text or a curve as a file."""
        ending, content = as_file(value)
        place = self._folder / "shown" / re.sub(r"[^\w\-./ ]|\.\.", "_", name).strip("/")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"step-{step:08d}.{ending}").write_bytes(content)

    def end(self, step: int, results: Results) -> None:
        """Write the last values and how the run ended."""
        rows = [("key", "value"), ("state", results.state), *results.metrics.items()]
        write_text(self._folder / "results.csv", table(rows))

    def _written(self) -> list[dict[str, str]]:
        path = self._folder / "metrics.csv"
        if not path.exists():
            return []
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file, restkey="", restval=""))[: self.rows]

    def _rewrite(self, rows: list[Any]) -> None:
        self.rows, self._last = len(rows), {"step": -1, "epoch": -1}
        for row in rows:
            self._last |= {name: int(row["step"]) for name in row if row[name] != ""}
        content = [[row.get(name, "") for name in self._last] for row in rows]
        write_text(self._folder / "metrics.csv", table([list(self._last), *content]))
        if self._log is not None:
            self._log.close()
        self._log = AppendLog(self._folder / "metrics.csv")
