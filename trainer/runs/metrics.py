"""What a run has logged, read from its `metrics.jsonl`."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.files.atomic import regular
from trainer.runs.status import METRICS


def read_metrics(run_dir: Path, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's log, the oldest first; nothing where there is no log.

    Incomplete lines, which a kill leaves, are skipped. last_bytes: read only the end of the file.
    """
    try:
        with regular(run_dir / METRICS).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = 0 if last_bytes is None else max(0, size - last_bytes)
            file.seek(start)
            lines = file.read().split(b"\n")[bool(start) : -1]  # the ends may be incomplete
    except OSError:
        return
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            yield values
