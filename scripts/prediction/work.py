"""One process's part of `predict`: the loader, the model, and the files of the main process."""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from conf.check import parse
from conf.errors import ConfigError, Problem, raise_problems
from conf.schema import Config
from data.errors import DataError
from data.formats.table import Table, read_columns
from data.image_folder import find_pictures
from data.loading.fetch import path_of
from data.text import Prompts, find_prompts
from scripts.cli.arguments import Request
from scripts.prediction.options import Options
from trainer.assembly.check import check_targets
from trainer.assembly.data import build_data, build_pipeline
from trainer.assembly.experiment import eval_loader
from trainer.assembly.parts import build_strategy
from trainer.checkpoints.archive import write_safetensors
from trainer.files.atomic import replacing, storage_error, write_json
from trainer.files.layout import on_one_line
from trainer.inference.facts import InferenceFacts, read_facts
from trainer.inference.predictor import OUTPUT, Generation, Predictor, Row, Rows
from trainer.inference.run import (
    as_trained,
    find_checkpoint,
    load_trainer,
    origin_of,
    pictures_for,
    prompts_for,
)
from trainer.targets.allow_list import allow

_SPLITS = ("val", "test", "predict")


def answer(request: Request) -> int:
    """Answer for every sample of the source; the main process writes."""
    assert request.prediction is not None
    options = Options(**request.prediction)
    allow(request.allowed)
    config = parse(request.config)
    on_error: Any = options.on_error  # checked by `take_apart`; as many may be broken as there are
    config = replace(config, data=replace(config.data, on_error=on_error, max_skipped=1 << 62))
    check_targets(config)
    run_dir = Path(options.run)
    facts = read_facts(run_dir)
    dataset = _dataset(options, config, facts, request.files)
    generation = _generation(options, config, dataset)
    strategy = build_strategy(config)
    strategy.setup()
    try:
        with strategy.group.failing_together():
            trainer = load_trainer(run_dir, config, facts.num_classes, strategy, options.checkpoint)
            loader = eval_loader(config, dataset, strategy)
            found = Findings(options, facts, dataset)
            for answers in Predictor(trainer, options.save, generation)(loader):
                if trainer.is_main:
                    found.add(answers)
            if trainer.is_main:
                origin = asdict(options) | asdict(facts)
                origin |= origin_of(run_dir, trainer, options.checkpoint)
                origin |= {"samples": len(dataset), "batch_size": loader.sampler.batch_size}
                found.write(origin | {"generation": generation and asdict(generation)})
                print(found.told())
            loader.close()
    finally:
        strategy.group.leave()
    return 0


def _dataset(options: Options, config: Config, facts: InferenceFacts, lines: list[str]) -> Any:
    source, form = options.source, facts.inputs
    if source not in _SPLITS:
        if "text" in (form["kind"], facts.outputs["kind"]):
            return prompts_for(facts, config, *find_prompts(source, lines))
        if form["kind"] == "table":
            pipeline = build_pipeline(config, "eval")
            return Table(read_columns(source), form["features"], form["missing"], pipeline)
        return pictures_for(facts, config, find_pictures(source, lines))
    if facts.outputs["kind"] == "text" and options.save is None:
        hint = "save=logits writes its answers into a file"
        raise ConfigError(Problem("source", "these samples are no prompts", hint))
    if getattr(config.data, source) is None:
        hint = "data.predict names samples without labels; source=DIR reads pictures"
        raise ConfigError(Problem(f"data.{source}", "is null: no samples", hint))
    config = as_trained(config, find_checkpoint(Path(options.run), options.checkpoint))
    return build_data(config, (source,)).sets[source]


def _generation(options: Options, config: Config, dataset: Any) -> Generation | None:
    """Return how prompts are continued; None where the samples are no prompts."""
    keys = ("max_new_tokens", "sampling", "temperature")
    given: dict[str, Any] = {k: v for k in keys if (v := getattr(options, k)) is not None}
    if not isinstance(dataset, Prompts):
        raise_problems(Problem(key, "only prompts of a language model take it") for key in given)
        return None
    problems = []
    if options.save is not None:
        hint = "source=val saves the logits of the run's own data"
        problems.append(Problem("save", "there is nothing to save of new text", hint))
    if options.top_k is not None and options.sampling != "random":
        hint = "add sampling=random"
        problems.append(Problem("top_k", "has no effect on the likeliest token", hint))
    raise_problems(problems)
    return Generation(**given, top_k=options.top_k, seed=config.seed)


class Findings:
    """The rows of all samples, and the values to save, on their way to their files.

    Masks are written as they come: PNG files with a palette, in a folder beside the table.
    """

    def __init__(self, options: Options, facts: InferenceFacts, dataset: Any) -> None:
        self._options = options
        self._samples = len(dataset)
        self._masks = options.table.with_name(f"{options.table.stem}_masks")
        prompts = dataset.texts if isinstance(dataset, Prompts) else None
        name_of = lambda index: path_of(dataset, index) or str(index)  # noqa: E731
        self._rows_of = Rows(facts, options.top_k or 1, name_of, self._mask, prompts)
        self.rows: list[Row] = []
        self._arrays: dict[str, Any] = {}  # by the name of an output, a row for each sample

    def add(self, answers: Any) -> None:
        """Take the answers for a batch."""
        self.rows += self._rows_of(answers)
        for name, values in answers.kept.items() if answers.indices else ():
            tensor = values.float() if values.dtype == torch.bfloat16 else values
            rows = tensor.numpy()
            if name not in self._arrays:  # a sample that cannot be read stays NaN, or 0
                lost = np.nan if np.issubdtype(rows.dtype, np.floating) else 0
                self._arrays[name] = np.full((self._samples, *rows.shape[1:]), lost, rows.dtype)
            self._arrays[name][list(answers.indices)] = rows

    def write(self, origin: Mapping[str, Any]) -> None:
        """Write the arrays, then the table, and beside it where both come from (I7)."""
        path = self._options.table
        if (array := self._options.array) is not None:
            self._write_arrays(array, origin)
        columns = dict.fromkeys(name for row in self.rows for name in row)
        if "error" in columns:  # comes last
            columns["error"] = columns.pop("error")
        with replacing(path) as file:
            _WRITERS[path.suffix](file, list(columns), self.rows)
        write_json(path.with_name(f"{path.name}.meta.json"), origin)

    def told(self) -> str:
        """Return how many rows there are, and where. Raises DataError if all files were broken."""
        where, broken = on_one_line(self._options.table), sum("error" in row for row in self.rows)
        if broken and broken == len(self.rows):
            raise DataError(f"none of {broken} samples could be read: {where} has the reasons")
        of_them = f", {broken} of them broken" if broken else ""
        return f"{len(self.rows)} samples{of_them}, written to {where}"

    def _write_arrays(self, path: Path, origin: Mapping[str, Any]) -> None:
        if path.suffix == ".safetensors":
            named = {self._options.saved if n == OUTPUT else n: v for n, v in self._arrays.items()}
            tensors = {name: torch.from_numpy(values) for name, values in named.items()}
            write_safetensors(path, tensors, {"regimen": json.dumps(origin)})
            return
        for name, values in self._arrays.items():
            own = path if name == OUTPUT else path.with_suffix(f".{name}.npy")
            with replacing(own) as file:
                np.save(file, values)

    def _mask(self, index: int, mask: Tensor) -> str:
        path = self._masks / f"{index:06d}.png"
        try:
            path.parent.mkdir(exist_ok=True)
            mask_picture(mask).save(path)
        except OSError as error:
            raise storage_error(path, error) from error
        return str(path)


def mask_picture(mask: Tensor) -> Image.Image:
    """Return a mask [H, W] of class numbers as a picture, with a palette of 256 colours.

    They differ well: the bits of a number, spread over red, green and blue.
    """
    colours = []
    for number, shift in product(range(256), range(3)):
        bits = [(number >> (3 * place + shift)) & 1 for place in range(3)]
        colours.append(sum(bit << (7 - place) for place, bit in enumerate(bits)))
    picture = Image.fromarray(mask.to(torch.uint8).numpy(), mode="P")
    picture.putpalette(colours)
    return picture


def _write_csv(file: IO[bytes], columns: Sequence[str], rows: Sequence[Row]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(name, "")) for name in columns] for row in rows)
    text.flush()
    text.detach()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return ";".join(str(_cell(part)) for part in value)
    return f"{value:.9g}" if isinstance(value, float) else value  # all digits of a float32


def _write_jsonl(file: IO[bytes], columns: Sequence[str], rows: Sequence[Row]) -> None:
    file.writelines(json.dumps(row).encode() + b"\n" for row in rows)


def _write_parquet(file: IO[bytes], columns: Sequence[str], rows: Sequence[Row]) -> None:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    table = arrow.table({name: [row.get(name) for row in rows] for name in columns})
    parquet.write_table(table, file)


_WRITERS = {".csv": _write_csv, ".jsonl": _write_jsonl, ".parquet": _write_parquet}
