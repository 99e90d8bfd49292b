"""The keys of `predict` that are not the run's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.errors import Problem, raise_problems
from scripts.cli.keys import (
    Take,
    matching,
    one_of,
    or_null,
    run_problems,
    taken,
    true_or_false,
    whole,
)

TABLE = "predictions.csv"
FORMATS = (".csv", ".jsonl", ".parquet")
ARRAYS = (".npy", ".safetensors")
SPLITS = ("val", "test", "predict")
_DEVICE = re.compile(r"(cpu|mps|cuda)(?::(\d+))?")
_ABOVE_ZERO = r"(?=.*[1-9])\d{1,6}(\.\d{1,9})?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a command line asks of `predict`; the rest are overrides of the run's configuration."""

    run: str
    source: str
    checkpoint: str = "best"
    out: str = TABLE
    top_k: int | None = None  # classes: 1; text: all tokens
    device: str | None = None
    save: str | None = None  # logits | probabilities | embeddings:MODULE
    save_to: str | None = None  # default: beside the table, .npy
    draw: bool = False
    on_error: str = "raise"  # raise | skip
    resume: str | None = None  # auto
    overwrite: bool = False
    max_new_tokens: int | None = None  # of text, as are the two below
    sampling: str | None = None  # greedy | random
    temperature: float | None = None

    @property
    def table(self) -> Path:
        """The file that is written."""
        return Path(self.out)

    @property
    def array(self) -> Path | None:
        """The file of what is saved of each sample; None if nothing is."""
        return _array(self.save, self.save_to, self.table)

    @property
    def saved(self) -> str:
        """What is saved, without the name of a module."""
        return (self.save or "").partition(":")[0]

    def plain(self) -> dict[str, Any]:
        """Return the values by name."""
        return asdict(self)

    def strategy(self) -> dict[str, Any]:
        """Return the keys of `strategy` that `device` stands for."""
        if self.device is None:
            return {}
        kind, number = _DEVICE.fullmatch(self.device).groups()  # type: ignore[union-attr]
        return {"accelerator": kind, "devices": [int(number)] if number else "auto"}


_SAVED = r"logits|probabilities|embeddings:\S+"
KEYS: Mapping[str, Take] = {
    "run": str,
    "source": str,
    "checkpoint": str,
    "out": str,
    "top_k": whole(),
    "device": or_null(matching(_DEVICE.pattern, "cpu, cuda, cuda:NUMBER or mps")),
    "save": or_null(matching(_SAVED, "logits, probabilities or embeddings:MODULE")),
    "save_to": str,
    "draw": true_or_false,
    "on_error": one_of("raise", "skip"),
    "resume": or_null(one_of("auto")),
    "overwrite": true_or_false,
    "max_new_tokens": whole(),
    "sampling": one_of("greedy", "random"),
    "temperature": lambda text: float(matching(_ABOVE_ZERO, "a number above 0")(text)),
}


def take_options(given: Mapping[str, str]) -> Options:
    """Check the keys of `predict` as typed. Raises ConfigError with all mistakes at once."""
    values, problems = taken(given, KEYS)
    problems += run_problems(given.get("run"))
    if not given.get("run"):
        problems.append(Problem("run", "missing: predict run=RUN_DIR source=DIR"))
    if not given.get("source"):
        hint = "a folder, a file, a glob, - (file names on standard input), val or test"
        problems.append(Problem("source", "missing: what to predict", hint=hint))
    if "temperature" in values and values.get("sampling") != "random":
        hint = "add sampling=random"
        problems.append(Problem("temperature", "has no effect on the likeliest token", hint))
    raise_problems([*problems, *_unfit_table(values), *_unfit_array(values)])
    return Options(**values)


def _unfit_table(values: Mapping[str, Any]) -> list[Problem]:
    table = Path(str(values.get("out") or TABLE))
    if table.suffix not in FORMATS:
        return [Problem("out", f"{table} ends with none of {', '.join(FORMATS)}")]
    if not table.parent.is_dir():
        return [Problem("out", f"{table}: there is no folder {table.parent}")]
    if table.exists() and not values.get("overwrite"):
        hint = "overwrite=true replaces it"
        return [Problem("out", f"{table} exists", hint=hint)]
    return []


def _unfit_array(values: Mapping[str, Any]) -> list[Problem]:
    save, save_to = values.get("save"), values.get("save_to")
    if save_to is not None and save is None:
        hint = "add save=logits, probabilities or embeddings:MODULE"
        return [Problem("save_to", "there is nothing to save", hint)]
    table = Path(str(values.get("out") or TABLE))
    array = _array(save, save_to, table)
    if array is None:
        return []
    if array.suffix not in ARRAYS:
        return [Problem("save_to", f"{array} ends with none of {', '.join(ARRAYS)}")]
    if not array.parent.is_dir():
        return [Problem("save_to", f"{array}: there is no folder {array.parent}")]
    goes_on = values.get("resume") == "auto" and table.with_name(f"{table.name}.part").exists()
    if array.exists() and not values.get("overwrite") and not goes_on:
        return [Problem("save_to", f"{array} exists", hint="overwrite=true replaces it")]
    return []


def _array(save: str | None, save_to: str | None, table: Path) -> Path | None:
    if save is None:
        return None
    if save_to is not None:
        return Path(save_to)
    return table.with_name(f"{table.stem}.{save.partition(':')[0]}.npy")
