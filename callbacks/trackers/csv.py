"""Write what is logged to CSV files."""

import re

import numpy as np
from PIL import Image as Pillow

from regimen.callbacks.trackers.recorder import Recorder, as_text, leaves, names_of
from regimen.trainer.callback import Results
from regimen.trainer.files.atomic import write_text
from regimen.trainer.files.layout import as_csv
from regimen.trainer.media import Media
from regimen.trainer.runs.status import read_metrics
from regimen.trainer.trainer import Trainer


class CSV(Recorder):
    """Write `csv/` in the run directory, for spreadsheets and pandas.

    When the run ends, `metrics.csv` has the lines of `metrics.jsonl` and a column for each name;
    `results.csv` the last values and how it ended. `config.csv` has the settings. Images are PNG
    files in `shown/<name>/`, histograms and curves CSV files, texts Markdown. A resumed run removes
    what was written after its checkpoint. A full disk causes a warning, and the run continues.
    """

    affects_result = False

    def begin(self, trainer: Trainer) -> None:
        """Write the settings; remove the files of a resumed run after its checkpoint."""
        folder = self.run / "csv"
        folder.mkdir(exist_ok=True)
        last_step = trainer.state.global_step if trainer.resumed else -1
        for path in (folder / "shown").rglob("step-*"):
            if int(path.stem.removeprefix("step-")) > last_step:
                path.unlink()
        config = names_of(self.run, trainer.config_text).config
        write_text(folder / "config.csv", as_csv([("key", "value"), *leaves(config)]))

    def show(self, step: int, name: str, value: Media) -> None:
        """Write an image, a histogram, a text or a curve as a file."""
        safe_name = re.sub(r"[^\w\-./ ]|\.\.", "_", name).strip("/")
        folder = self.run / "csv/shown" / safe_name
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(value, np.ndarray):
            Pillow.fromarray(value).save(folder / f"step-{step:08d}.png")
        else:
            ending, text = as_text(value)
            write_text(folder / f"step-{step:08d}.{ending}", text)

    def end(self, step: int, results: Results) -> None:
        """Write what was logged, the last values and how the run ended."""
        folder = self.run / "csv"
        lines = list(read_metrics(self.run))
        columns = dict[str, None]()  # in the order in which they first appear
        for line in lines:
            columns |= dict.fromkeys(line)
        rows = [[line.get(column) for column in columns] for line in lines]
        write_text(folder / "metrics.csv", as_csv([list(columns), *rows]))

        last_values = [("key", "value"), ("state", results.state), *results.metrics.items()]
        write_text(folder / "results.csv", as_csv(last_values))
