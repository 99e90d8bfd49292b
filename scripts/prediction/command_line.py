"""The command line of `predict`: its help, its own keys, and what overrides the run's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from conf.errors import ConfigError, Problem, raise_problems
from conf.schema_strategy import StrategyConfig
from scripts.cli.arguments import Arguments
from scripts.cli.keys import misspelt, own_keys
from scripts.prediction.options import KEYS, Options, take_options

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
  draw         true writes each picture with its label into a folder beside the table
  on_error     raise (default): a broken file ends it with exit 3; skip: its row has the reason
  resume       auto goes on after the last whole batch of a command that was interrupted
  overwrite    true replaces a table that exists

  A language model writes new text after each prompt:
  max_new_tokens  200
  sampling        greedy (default): the likeliest token. random: drawn from the top_k likeliest
                  (default: all), keyed by seed and prompt
  temperature     1.0, for sampling=random

  predict model=FILE.onnx source=... [out= top_k= on_error= overwrite= batch_size=]

answers with an exported file alone; torch need not be installed, only onnxruntime.

Further overrides change the run's configuration, e.g. loader.num_workers=2 loader.batch_size=64 or
strategy.name=ddp strategy.devices=2. Answers are the same for the same batch size.
"""


def take_apart(arguments: Arguments) -> tuple[Options, list[str]]:
    """Return the keys of `predict`, and the overrides of the run's configuration."""
    own, overrides = own_keys(arguments.overrides, (*KEYS, "data.on_error"))
    if (named := own.pop("data.on_error", None)) is not None:  # by the error of a broken file
        own["on_error"] = named
    raise_problems(misspelt(overrides, KEYS))
    options = take_options(own)
    _check_strategy(overrides)
    # However a run was trained (in shards, on many devices), it is asked on one; who wants more
    # says so.
    return options, [*_own_strategy(), *overrides]


def _check_strategy(overrides: Sequence[str]) -> None:
    """Refuse what would compute otherwise than on whole models. Raises ConfigError."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in ("strategy", "strategy.name") and value not in ("single", "ddp"):
            problem = (
                f"{value!r}: predict needs the whole model on each device (single, ddp); the "
                "checkpoint of a run of any strategy, sharded ones too, is put together for it"
            )
            hint = "leave it out, or strategy.name=ddp strategy.devices=N"
            raise ConfigError([Problem(key, problem, hint)])


def _own_strategy() -> list[str]:
    """Return the overrides that leave nothing of a run's strategy but the kind of its device."""
    defaults = asdict(StrategyConfig())
    del defaults["accelerator"]
    return [f"strategy.{key}={_spelled(value)}" for key, value in defaults.items()]


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
