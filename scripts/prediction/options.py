"""The keys of `predict` that are not the run's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, Problem
from scripts.cli.arguments import run_problems

TABLE = "predictions.csv"
FORMATS = (".csv", ".jsonl", ".parquet")
ARRAYS = (".npy", ".safetensors")
SPLITS = ("val", "test", "predict")
_WORDS = {"true": True, "false": False, "null": None}
_DEVICE = re.compile(r"(cpu|mps|cuda)(?::(\d+))?")


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


def take_options(overrides: Mapping[str, str]) -> Options:
    """Check the keys of `predict` as typed. Raises ConfigError with all mistakes at once."""
    values: dict[str, Any] = {k: _WORDS.get(v, v) for k, v in overrides.items()}
    problems = [*_missing(values), *_mistakes(values)]
    if problems:
        raise ConfigError(problems)
    kinds = {"top_k": int, "max_new_tokens": int, "temperature": float}
    typed = {key: kind(values[key]) for key, kind in kinds.items() if key in values}
    return Options(**values | typed)


def names() -> tuple[str, ...]:
    """Return the keys that are `predict`'s own."""
    return tuple(field.name for field in fields(Options))


def _missing(values: Mapping[str, Any]) -> list[Problem]:
    problems = run_problems(values.get("run"), "predict run=RUN_DIR source=DIR")
    if not values.get("source"):
        hint = "a folder, a file, a glob, - (file names on standard input), val or test"
        problems.append(Problem("source", "missing: what to predict", hint=hint))
    return problems


def _mistakes(values: Mapping[str, Any]) -> list[Problem]:
    problems = []
    one_of = {
        "on_error": ("raise", "skip"),
        "resume": ("auto", None),
        "draw": (True, False),
        "overwrite": (True, False),
        "sampling": ("greedy", "random"),
    }
    for key, allowed in one_of.items():
        if key in values and values[key] not in allowed:
            known = ", ".join(_spelled(value) for value in allowed)
            problems.append(Problem(key, f"is {values[key]!r}, not one of {known}"))
    problems += [
        Problem(key, f"is {values[key]!r}, not a number from 1 on")
        for key in ("top_k", "max_new_tokens")
        if not re.fullmatch(r"[1-9]\d{0,5}", str(values.get(key, 1)))
    ]
    problems += _unfit_sampling(values)
    if (device := values.get("device")) is not None and not _DEVICE.fullmatch(str(device)):
        problems.append(Problem("device", f"is {device!r}, not cpu, cuda, cuda:NUMBER or mps"))
    save = values.get("save")
    if save is not None and not re.fullmatch(r"logits|probabilities|embeddings:\S+", str(save)):
        known = "logits, probabilities or embeddings:MODULE"
        problems.append(Problem("save", f"is {save!r}, not {known}"))
    return problems + _unfit_table(values) + _unfit_array(values)


def _unfit_sampling(values: Mapping[str, Any]) -> list[Problem]:
    temperature = str(values.get("temperature", 1))
    number = re.fullmatch(r"\d{1,6}(\.\d{1,9})?", temperature)
    if number is None or float(temperature) <= 0:
        return [Problem("temperature", f"is {temperature!r}, not a number above 0")]
    if "temperature" in values and values.get("sampling") != "random":
        hint = "add sampling=random"
        return [Problem("temperature", "has no effect on the likeliest token", hint)]
    return []


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


def _spelled(value: Any) -> str:
    return next((word for word, meant in _WORDS.items() if meant is value), str(value))
