"""One process's part of `predict`: the loader, the model, and the files of the main process."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError, Problem, one_line, raise_problems
from regimen.conf.schema import Config
from regimen.data.errors import DataError
from regimen.data.formats.table import Dialect, Table, read_columns
from regimen.data.image_folder import find_pictures
from regimen.data.loading.fetch import path_of
from regimen.data.text import Prompts, find_prompts
from regimen.scripts.cli.arguments import Request
from regimen.scripts.cli.keys import Prediction
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.assembly.data import build_data, build_pipeline, nodes_of
from regimen.trainer.assembly.experiment import eval_loader
from regimen.trainer.assembly.parts import build_strategy
from regimen.trainer.checkpoints.archive import write_safetensors
from regimen.trainer.files.atomic import as_json, replacing, storing, write_json
from regimen.trainer.files.layout import as_bytes, as_csv, encodable
from regimen.trainer.inference.predictor import (
    OUTPUT,
    Answers,
    Generation,
    InferenceMetadata,
    Predictor,
    Row,
    Rows,
    read_facts,
)
from regimen.trainer.inference.run import (
    as_trained,
    find_checkpoint,
    load_trainer,
    origin_of,
    pictures_for,
    prompts_for,
)


def answer(request: Request) -> int:
    """Answer for every sample of the source; the main process writes."""
    keys = Prediction(**(request.prediction or {}))
    config = parse(request.config)
    # As many samples may be broken as there are.
    config = replace(config, data=replace(config.data, on_error=keys.on_error, max_skipped=1 << 62))
    check_targets(config)
    run_dir = Path(keys.run)
    facts = read_facts(run_dir)
    dataset = _dataset(keys, config, facts, request.files)
    generation = _generation(keys, config, dataset)
    strategy = build_strategy(config)
    strategy.setup()
    try:
        with strategy.group.propagate_errors():
            trainer = load_trainer(run_dir, config, facts.num_classes, strategy, keys.checkpoint)
            loader = eval_loader(config, dataset, strategy)
            found = Findings(keys, facts, dataset)
            for answers in Predictor(trainer, keys.save, generation)(loader):
                if trainer.is_main:
                    found.add(answers)
            if trainer.is_main:
                origin = asdict(keys) | facts._asdict()
                origin |= origin_of(run_dir, trainer, keys.checkpoint)
                origin |= {"samples": len(dataset), "batch_size": loader.sampler.batch_size}
                found.write(origin | {"generation": generation and generation._asdict()})
                print(found.told())
            loader.close()
    finally:
        strategy.group.leave()
    return 0


def _dataset(keys: Prediction, config: Config, facts: InferenceMetadata, lines: list[str]) -> Any:
    source, form, text = keys.source, facts.inputs, facts.outputs["kind"] == "text"
    splits = *config.data.validations, *config.data.tests
    if source not in ("val", "test", "predict", *splits):
        if text or form["kind"] == "text":
            return prompts_for(facts, config, *find_prompts(source, lines))
        if form["kind"] == "table":
            pipeline = build_pipeline(config, "eval")
            columns = read_columns(source, Dialect(**form.get("dialect", {})))
            return Table(columns, form["features"], form["missing"], pipeline)
        return pictures_for(facts, config, find_pictures(source, lines))
    if text and keys.save is None:
        hint = "save=logits writes its answers into a file"
        raise ConfigError("source", "these samples are no prompts", hint)
    if nodes_of(config, [source])[source] is None:
        hint = "data.predict names samples without labels; source=DIR reads pictures"
        raise ConfigError(f"data.{source}", "is null: no samples", hint)
    config = as_trained(config, find_checkpoint(Path(keys.run), keys.checkpoint))
    return build_data(config, (source,), facts.classes).sets[source]


def _generation(keys: Prediction, config: Config, dataset: Any) -> Generation | None:
    """Return how prompts are continued; None where the samples are no prompts."""
    names = ("max_new_tokens", "sampling", "temperature")
    given = {k: v for k in names if (v := getattr(keys, k)) is not None}
    if not isinstance(dataset, Prompts):
        raise_problems(Problem(key, "only prompts of a language model take it") for key in given)
        return None
    if keys.save is not None:
        hint = "source=val saves the logits of the run's own data"
        raise ConfigError("save", "there is nothing to save of new text", hint)
    if keys.top_k is not None and keys.sampling != "random":
        raise ConfigError("top_k", "has no effect on the likeliest token", "add sampling=random")
    return Generation(**given, top_k=keys.top_k, seed=config.seed)


class Findings:
    """The rows of all samples, and the values to save, on their way to their files.

    Masks are written as they come: PNG files with a palette, in a folder beside the table.
    """

    def __init__(self, keys: Prediction, facts: InferenceMetadata, dataset: Any) -> None:
        self._keys, self._dataset, self._table = keys, dataset, Path(keys.out)
        prompts = dataset.texts if isinstance(dataset, Prompts) else None
        self._rows_of = Rows(facts, keys.top_k or 1, self._mask, prompts)
        self.rows = list[Row]()
        self._arrays = dict[str, Any]()  # by the name of an output, a row for each sample

    def add(self, answers: Answers) -> None:
        """Take the answers for a batch, broken samples among them."""
        found = {index: {"error": why} for index, why in answers.broken.items()}
        found |= dict(zip(answers.indices, self._rows_of(answers), strict=True))
        for index in sorted(found):
            self.rows.append({"file": path_of(self._dataset, index) or str(index), **found[index]})
        for name, values in answers.kept.items() if answers.indices else ():
            rows = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
            if name not in self._arrays:  # a sample that cannot be read stays NaN, or 0
                lost = np.nan if np.issubdtype(rows.dtype, np.floating) else 0
                shape = (len(self._dataset), *rows.shape[1:])
                self._arrays[name] = np.full(shape, lost, rows.dtype)
            self._arrays[name][list(answers.indices)] = rows

    def write(self, origin: Mapping[str, Any]) -> None:
        """Write the arrays, then the table, and beside it where both come from (I7)."""
        path = self._keys.array
        if path is not None and path.suffix == ".safetensors":
            named = {self._keys.saved if n == OUTPUT else n: v for n, v in self._arrays.items()}
            tensors = {name: torch.from_numpy(values) for name, values in named.items()}
            write_safetensors(path, tensors, {"regimen": json.dumps(origin)})
        elif path is not None:
            for name, values in self._arrays.items():
                own = path if name == OUTPUT else path.with_suffix(f".{_in_a_file_name(name)}.npy")
                with replacing(own) as file:
                    np.save(file, values)
        columns = dict.fromkeys(name for row in self.rows for name in row)
        if "error" in columns:  # comes last
            columns["error"] = columns.pop("error")
        with replacing(self._table) as file:
            _write_table(file, self._table.suffix, list(columns), self.rows)
        write_json(self._table.with_name(f"{self._table.name}.meta.json"), origin)

    def told(self) -> str:
        """Return how many rows there are, and where. Raises DataError if all files were broken."""
        where, broken = one_line(self._table), sum("error" in row for row in self.rows)
        if broken and broken == len(self.rows):
            raise DataError(f"none of {broken} samples could be read: {where} has the reasons")
        of_them = f", {broken} of them broken" if broken else ""
        return f"{len(self.rows)} samples{of_them}, written to {where}"

    def _mask(self, index: int, mask: Tensor) -> str:
        path = self._table.with_name(f"{self._table.stem}_masks") / f"{index:06d}.png"
        with storing(path):
            path.parent.mkdir(exist_ok=True)
            mask_picture(mask).save(path)
        return str(path)


def _in_a_file_name(name: str) -> str:
    """Return the name of an output, which may be any text, as a part of a file's name."""
    return re.sub(r"[%/\\\0]", lambda found: f"%{ord(found[0]):02X}", encodable(name))


def mask_picture(mask: Tensor) -> Image.Image:
    """Return a mask [H, W] of class numbers as a picture, with a palette of 256 colours.

    They differ well: the bits of a number, spread over red, green and blue.
    """
    colours = []
    for number, shift in product(range(256), range(3)):
        bits = ((number >> (3 * place + shift) & 1) << (7 - place) for place in range(3))
        colours.append(sum(bits))
    picture = Image.fromarray(mask.to(torch.uint8).numpy(), mode="P")
    picture.putpalette(colours)
    return picture


def _write_table(file: BinaryIO, suffix: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    if suffix == ".jsonl":
        file.writelines(as_json(row).encode() + b"\n" for row in rows)
    elif suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table(
            {encodable(name): [_sound(row.get(name)) for row in rows] for name in columns}
        )
        parquet.write_table(table, file)
    else:
        cells = ([_cell(row.get(name, "")) for name in columns] for row in rows)
        file.write(as_bytes(as_csv([columns, *cells])))


def _sound(value: Any) -> Any:
    """Return a value of a row whose texts every reader of a table takes."""
    if isinstance(value, list):
        return [_sound(part) for part in value]
    return encodable(value) if isinstance(value, str) else value


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return ";".join(str(_cell(part)) for part in value)
    return f"{value:.9g}" if isinstance(value, float) else value  # all digits of a float32
