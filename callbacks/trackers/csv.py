"""Write what is logged to CSV files."""

import re

import numpy as np
from PIL import Image as Pillow

from regimen.callbacks.trackers.recorder import Recorder, as_text, leaves, names_of
from regimen.trainer.callback import Media, Results
from regimen.trainer.files.atomic import write_text
from regimen.trainer.files.layout import as_csv
from regimen.trainer.runs.status import read_metrics
from regimen.trainer.trainer import Trainer


class CSV(Recorder):
    """Write `csv/` in the run directory, for spreadsheets and pandas.

    When the run ends, `metrics.csv` has the lines of `metrics.jsonl` and a column for each name;
    `results.csv` the last values and how it ended. `config.csv` has the settings. Images are PNG
    files in `shown/<name>/`, histograms and curves CSV files, texts Markdown. A resumed run removes
    what was written after its checkpoint. A full disk causes a warning, and the run continues.
    """

    def begin(self, trainer: Trainer) -> None:
        """Write the settings; remove the files of a resumed run after its checkpoint."""
        folder = self.run / "csv"
        folder.mkdir(exist_ok=True)
        last = trainer.state.global_step if trainer.resumed else -1
        for path in (folder / "shown").rglob("step-*"):
            if int(path.stem.removeprefix("step-")) > last:
                path.unlink()
        settings = leaves(names_of(self.run, trainer.config_text).config)
        write_text(folder / "config.csv", as_csv([("key", "value"), *settings]))

    def show(self, step: int, name: str, value: Media) -> None:
        """Write an image, a histogram, a text or a curve as a file."""
        place = self.run / "csv/shown" / re.sub(r"[^\w\-./ ]|\.\.", "_", name).strip("/")
        place.mkdir(parents=True, exist_ok=True)
        if isinstance(value, np.ndarray):
            Pillow.fromarray(value).save(place / f"step-{step:08d}.png")
        else:
            ending, text = as_text(value)
            write_text(place / f"step-{step:08d}.{ending}", text)

    def end(self, step: int, results: Results) -> None:
        """Write what was logged, the last values and how the run ended."""
        lines = list(read_metrics(self.run))
        names = list(dict.fromkeys(name for line in lines for name in line))
        rows = [[line.get(name) for name in names] for line in lines]
        write_text(self.run / "csv/metrics.csv", as_csv([names, *rows]))
        last = ("state", results.state), *results.metrics.items()
        write_text(self.run / "csv/results.csv", as_csv([("key", "value"), *last]))
