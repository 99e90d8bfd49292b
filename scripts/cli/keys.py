# ruff: noqa: RUF009 -- `option` returns a dataclasses.field, which is what belongs there
"""The keys of the commands that use a finished run.

Each command is a class. Its docstring and the meanings of its keys are the help; types and limits
are checked like those of a configuration; the command is given an object of it.
"""

import importlib.util
import json
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from regimen.conf.check import describe_type, parsed
from regimen.conf.errors import ConfigError, Problem, nearest
from regimen.conf.fields import REQUIRED, Check, count, declared, members, natural, option, positive
from regimen.conf.interpolation import followers
from regimen.conf.schema import Config
from regimen.conf.yaml_file import format_scalar, plain_values
from regimen.scripts.cli.arguments import AnsweredError, Arguments, parse_arguments
from regimen.scripts.cli.console import importing, print_banner
from regimen.trainer.runs.directory import refuse_links

Format = Literal[
    "onnx", "torch_export", "torchscript", "aoti", "safetensors", "huggingface", "peft"
]
# Keys of a run that say where weights are which its checkpoints borrow: all commands take them.
WEIGHTS = ("model.name", "model.weights")
_DEVICE = r"[a-z]+(:\d+)?"
_SAVED = r"logits|probabilities|embeddings:\S+"
_KINDS = "logits, probabilities or embeddings:MODULE"
_SPLIT = "test, or val where the data have no test split; of several test/NAME, val/NAME"


def _matching(pattern: str, expected: str) -> Check:
    """Return a check that describes what is expected of a text that does not match."""
    return lambda text: None if re.fullmatch(pattern, text) else expected


_split_check = _matching(r"(test|val)(/.+)?", "test, val, or one of several: test/NAME, val/NAME")


def _run_check(folder: str) -> str | None:
    if (Path(folder) / "config.yaml").is_file():
        return None
    return "the directory of a run, which holds a config.yaml"


@dataclass(kw_only=True, slots=True)
class RunOptions:
    """The keys that every such command has."""

    overrides: ClassVar[bool] = False  # whether further keys change the run's configuration
    run: str = option(REQUIRED, "RUN_DIR, the directory of a finished run", check=_run_check)
    checkpoint: str = option("best", "best, last, or a path")


@dataclass(kw_only=True, slots=True)
class Evaluation(RunOptions):
    """Test a run's checkpoint again, and write evaluation.json into its directory.

      evaluate run=RUN_DIR [checkpoint=best|last|PATH] [split=test|val] [key=value ...]
      evaluate run=RUN_DIR artefact=FILE [split=test|val] [allow_code=true]

    Further overrides change the run's configuration, e.g. loader.num_workers=2 or
    data.test.root=DIR. It is stored resolved: data.root alone feeds nothing, and is refused.
    However the run was trained, one process tests it; strategy=ddp strategy.devices=2 starts two.
    """

    overrides = True
    split: str | None = option(None, _SPLIT, check=_split_check)
    artefact: str | None = option(None, "a file of regimen export or quantize, tested instead")
    allow_code: bool = option(False, "load formats that run code: torch_export, torchscript, aoti")

    def conflicts(self) -> Iterator[Problem]:
        """Yield a problem if two things are to be tested."""
        if self.artefact and self.checkpoint != "best":
            yield Problem("artefact", "a file is tested, or a checkpoint: leave one of both out")


@dataclass(kw_only=True, slots=True)
class Prediction(RunOptions):
    """Answer for pictures, or for other samples, with a trained run.

      predict run=RUN_DIR source=DIR|FILE|GLOB|-|val|test|predict [key=value ...]

    Further overrides change the run's configuration, e.g. loader.num_workers=2 loader.batch_size=64
    or strategy.name=ddp strategy.devices=2. Answers are the same for the same batch size.
    """

    overrides = True
    source: str = option(
        REQUIRED,
        "a folder (pictures below it), a file, a glob, - (names on standard input), or val, test, "
        "predict of the run's data; of a language model a file with one prompt a line, or -",
    )
    out: str = option(
        "predictions.csv",
        "the suffix says which: .csv, .jsonl, .parquet; of a detector also .json, COCO's results",
    )
    top_k: int | None = count(None, "the likeliest classes that are written, 1")
    device: str | None = option(
        None,
        "null: what the machine has",
        check=_matching(_DEVICE, "cpu, or KIND or KIND:NUMBER of an accelerator, such as cuda:1"),
    )
    save: str | None = option(
        None, f"{_KINDS}, in one array of all samples", check=_matching(_SAVED, _KINDS)
    )
    save_to: str | None = option(None, "its file, .npy or .safetensors; null: beside the table")
    on_error: Literal["raise", "skip"] = option(
        "raise", "a broken file ends it with exit 3, or its row has the reason"
    )
    overwrite: bool = option(False, "replace a table that exists")
    max_new_tokens: int | None = count(None, "of a language model, after a prompt: 200")
    sampling: Literal["greedy", "random"] | None = option(
        None, "greedy: the likeliest token; random: of the top_k likeliest, by seed and prompt"
    )
    temperature: float | None = positive(None, "1.0, for sampling=random")
    score_threshold: float | None = option(
        None,
        "of a detector: boxes with a lower score are left out; null: those that the model gives",
        limits={">=": 0, "<=": 1},
    )
    draw: str | None = option(None, "of a detector: a new folder for the pictures with their boxes")

    @property
    def saved(self) -> str:
        """What is saved, without the name of a module."""
        return (self.save or "").partition(":")[0]

    @property
    def array(self) -> Path | None:
        """The file of the values that are saved of each sample; None if none are."""
        if not self.save:
            return None
        return Path(self.save_to or Path(self.out).with_suffix(f".{self.saved}.npy"))

    def conflicts(self) -> Iterator[Problem]:
        """Yield problems with keys that need another key, and with the files to write."""
        if self.temperature is not None and self.sampling != "random":
            yield Problem(
                "temperature", "has no effect on the likeliest token", "add sampling=random"
            )
        if self.save_to is not None and self.save is None:
            yield Problem("save_to", "there is nothing to save", f"add save={_KINDS}")
        yield from self._file_problems(
            "out", Path(self.out), (".csv", ".jsonl", ".parquet", ".json")
        )
        if self.draw is not None:
            yield from self._folder_problems(Path(self.draw))
        if self.array is not None:
            yield from self._file_problems("save_to", self.array, (".npy", ".safetensors"))
        if self.out.endswith(".parquet") and importlib.util.find_spec("pyarrow") is None:
            yield Problem(
                "out",
                "a .parquet table needs pyarrow",
                "install the extra: pip install 'torch-regimen[parquet]', or write .csv or .jsonl",
            )

    def _folder_problems(self, path: Path) -> Iterator[Problem]:
        if not path.parent.is_dir():
            yield Problem("draw", f"{path}: there is no folder {path.parent}")
        elif path.exists() and not path.is_dir():
            yield Problem("draw", f"{path} is no folder")
        elif path.exists() and any(path.iterdir()) and not self.overwrite:
            yield Problem("draw", f"{path} is not empty", "overwrite=true writes into it")

    def _file_problems(self, key: str, path: Path, suffixes: Sequence[str]) -> Iterator[Problem]:
        if path.suffix not in suffixes:
            yield Problem(key, f"{path} ends with none of {', '.join(suffixes)}")
        elif not path.parent.is_dir():
            yield Problem(key, f"{path}: there is no folder {path.parent}")
        elif path.exists() and not self.overwrite:
            yield Problem(key, f"{path} exists", "overwrite=true replaces it")


@dataclass(kw_only=True, slots=True)
class OutputOptions(RunOptions):
    """The keys of the commands that write a model."""

    out: str | None = option(None, "a folder, for card.md and all; null: below RUN_DIR/exports")
    preprocessing: Literal["outside", "inside"] = option(
        "outside", "outside: floats in, logits out; inside: bytes in, probabilities out"
    )
    overwrite: bool = option(False, "replace a folder that exists")


@dataclass(kw_only=True, slots=True)
class Export(OutputOptions):
    """Write a trained model as a file that other programs load, verified before it has its name.

    regimen export run=RUN_DIR format=onnx|torch_export|torchscript|aoti [key=value ...]
    regimen export run=RUN_DIR format=safetensors|huggingface|peft [key=value ...]

    model.name=DIR says where the weights are now that the run's checkpoints borrow.
    """

    format: Format = option(
        REQUIRED,
        "what is written: a graph, weights, a folder of transformers (adapters merged), or the "
        "adapters alone for peft",
    )


@dataclass(kw_only=True, slots=True)
class Quantization(OutputOptions):
    """Write a trained model with 8-bit integers as ONNX: smaller, and faster on a CPU.

    It is compared with the model before it has its name; what it gains and loses is printed.

      regimen quantize run=RUN_DIR [method=auto|static|dynamic] [key=value ...]
    """

    method: Literal["auto", "static", "dynamic"] = option(
        "auto",
        "static: weights and activations; dynamic: weights of matrix products, for transformers; "
        "auto: static where most weights are of convolutions",
    )
    samples: int = count(512, "that ranges are taken from, unless qat has learnt them")
    max_drop: float = natural(0.01, "more accuracy lost is an error, nothing written")
    split: str | None = option(None, f"where it is measured: {_SPLIT}", check=_split_check)


@dataclass(kw_only=True, slots=True)
class Demo(RunOptions):
    """Show a trained model on a page (of gradio), which names its own JSON address.

    One drops a picture, or types a row of a table, a prompt or numbers, and it answers beside it.

      regimen demo run=RUN_DIR [key=value ...]
    """

    port: int = option(8000, "0 takes one that is free", limits={">=": 0, "<=": 65535})
    host: str = option("127.0.0.1", "any other, such as 0.0.0.0, asks for a printed password")
    top_k: int = count(5, "how many of the likeliest classes are shown")
    device: str = option("auto", "where it is computed: cpu, or a kind of accelerator")

    def conflicts(self) -> Iterator[Problem]:
        """Yield a problem if the extra is not installed."""
        if importlib.util.find_spec("gradio") is None:
            yield Problem("", "demo needs gradio", "pip install 'torch-regimen[demo]'")


T = TypeVar("T", bound=RunOptions)


def read_keys(command: type[T], argv: Sequence[str]) -> tuple[T, Arguments]:
    """Return a command's keys, and the arguments that compose the run's configuration.

    Prints the banner once the line is parsed. Raises ConfigError with all mistakes, AnsweredError
    after the help was requested and printed.
    """
    arguments = parse_arguments(argv)
    if arguments.help:
        print(help_of(command))
        raise AnsweredError
    print_banner()
    known = declared(command)
    roots = declared(Config)
    raw = {}
    others = []
    for override in arguments.overrides:
        # The configuration of a run has no groups to choose in.
        override = re.sub(r"^\+*strategy=(\w+)$", r"strategy.name=\1", override)
        key, equals, text = override.partition("=")
        is_place = bool(equals) and key in WEIGHTS
        is_of_config = key.lstrip("+~").partition(".")[0] in roots
        is_of_run = is_of_config or nearest(key, [*known, *roots]) not in known
        if equals and key in known:
            raw[key] = _value(text, members(known[key].type))
        elif is_place or (command.overrides and is_of_run):
            others.append(override)
        else:
            raw[key] = text  # an unknown key, which `parsed` refuses
    keys = parsed(raw, command)
    refuse_links(Path(keys.run), "run")
    if command.overrides:
        others = [*_following(others, Path(keys.run, "config.yaml")), *others]
    composing = Arguments(
        tuple(others),
        config_name="config",
        config_dirs=(keys.run,),
        allow_targets=arguments.allow_targets,
        allow_remote_code=arguments.allow_remote_code,
    )
    return keys, composing


def moved_weights(overrides: Sequence[str]) -> dict[str, str]:
    """Return where weights are now, by the key that says so: of `model.name=DIR`.

    Raises ConfigError.
    """
    places = {}
    for override in overrides:
        key, _, place = override.partition("=")
        if key not in WEIGHTS or not place:
            raise ConfigError(
                "", f"{override!r} does not say where weights are", "model.name=DIR does"
            )
        places[key] = place
    return places


def loaded_run(keys: RunOptions, device: str, arguments: Arguments) -> Any:
    """Load the run of a command on a device; imports torch."""
    with importing():
        from regimen.trainer.inference.run import load_run

    return load_run(
        keys.run,
        device,
        allow_targets=arguments.allow_targets,
        moved=moved_weights(arguments.overrides),
        allow_remote_code=arguments.allow_remote_code,
    )


def _following(overrides: Sequence[str], config: Path) -> list[str]:
    """Return overrides of the data for those that say where weights are now.

    The configuration of a run is stored resolved: the tokenizer would be looked for where it was.
    """
    found = []
    for override in overrides:
        key, _, text = override.partition("=")
        if key in WEIGHTS:
            with suppress(OSError, ConfigError, ValueError):  # reported where it is composed
                values = plain_values(config.read_text(encoding="utf-8"), str(config))
                found += [f"{name}={text}" for name in followers(values, key)]
    return found


def _value(text: str, kinds: Collection[Any]) -> Any:
    """Parse the value of a key by the types that it may have; a wrong one stays a text."""
    if text == "null" and type(None) in kinds:
        return None
    if {int, float, bool}.isdisjoint(kinds):
        return text
    with suppress(ValueError):
        return json.loads(text)
    return text


def help_of(command: type[RunOptions]) -> str:
    """Return a command's docstring and its keys: defaults, meanings, types."""
    lines = [str(getdoc(command)), ""]
    for name, key in declared(command).items():
        default = "" if key.default is REQUIRED else format_scalar(key.default)
        lines.append(
            textwrap.fill(
                f"{f'{name}={default}':<24} {key.doc} ({describe_type(key)})",
                98,
                initial_indent="  ",
                subsequent_indent=" " * 27,
            )
        )
    return "\n".join(lines)
