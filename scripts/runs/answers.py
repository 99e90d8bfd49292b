"""One process's part of `predict`: the loader, the model, and the files of the main process."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from regimen.callbacks.pictures.boxes import side_by_side, with_boxes
from regimen.conf.check import parse
from regimen.conf.errors import ConfigError, Problem, one_line, raise_problems
from regimen.conf.interpolation import mapped
from regimen.conf.schema import Config
from regimen.data.errors import DataError
from regimen.data.formats.chat import Encoder
from regimen.data.formats.detection_folder import DetectionFolder
from regimen.data.formats.new_texts import find_texts
from regimen.data.formats.questions import ANSWER, QuestionFile
from regimen.data.formats.table import Dialect, Table, read_columns
from regimen.data.image_folder import find_pictures
from regimen.data.loading.fetch import path_of
from regimen.data.text import Prompts, find_prompts
from regimen.scripts.cli.arguments import RunRequest
from regimen.scripts.cli.keys import Prediction
from regimen.trainer.assembly.data import build_data, build_pipeline, nodes_of
from regimen.trainer.assembly.loaders import eval_loader
from regimen.trainer.assembly.parts import build_strategy
from regimen.trainer.checkpoints.archive import write_safetensors
from regimen.trainer.files.atomic import as_json, replacing, storing, write_json, write_text
from regimen.trainer.files.layout import as_bytes, as_csv, encodable
from regimen.trainer.inference.predictor import (
    OUTPUT,
    Answers,
    Generation,
    InferenceMetadata,
    Predictor,
    Row,
    Rows,
    read_inference_metadata,
)
from regimen.trainer.inference.run import (
    as_trained,
    checked_config,
    find_checkpoint,
    load_components,
    origin_of,
    pictures_for,
    prompts_for,
)
from regimen.trainer.strategies.strategy import taking_part


def answer(request: RunRequest) -> int:
    """Predict every sample of the source; the main process writes the files."""
    keys = Prediction(**(request.prediction or {}))
    config = parse(request.config)
    # Any number of samples may be broken: training's limit does not apply.
    config = replace(config, data=replace(config.data, on_error=keys.on_error, max_skipped=1 << 62))
    run_dir = Path(keys.run)
    config = checked_config(config, run_dir, keys.checkpoint)
    facts = read_inference_metadata(run_dir)
    _check_boxes(keys, facts)
    dataset = _dataset(keys, config, facts, request.files)
    if keys.draw is not None:
        _check_drawable(Path(keys.draw), dataset)
    generation = _generation(keys, config, dataset)
    if isinstance(dataset, QuestionFile):
        config = _answering(keys, config)
    strategy = build_strategy(config)
    with taking_part(strategy):
        classes = facts.num_classes
        components = load_components(run_dir, config, classes, strategy, keys.checkpoint)
        loader = eval_loader(config, dataset, strategy)
        is_labelled = keys.source in (*config.data.validations, *config.data.tests)
        has_truth = is_labelled and isinstance(dataset, DetectionFolder)
        writer = PredictionWriter(keys, facts, dataset, components.task, has_truth)
        for answers in Predictor(components, keys.save, generation)(loader):
            if components.is_main:
                writer.add(answers)
        if components.is_main:
            origin = asdict(keys) | facts._asdict()
            origin |= origin_of(run_dir, components, keys.checkpoint)
            origin |= {"samples": len(dataset), "batch_size": loader.sampler.batch_size}
            origin |= {"generation": generation and generation._asdict()}
            writer.write(origin)
            print(writer.summary())
        loader.close()
    return 0


def _dataset(keys: Prediction, config: Config, facts: InferenceMetadata, lines: list[str]) -> Any:
    """Return the samples of `source`: files, or a split of the run's own data.

    `lines`: file names, or prompts, from standard input.
    """
    source = keys.source
    answers_text = facts.outputs["kind"] == "text"
    own_splits = *config.data.validations, *config.data.tests
    if source not in ("val", "test", "predict", *own_splits):
        form = dict(facts.inputs)
        given = (config.data.train or {}).get("tokenizer")
        if "tokenizer" in form and given is not None:
            form["tokenizer"] = given  # where it is by now, which may not be where training was
        if form["kind"] == "conversation":
            return _questions(keys, form)
        if answers_text or form["kind"] == "text":
            return prompts_for(facts, config, *find_prompts(source, lines))
        if form["kind"] in ("texts", "words"):
            return find_texts(form, source, lines)
        if form["kind"] == "table":
            pipeline = build_pipeline(config, "eval")
            columns = read_columns(source, Dialect(**form.get("dialect", {})))
            return Table(columns, form["features"], form["missing"], pipeline)
        return pictures_for(facts, config, find_pictures(source, lines))
    if answers_text and keys.save is None:
        raise ConfigError(
            "source",
            "these samples are no prompts",
            "save=logits writes its answers into a file",
        )
    if nodes_of(config, [source])[source] is None:
        raise ConfigError(
            f"data.{source}",
            "is null: no samples",
            "data.predict names samples without labels; source=DIR reads pictures",
        )
    config = as_trained(config, find_checkpoint(Path(keys.run), keys.checkpoint))
    return build_data(config, (source,), facts.classes).sets[source]


def _questions(keys: Prediction, form: Mapping[str, Any]) -> QuestionFile:
    """Return the conversations of a file. Raises DataError for one that asks nothing."""
    if keys.source == "-":
        raise ConfigError("source", "conversations are read from a file", "source=FILE.jsonl")
    if not keys.out.endswith(".jsonl"):
        raise ConfigError(
            "out",
            f"{keys.out}: conversations and their answers are no table of cells",
            "out=answers.jsonl",
        )
    encoder = Encoder(form["tokenizer"], form["template"], form["variables"])
    questions = QuestionFile(keys.source, encoder)
    if keys.on_error == "raise":
        for fault in questions.faults.values():
            raise DataError(fault)
    return questions


def _answering(keys: Prediction, config: Config) -> Config:
    """Return a configuration whose task answers questions: with the tokens of the keys, or its own.

    Raises ConfigError for keys that have no effect on the likeliest answer.
    """
    for key in ("sampling", "top_k", "temperature", "save"):
        if getattr(keys, key) not in (None, "greedy"):
            raise ConfigError(key, "has no effect on answers to conversations: they are greedy")
    generate = dict(config.task.get("generate") or {})
    if keys.max_new_tokens is not None:
        generate["max_new_tokens"] = keys.max_new_tokens
    generate.setdefault("max_new_tokens", Generation().max_new_tokens)
    return replace(config, task={**config.task, "generate": generate})


def _check_boxes(keys: Prediction, facts: InferenceMetadata) -> None:
    """Raise ConfigError for keys that a detector does not take, and for those that only it does."""
    if facts.outputs["kind"] == "boxes":
        if keys.saved in ("logits", "probabilities"):
            raise ConfigError(
                "save",
                f"{keys.save}: a detector answers with any number of boxes, which no array holds",
                "out=boxes.json has them with their scores",
            )
        if keys.top_k is not None:
            raise ConfigError(
                "top_k", "a box has one class", "model.detections_per_img=NUMBER limits the boxes"
            )
        return
    problems = []
    for key in ("score_threshold", "draw"):
        if getattr(keys, key) is not None:
            problems.append(Problem(key, "only the boxes of a detector take it"))
    raise_problems(problems)
    if Path(keys.out).suffix == ".json":
        raise ConfigError(
            "out",
            f"{keys.out}: .json is COCO's format for boxes, and this run does not find any",
            ".jsonl has a line of JSON for each sample",
        )


def _check_drawable(folder: Path, dataset: Any) -> None:
    """Raise ConfigError for samples that are no pictures, and for a folder that holds some."""
    if not hasattr(dataset, "decoded"):
        raise ConfigError("draw", f"{type(dataset).__name__} has no pictures to draw into")
    paths = [path_of(dataset, index) for index in range(len(dataset))]
    folders = {Path(path).parent.resolve() for path in paths if path is not None}
    if folder.resolve() in folders:
        raise ConfigError(
            "draw", f"{folder} holds pictures of the source", "another folder keeps them apart"
        )


def _generation(keys: Prediction, config: Config, dataset: Any) -> Generation | None:
    """Return how prompts are continued; None where the samples are no prompts."""
    if isinstance(dataset, QuestionFile):
        return None  # the task answers them itself
    options = {}
    for name in ("max_new_tokens", "sampling", "temperature"):
        value = getattr(keys, name)
        if value is not None:
            options[name] = value
    if not isinstance(dataset, Prompts):
        raise_problems(Problem(key, "only prompts of a language model take it") for key in options)
        return None
    if keys.save is not None:
        raise ConfigError(
            "save",
            "there is nothing to save of new text",
            "source=val saves the logits of the run's own data",
        )
    if keys.top_k is not None and keys.sampling != "random":
        raise ConfigError("top_k", "has no effect on the likeliest token", "add sampling=random")
    return Generation(**options, top_k=keys.top_k, seed=config.seed)


class PredictionWriter:
    """Collects the predictions and the values to save of all samples, and writes their files.

    Masks are written as they come: PNG files with a palette, in a folder beside the table. So are
    pictures with boxes, in the folder `draw`; `has_truth`: beside the true ones.
    """

    def __init__(
        self,
        keys: Prediction,
        facts: InferenceMetadata,
        dataset: Any,
        task: Any = None,
        has_truth: bool = False,
    ) -> None:
        """`task`: that of the run, which turns tokens of answers into texts."""
        self._keys = keys
        self._dataset = dataset
        self._task = task
        self._table = Path(keys.out)
        prompts = dataset.texts if isinstance(dataset, Prompts) else None
        threshold = keys.score_threshold or 0.0
        self._rows_of = Rows(facts, keys.top_k or 1, self._write_mask, prompts, dataset, threshold)
        self._has_truth = has_truth
        self.rows = list[Row]()
        self._results = list[Row]()  # a box each, in COCO's format
        self._arrays = dict[str, Any]()  # by the name of an output, a row for each sample

    def add(self, answers: Answers) -> None:
        """Take the answers for a batch, broken samples among them."""
        rows: dict[int, Row] = {index: {"error": why} for index, why in answers.broken.items()}
        if isinstance(self._dataset, QuestionFile):
            rows |= self._answered(answers)
            self.rows += [{**self._dataset.values(index), **rows[index]} for index in sorted(rows)]
            return
        rows |= dict(zip(answers.indices, self._rows_of(answers), strict=True))
        for index in sorted(rows):
            name = path_of(self._dataset, index) or str(index)
            row = {"file": name, **rows[index]}
            self.rows.append(row)
            if self._table.suffix == ".json":
                self._results += self._coco_results(index, row)
            if self._keys.draw is not None and "error" not in row:
                self._draw(Path(self._keys.draw), index, row)
        if answers.indices:
            for name, values in answers.kept.items():
                self._save(name, answers.indices, values)

    def _answered(self, answers: Answers) -> dict[int, Row]:
        """Return the answers to questions, by their numbers."""
        if not answers.indices:
            return {}
        tokens = answers.values[OUTPUT].tolist()
        texts = map(self._task.generator.text, tokens)
        return {index: {ANSWER: text} for index, text in zip(answers.indices, texts, strict=True)}

    def _save(self, name: str, indices: Sequence[int], values: Tensor) -> None:
        """Put the values of some samples into the array of all."""
        if values.dtype == torch.bfloat16:  # NumPy has no such type
            values = values.float()
        rows = values.numpy()
        if name not in self._arrays:
            # The row of a sample that cannot be read stays NaN, or 0.
            missing = np.nan if np.issubdtype(rows.dtype, np.floating) else 0
            shape = (len(self._dataset), *rows.shape[1:])
            self._arrays[name] = np.full(shape, missing, rows.dtype)
        if rows.shape[1:] != self._arrays[name].shape[1:]:
            raise ConfigError(
                "save",
                f"the outputs of samples have different shapes, such as {[*rows.shape[1:]]} and "
                f"{[*self._arrays[name].shape[1:]]}, which one array does not hold",
                "of texts, data.val.padding=max_length (data.test.padding) gives all one length",
            )
        self._arrays[name][list(indices)] = rows

    def write(self, origin: Mapping[str, Any]) -> None:
        """Write the arrays, then the table, and beside it where both come from (I7)."""
        path = self._keys.array
        if path is not None and path.suffix == ".safetensors":
            tensors = {}
            for name, values in self._arrays.items():
                key = self._keys.saved if name == OUTPUT else name
                tensors[key] = torch.from_numpy(values)
            write_safetensors(path, tensors, {"regimen": json.dumps(origin)})
        elif path is not None:
            for name, values in self._arrays.items():
                suffix = "" if name == OUTPUT else f".{_file_name_part(name)}.npy"
                with replacing(path.with_suffix(suffix) if suffix else path) as file:
                    np.save(file, values)
        if self._table.suffix == ".json":
            # The format has no place for pictures that cannot be read.
            broken = {row["file"]: row["error"] for row in self.rows if "error" in row}
            origin = {**origin, "errors": broken}
            lines = ",\n".join(map(as_json, self._results))  # a box a line
            write_text(self._table, f"[{lines}]\n")
        else:
            self._write_rows()
        write_json(self._table.with_name(f"{self._table.name}.meta.json"), origin)

    def _write_rows(self) -> None:
        rows = self.rows
        if self._table.suffix == ".csv":
            rows = [line for row in rows for line in _lines_of(row)]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        if "error" in columns:  # comes last
            columns.remove("error")
            columns.append("error")
        with replacing(self._table) as file:
            _write_table(file, self._table.suffix, columns, rows)

    def _coco_results(self, index: int, row: Row) -> list[Row]:
        """Return the boxes of a sample as COCO's results, with the name of the file."""
        number_of = getattr(self._dataset, "number", None)
        number = index if number_of is None else number_of(index)
        results: list[Row] = []
        for _, score, category, box in _boxes_of(row):
            results.append(
                {
                    "image_id": number,
                    "file_name": encodable(row["file"]),
                    "category_id": category,
                    "bbox": box,
                    "score": score,
                }
            )
        return results

    def _draw(self, folder: Path, index: int, row: Row) -> None:
        """Write the picture of a sample with its boxes; beside the true ones, if it has any."""
        picture = self._dataset.decoded(index)
        captions = []
        for name, score in zip(row["prediction"], row["probability"], strict=True):
            captions.append(f"{name} {score:.2f}")
        boxes = torch.tensor(row["bbox"], dtype=torch.float64).view(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        tiles = [with_boxes(picture, boxes, captions, row["category_id"])]
        if self._has_truth:
            truth = self._dataset.boxes(index, *picture.shape[-2:])
            labels = truth["labels"].tolist()
            names = [self._dataset.classes[label] for label in labels]
            ids = [self._dataset.category_ids[label] for label in labels]
            tiles.insert(0, with_boxes(picture, truth["boxes"], names, ids))
        stem = re.sub(r"[^\w-]", "_", Path(row["file"]).stem, flags=re.ASCII)
        path = folder / f"{index:06d}_{stem[:80]}.png"
        with storing(path):
            folder.mkdir(exist_ok=True)
            with replacing(path) as file:
                Image.fromarray(side_by_side(tiles)).save(file, "PNG")

    def summary(self) -> str:
        """Return how many rows there are, and where. Raises DataError if all files were broken."""
        table = one_line(self._table)
        broken = [row for row in self.rows if "error" in row]
        if not broken:
            return f"{len(self.rows)} samples, written to {table}"
        if len(broken) == len(self.rows):
            raise DataError(f"none of {len(broken)} samples could be read: {table} has the reasons")
        return f"{len(self.rows)} samples, {len(broken)} of them broken, written to {table}"

    def _write_mask(self, index: int, mask: Tensor) -> str:
        path = self._table.with_name(f"{self._table.stem}_masks") / f"{index:06d}.png"
        with storing(path):
            path.parent.mkdir(exist_ok=True)
            mask_picture(mask).save(path)
        return str(path)


def _file_name_part(name: str) -> str:
    """Escape the name of an output, which may be any text, for use in a file's name."""
    return re.sub(r"[%/\\\0]", lambda match: f"%{ord(match[0]):02X}", encodable(name))


def mask_picture(mask: Tensor) -> Image.Image:
    """Return a mask [H, W] of class numbers as a picture, with a palette of 256 colours.

    The colours differ well: the bits of a number, the lowest first, become the highest bits of red,
    green and blue in turn.
    """
    palette = []
    for number, channel in product(range(256), range(3)):
        value = 0
        for place in range(3):
            bit = number >> (3 * place + channel) & 1
            value |= bit << (7 - place)
        palette.append(value)
    picture = Image.fromarray(mask.to(torch.uint8).numpy(), mode="P")
    picture.putpalette(palette)
    return picture


def _write_table(file: BinaryIO, suffix: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    if suffix == ".jsonl":
        file.writelines(as_json(row).encode() + b"\n" for row in rows)
    elif suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        cells = {}
        for name in columns:
            cells[encodable(name)] = [mapped(row.get(name), _encodable) for row in rows]
        parquet.write_table(pyarrow.table(cells), file)
    else:
        lines = [columns]
        for row in rows:
            lines.append([_csv_cell(row.get(name, "")) for name in columns])
        file.write(as_bytes(as_csv(lines)))


def _encodable(value: Any) -> Any:
    return encodable(value) if isinstance(value, str) else value


def _boxes_of(row: Row) -> Iterator[tuple[str, float, int, list[float]]]:
    """Yield name, score, category and place of each box of a sample; none of a broken one."""
    columns = ("prediction", "probability", "category_id", "bbox")
    yield from zip(*(row.get(name, ()) for name in columns), strict=True)


def _lines_of(row: Row) -> list[Row]:
    """Return a row for each box of a sample; one without a box where it has none."""
    if "bbox" not in row:
        return [row]
    lines = []
    for name, score, category, (x, y, width, height) in _boxes_of(row):
        lines.append(
            {
                "file": row["file"],
                "prediction": name,
                "probability": score,
                "category_id": category,
                "x": x,
                "y": y,
                "width": width,
                "height": height,
            }
        )
    return lines or [{"file": row["file"], "prediction": ""}]


def _csv_cell(value: Any) -> Any:
    if isinstance(value, list):
        return ";".join(str(_csv_cell(part)) for part in value)
    return f"{value:.9g}" if isinstance(value, float) else value  # all digits of a float32
