"""The command line of `predict`: its help, its own keys, and what overrides the run's."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from conf.errors import Problem, raise_problems
from conf.schema_trainer import StrategyConfig
from scripts.cli.arguments import Take, matching, one_of, or_null, take_keys, true_or_false, whole

HELP = """\
Answer for pictures, or for other samples, with a trained run.

  predict run=RUN_DIR source=DIR|FILE|GLOB|-|val|test|predict [key=value ...]

  source       a folder (all pictures below it), a file, a glob, - (file names on standard input),
               or a split of the run's configuration: val, test, predict (data.predict). Of a
               language model: a file with one prompt a line, or -
  out          predictions.csv; the suffix says which: .csv, .jsonl, .parquet
  checkpoint   best (default), last, or a path
  top_k        1; how many of the likeliest classes are written
  device       cpu, cuda, cuda:1, mps; default: what the machine has
  save         logits, probabilities or embeddings:MODULE, in one array of all samples
  save_to      its file, .npy or .safetensors; default: a .npy beside the table
  on_error     raise (default): a broken file ends it with exit 3; skip: its row has the reason
  overwrite    true replaces a table that exists

  A language model writes new text after each prompt:
  max_new_tokens  200
  sampling        greedy (default): the likeliest token. random: drawn from the top_k likeliest
                  (default: all), keyed by seed and prompt
  temperature     1.0, for sampling=random

Further overrides change the run's configuration, e.g. loader.num_workers=2 loader.batch_size=64 or
strategy.name=ddp strategy.devices=2. Answers are the same for the same batch size.
"""
FORMATS = (".csv", ".jsonl", ".parquet")
ARRAYS = (".npy", ".safetensors")
_DEVICE = r"(cpu|mps|cuda)(:\d+)?"
_SAVED = r"logits|probabilities|embeddings:\S+"
_ABOVE_ZERO = r"(?=.*[1-9])\d{1,6}(\.\d{1,9})?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a command line asks of `predict`; the rest are overrides of the run's configuration."""

    run: str
    source: str
    checkpoint: str = "best"
    out: str = "predictions.csv"
    top_k: int | None = None  # classes: 1; text: all tokens
    device: str | None = None
    save: str | None = None  # logits | probabilities | embeddings:MODULE
    save_to: str | None = None  # default: beside the table, .npy
    on_error: str = "raise"  # raise | skip
    overwrite: bool = False
    max_new_tokens: int | None = None  # of text, as are the two below
    sampling: str | None = None  # greedy | random
    temperature: float | None = None

    @property
    def table(self) -> Path:
        """The file that is written."""
        return Path(self.out)

    @property
    def saved(self) -> str:
        """What is saved, without the name of a module."""
        return (self.save or "").partition(":")[0]

    @property
    def array(self) -> Path | None:
        """The file of what is saved of each sample; None if nothing is."""
        beside = self.table.with_name(f"{self.table.stem}.{self.saved}.npy")
        return None if self.save is None else Path(self.save_to or beside)


def take_apart(overrides: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the keys of `predict`, and the overrides of the run's configuration.

    Raises ConfigError with all mistakes at once.
    """
    known: dict[str, Take] = dict.fromkeys((f.name for f in fields(Options)), str) | {
        "top_k": whole(),
        "device": or_null(matching(_DEVICE, "cpu, cuda, cuda:NUMBER or mps")),
        "save": or_null(matching(_SAVED, "logits, probabilities or embeddings:MODULE")),
        "on_error": one_of("raise", "skip"),
        "overwrite": true_or_false,
        "max_new_tokens": whole(),
        "sampling": one_of("greedy", "random"),
        "temperature": lambda t: float(matching(_ABOVE_ZERO, "a number above 0")(t)),
    }
    # data.on_error: as the error of a broken file calls it
    named = [text.replace("data.on_error=", "on_error=") for text in overrides]
    required = {
        "run": "predict run=RUN_DIR source=DIR",
        "source": "a folder, a file, a glob, - (file names on standard input), val or test",
    }
    values, others, problems = take_keys(named, known, required)
    options = Options(**{"run": "", "source": "", **values})
    raise_problems([*problems, *_unfit(options, others)])
    # However a run was trained (in shards, on many devices), it is asked on one; who wants more
    # says so. The kind of its device stays.
    defaults = {k: v for k, v in asdict(StrategyConfig()).items() if k != "accelerator"}
    spelled = {k: v if isinstance(v, str) else json.dumps(v) for k, v in defaults.items()}
    return options, [*(f"strategy.{key}={value}" for key, value in spelled.items()), *others]


def place_of(device: str | None) -> Mapping[str, Any]:
    """Return the keys of `strategy` that `device` stands for."""
    kind, _, number = (device or "").partition(":")
    devices: Any = [int(number)] if number else "auto"
    return {"accelerator": kind, "devices": devices} if kind else {}


def _unfit(options: Options, overrides: Sequence[str]) -> Iterator[Problem]:
    """Yield what is wrong with keys that need another, with files to write, and with processes."""
    if options.temperature is not None and options.sampling != "random":
        yield Problem("temperature", "has no effect on the likeliest token", "add sampling=random")
    if options.save_to is not None and options.save is None:
        hint = "add save=logits, probabilities or embeddings:MODULE"
        yield Problem("save_to", "there is nothing to save", hint)
    for key, path, suffixes in (
        ("out", options.table, FORMATS),
        ("save_to", options.array, ARRAYS),
    ):
        if path is None:
            continue
        if path.suffix not in suffixes:
            yield Problem(key, f"{path} ends with none of {', '.join(suffixes)}")
        elif not path.parent.is_dir():
            yield Problem(key, f"{path}: there is no folder {path.parent}")
        elif path.exists() and not options.overwrite:
            yield Problem(key, f"{path} exists", "overwrite=true replaces it")
    if options.table.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        hint = "install the extra: pip install -e '.[parquet]', or write .csv or .jsonl"
        yield Problem("out", "a .parquet table needs pyarrow", hint)
    for key, _, value in (override.lstrip("+").partition("=") for override in overrides):
        if key in ("strategy", "strategy.name") and value not in ("single", "ddp"):
            problem = (
                f"{value!r}: predict needs the whole model on each device (single, ddp); the "
                "checkpoint of a run of any strategy, sharded ones too, is put together for it"
            )
            yield Problem(key, problem, "leave it out, or strategy.name=ddp strategy.devices=N")
