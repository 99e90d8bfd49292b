"""Inference: the metadata of a model, its outputs for batches of samples, and their rows."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regimen.conf.json_text import form_fault
from regimen.conf.schema import Config
from regimen.data.batch import inputs_of
from regimen.data.keys import preserved_rng
from regimen.data.loading.loader import Loader
from regimen.data.tokenized import TokenizedSamples
from regimen.data.transforms import Pipeline
from regimen.trainer.assembly.data import Data, names_of
from regimen.trainer.assembly.parts import with_attributes, with_classes
from regimen.trainer.components.components import Components
from regimen.trainer.device import accumulate_dtype
from regimen.trainer.errors import SHAPE_ERRORS, ModelError, explain_shape_error
from regimen.trainer.evaluation import evaluation_mode
from regimen.trainer.files.atomic import write_json
from regimen.trainer.rng import derived_seed
from regimen.trainer.runs.status import INFERENCE, RunDirectoryError, read_json
from regimen.trainer.task import Task
from regimen.trainer.tasks.detection import packed

Row = dict[str, Any]
Sampling = Literal["greedy", "random"]
OUTPUT = "output"  # the name of an output that is one tensor
# The types of the values of `inference.json`, and of those of its `inputs` by their kind.
_FORM: Mapping[str, Any] = {
    "classes": list | None,
    "num_classes": int | None,
    **dict.fromkeys(("inputs", "outputs", "transforms", "model", "attributes"), dict),
}
_INPUTS: Mapping[str, Mapping[str, Any]] = {
    "picture": {"channels": int, "size": list | None},
    "table": {"features": list, "missing": str},
    "text": {"encoding": str, "context": int},
    "texts": {"columns": list, "tokenizer": str, "length": int, "too_long": str},
    "words": {"tokenizer": str, "length": int, "too_long": str},
    "conversation": {"tokenizer": str, "template": str | None, "variables": dict},
}
_OUTPUTS: Mapping[str, Any] = {"threshold": int | float, "scale": list, "category_ids": list}
_NUMBER = int | float
_FEATURE: Mapping[str, Any] = {
    "name": str,
    "categories": list | None,
    "mean": _NUMBER,
    "std": _NUMBER,
}
_MOST_CLASSES = 1_000_000  # a network is built with as many outputs
_LARGEST_SIDE = 1 << 16  # pixels
_COLUMNS = 16  # an output with more numbers for each sample is shown by its shape


class InferenceMetadata(NamedTuple):
    """The inputs and outputs of a model, as plain values."""

    classes: list[str] | None  # names, by class number
    num_classes: int | None
    inputs: dict[str, Any]  # before the transforms: "kind" (picture, table, text, ...), its form
    outputs: dict[str, Any]  # `Task.output_kind`, the threshold of labels, the scale of values
    transforms: dict[str, Any]  # those of evaluation, as in the configuration
    model: dict[str, Any]
    attributes: Mapping[str, Any] = MappingProxyType({})  # of the training set: `data.train.NAME`

    def write(self, folder: Path) -> None:
        """Write `inference.json` into a run's folder, whole or not at all."""
        write_json(folder / INFERENCE, {**self._asdict(), "attributes": dict(self.attributes)})


def inference_metadata(config: Config, data: Data, task: Task) -> InferenceMetadata:
    """Return the facts of a run whose data are open."""
    datasets = []
    for split in (*config.data.validations, *config.data.tests, "train"):
        dataset = data.sets.get(split)
        if dataset is not None:
            datasets.append(dataset)
    outputs: dict[str, Any] = {"kind": task.output_kind}
    threshold = getattr(task, "threshold", None)
    if threshold is not None:
        outputs["threshold"] = threshold
    scale = getattr(datasets[0], "target_scale", None)
    if scale is not None:
        outputs["scale"] = list(scale)  # mean and deviation of the training targets
    category_ids = getattr(datasets[0], "category_ids", None)
    if category_ids is not None:
        outputs["category_ids"] = list(category_ids)  # the numbers of classes in annotations
    return InferenceMetadata(
        classes=next(filter(None, map(names_of, datasets)), None),
        num_classes=data.num_classes,
        inputs=_input_form(datasets[0]),
        outputs=outputs,
        transforms=dict(config.transforms.eval),
        model=with_classes(config.model, data.num_classes),
        attributes=data.attributes,
    )


def read_inference_metadata(folder: Path) -> InferenceMetadata:
    """Read a run's `inference.json`. Raises RunDirectoryError."""
    path = folder / INFERENCE
    values = {"attributes": {}, **read_json(path)}  # an older run has none
    fault = next(_faults(values), None)
    if fault is not None:
        raise RunDirectoryError(
            f"{path} is missing or damaged ({fault}): training writes it, with resume=auto again"
        )
    return InferenceMetadata(*(values[name] for name in InferenceMetadata._fields))


def _faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the contents of `inference.json`.

    Only the first fault counts: behind it, values may have other types than this function expects.
    """
    yield from _type_faults(values, _FORM)
    inputs = values["inputs"]
    outputs = values["outputs"]
    yield from _type_faults(inputs, {"kind": str})
    yield from _type_faults(inputs, _INPUTS.get(inputs["kind"], {}))
    optional = {name: kind for name, kind in _OUTPUTS.items() if name in outputs}
    yield from _type_faults(outputs, {"kind": str, **optional})
    if not _are(values["classes"] or (), str):
        yield "its 'classes' are no names"
    if not 0 <= (values["num_classes"] or 0) <= _MOST_CLASSES:
        yield f"its 'num_classes' are {values['num_classes']}"
    scale = outputs.get("scale", [0.0, 1.0])
    if len(scale) != 2 or not _are(scale, _NUMBER):
        yield "its 'scale' is no mean and deviation"
    if not _are(outputs.get("category_ids", ()), int):
        yield "its 'category_ids' are no numbers"
    side = inputs.get("fitted", 1)
    if not _are([side], int) or not 0 < side <= _LARGEST_SIDE:
        yield "its 'fitted' is no side of an image"
    size = inputs.get("size") or [1, 1]
    if len(size) != 2 or not _are(size, int) or not 0 < min(size) <= max(size) <= _LARGEST_SIDE:
        yield "its 'size' is no height and width"
    features = inputs.get("features", [])
    if not _are(features, dict):
        yield "its 'features' are no list of columns"
    for feature in features:
        yield from _type_faults(feature, _FEATURE)


def _type_faults(values: Mapping[str, Any], form: Mapping[str, Any]) -> Iterator[str]:
    fault = form_fault(values, form)
    if fault is not None:
        yield fault


def _are(values: Iterable[Any], kind: Any) -> bool:
    return all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


def classes_of(folder: Path) -> list[str] | None:
    """Return the names of a run's classes; None without names. Raises RunDirectoryError."""
    names: list[str] | None = read_json(folder / INFERENCE).get("classes")
    return names


def with_attributes_of(folder: Path, config: Config) -> Config:
    """Return a run's configuration with the attributes of its training set that it asks for.

    Raises ConfigError where they are not known.
    """
    return with_attributes(config, read_json(folder / INFERENCE).get("attributes", {}))


def class_count_of(folder: Path, here: int | None) -> int | None:
    """Return the number of a run's classes; `here`, that of the opened data, for an older run."""
    count: int | None = read_json(folder / INFERENCE).get("num_classes", here)
    return count


def _input_form(dataset: Any) -> dict[str, Any]:
    """Return the form of samples before the transforms: as declared, or as the samples show."""
    declared = getattr(dataset, "input_form", None)
    if callable(declared):
        return dict(declared())
    pipeline = getattr(dataset, "transform", None)
    if not isinstance(pipeline, Pipeline):
        return {"kind": "array"}
    # The transforms are taken out for a moment, to see two samples as they were.
    steps = pipeline.steps
    deferred = pipeline.deferred
    pipeline.steps = {}
    pipeline.deferred = {}
    try:
        with preserved_rng():
            channels, size = _picture_form(inputs_of(dataset[0]))
            last_channels, last_size = _picture_form(inputs_of(dataset[len(dataset) - 1]))
    except Exception:  # the user's own data set, which may do anything with what it transforms
        return {"kind": "array"}
    finally:
        pipeline.steps = steps
        pipeline.deferred = deferred
    return {
        "kind": "picture",
        "channels": max(channels, last_channels),
        "size": size if size == last_size else None,
    }


def _picture_form(value: Any) -> tuple[int, list[int]]:
    """Return channels and size of a Pillow image or of uint8 values, or raise.

    Tensors are [C, H, W], arrays [H, W] or [H, W, C].
    """
    if hasattr(value, "convert"):
        return 1 if value.mode in ("1", "L") else 3, [value.height, value.width]
    if isinstance(value, np.ndarray):
        planes = value[:, :, None] if value.ndim == 2 else value
        value = torch.from_numpy(planes).movedim(-1, 0)
    channels, *size = value.shape
    if value.dtype != torch.uint8 or len(size) != 2 or channels not in (1, 3):
        raise ValueError("no picture")
    return channels, size


def named_tensors(value: Any, name: str = OUTPUT) -> dict[str, Tensor]:
    """Return the tensors of an output by name: a dict's keys, or `output1`, ... of a tuple.

    Other values are left out. Names within names are joined by `_`.
    """
    if isinstance(value, Tensor):
        return {name: value}
    parts: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", [f"output{n}" for n in range(1, len(value) + 1)])
        parts = dict(zip(names, value, strict=True))
    prefix = "" if name == OUTPUT else f"{name}_"
    tensors: dict[str, Tensor] = {}
    for key, part in parts.items():
        tensors |= named_tensors(part, f"{prefix}{key}")
    return tensors


class Generation(NamedTuple):
    """How the next token is chosen: the likeliest (greedy), or drawn from the `top_k` likeliest.

    Draws are keyed by `seed` and the number of the prompt alone: neither the batch nor the number
    of workers or processes changes them.
    """

    max_new_tokens: int = 200
    sampling: Sampling = "greedy"
    temperature: float = 1.0
    top_k: int | None = None  # None: all
    seed: int = 0

    def __call__(self, logits_of: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
        """Return the new tokens [n, max_new_tokens].

        logits_of: maps tokens [n, length] to logits [n, vocabulary, length], each of which depends
        on its own and earlier positions only. batch: what `regimen.data.text.Prompts` returns,
        collated.
        """
        # window [n, context]: the last tokens of each prompt, from the left; lengths [n]: how many.
        window, lengths, numbers = batch
        draws = torch.zeros(len(window), self.max_new_tokens, dtype=torch.float64)  # on the host
        if self.sampling == "random":
            # Waits for the device, once for each batch of prompts.
            for row, number in zip(draws, numbers.tolist(), strict=True):
                seed = derived_seed(self.seed, "generate", number)
                row.uniform_(generator=torch.Generator().manual_seed(seed))
        rows = torch.arange(len(window), device=window.device)
        # Waits for the device, once for each batch: from here on the host counts by itself.
        longest = int(lengths.max())
        context = window.shape[1]
        tokens = []
        for step in range(self.max_new_tokens):
            logits = logits_of(window[:, :longest])[rows, :, lengths - 1]
            token = self._choose(logits, draws[:, step])
            tokens.append(token)
            # A full window loses its first token; the new one is the last.
            is_full = lengths == context
            window = torch.where(is_full[:, None], window.roll(-1, 1), window)
            place = lengths.clamp(max=context - 1)
            window = window.scatter(1, place[:, None], token[:, None])
            lengths = place + 1
            longest = min(longest + 1, context)
        return torch.stack(tokens, 1)

    def _choose(self, logits: Tensor, draw: Tensor) -> Tensor:
        """Return a token [n] for each row of logits [n, vocabulary] and number [n] from 0 to 1."""
        if self.sampling == "greedy":
            return logits.argmax(1)
        scaled = logits.to(accumulate_dtype(logits.device)) / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[1]:
            least = scaled.topk(self.top_k, dim=1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        # The first token whose cumulative probability exceeds the draw. One of probability 0 does
        # not add to it, and is never chosen. The sum may differ from 1 by rounding.
        cumulative = scaled.softmax(1).cumsum(1)
        wanted = draw.to(cumulative)[:, None] * cumulative[:, -1:]
        last = cumulative.shape[1] - 1
        return (cumulative <= wanted).sum(1).clamp(max=last)


class Answers(NamedTuple):
    """The outputs of one process for some samples, on the host."""

    indices: Sequence[int]  # of the samples that were read
    values: Mapping[str, Tensor]  # what `Task.interpret` returned, [n, ...] by name
    kept: Mapping[str, Tensor]  # the values to save for each sample, [n, ...] by name
    broken: dict[int, str]  # why a sample could not be read, by its index


class Predictor:
    """Run a model with the weights that its run was evaluated with.

    keep: "logits", "probabilities", "embeddings:MODULE" (the output of a module of the model), or
    None: nothing but the outputs. generation: the outputs are new tokens after prompts.
    Raises ModelError if the model has no such module.
    """

    def __init__(
        self,
        components: Components,
        keep: str | None = None,
        generation: Generation | None = None,
    ) -> None:
        self.components = components
        self._keep = keep
        self._generation = generation
        self._module: nn.Module | None = None
        self._embedding: Any = None
        kind, _, name = (keep or "").partition(":")
        if kind == "embeddings":
            modules: dict[str, nn.Module] = dict(components.model.named_modules())
            if name not in modules:
                top = ", ".join(n for n in modules if n and "." not in n)
                raise ModelError(f"save={keep}: the model has no such module; it has {top}")
            self._module = modules[name]

    @torch.inference_mode()
    def __call__(self, loader: Loader) -> Iterator[Answers]:
        """Yield the outputs for each batch, gathered from all processes. Collective."""
        components = self.components
        reported = 0
        with self.ready():
            expected = loader.sampler.walk(0, 0, len(loader))
            for whole, micro in zip(expected, loader.epoch(0, 0), strict=True):
                indices = micro.batch_slice.indices[: micro.batch_slice.count]
                answers = self.ask(components.to_device(micro.batch), indices)
                reasons = {s.index: s.reason for s in loader.skipped[reported:]}
                reported = len(loader.skipped)
                for index in set(whole.indices[: whole.count]) - set(indices):
                    answers.broken[index] = reasons[index]
                # Collective: each process has its part of the batch.
                yield from components.group.gather_data(answers)

    def ask(self, batch: Any, indices: Sequence[int]) -> Answers:
        """Return the outputs for the samples at the front of a batch; it may hold more samples."""
        task = self.components.task
        step = partial(task.prediction_step, self.components.model)
        self._embedding = None
        try:
            with self.components.precision.autocast():
                if self._generation is None:
                    output = step(batch)
                    values = task.interpret(output)
                else:
                    output = self._generation(step, batch)
                    values = output
        except SHAPE_ERRORS as error:
            explained = explain_shape_error(error, batch, 0)
            if explained is None:
                raise
            raise explained from error
        if task.output_kind == "boxes":
            values = packed(values)
        count = len(indices)
        saved: dict[str, Tensor] = {}
        if self._keep is not None:
            outputs = {"logits": output, "probabilities": values}
            kept = outputs.get(self._keep, self._embedding)
            if kept is None:
                raise ModelError(f"save={self._keep}: the model does not call it in its forward")
            saved = _on_host(kept, count)
        return Answers(indices, _on_host(values, count), saved, {})

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Put the model into evaluation mode, and watch the module whose outputs are saved."""
        hook: Any = nullcontext()
        if self._module is not None:
            hook = self._module.register_forward_hook(self._embed)
        with hook, evaluation_mode(self.components):
            yield

    def _embed(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._embedding = output[0] if isinstance(output, (tuple, list)) else output


def _on_host(value: Any, count: int) -> dict[str, Tensor]:
    """Return the tensors of an output for its first `count` samples. Waits for the device."""
    # A scalar is no output for each sample: models may compute a loss beside their outputs.
    tensors = {name: tensor for name, tensor in named_tensors(value).items() if tensor.ndim}
    if not tensors or min(map(len, tensors.values())) < count:
        raise ModelError(
            f"the task's prediction_step returned {type(value).__name__}, which holds no tensors "
            "with an answer for each sample: give the task an `interpret` that makes such"
        )
    return {name: tensor[:count].cpu() for name, tensor in tensors.items()}


class Rows(NamedTuple):
    """Turn outputs into rows of a table, by the kind of the task's outputs.

    mask_of: writes a mask and returns its path, given the sample's index and the mask. prompts: of
    all samples, by index; None if the outputs are not text. samples: the data set, whose texts
    stand beside the answers. score_threshold: boxes with a lower score are left out.
    """

    facts: InferenceMetadata
    top_k: int = 1
    mask_of: Callable[[int, Tensor], Any] = lambda index, mask: mask.tolist()  # on the host
    prompts: Sequence[str] | None = None
    samples: Any = None
    score_threshold: float = 0.0

    def __call__(self, answers: Answers) -> list[Row]:
        """Return a row for each sample that was read. Nothing waits: outputs are on the host."""
        rows = self._answers(answers)
        if not isinstance(self.samples, TokenizedSamples):
            return rows
        texts = map(self.samples.shown_of, answers.indices)
        return [_beside(text, row) for text, row in zip(texts, rows, strict=True)]

    def _answers(self, answers: Answers) -> list[Row]:
        kind = self.facts.outputs["kind"]
        values = answers.values
        count = len(answers.indices)
        if not count:
            return []
        if kind == "boxes":
            columns = (values["boxes"], values["scores"], values["labels"])
            return [self._boxes(*sample) for sample in zip(*columns, strict=True)]
        output = values.get(OUTPUT)
        if output is None:
            return _columns(values, count)
        if kind == "classes":
            best = output.topk(min(self.top_k, output.shape[1]), dim=1)
            return list(map(self._ranked, best.indices.tolist(), best.values.tolist()))
        if kind == "labels":
            return [self._labels(probabilities) for probabilities in output.tolist()]
        if kind == "values":
            # Training standardised the targets: back to the units of the file.
            mean, std = self.facts.outputs.get("scale", (0.0, 1.0))
            return _columns({OUTPUT: output * std + mean}, count, math.inf)
        samples = zip(answers.indices, output, strict=True)
        rows: list[Row] = []
        if kind == "mask":
            for index, mask in samples:
                rows.append({"prediction": self.mask_of(index, mask)})
        elif kind == "tags" and isinstance(self.samples, TokenizedSamples):
            for index, tags in samples:
                places = self.samples.word_places(index)
                rows.append({"prediction": self._tags(tags, places)})
        elif kind == "text" and self.prompts is not None:
            for index, tokens in samples:
                # The outputs are on the host: nothing waits.
                text = self._text(tokens.tolist())
                rows.append({"prompt": self.prompts[index], "prediction": text})
        else:
            rows = _columns(values, count)
        return rows

    def _labels(self, probabilities: Sequence[float]) -> Row:
        threshold = float(self.facts.outputs.get("threshold", 0.5))
        above = {}
        for number, probability in enumerate(probabilities):
            if probability > threshold:
                above[self._name(number)] = probability
        return {"prediction": list(above), "probability": list(above.values())}

    def _boxes(self, boxes: Tensor, scores: Tensor, labels: Tensor) -> Row:
        """Return the boxes of a sample [m, 4] as lists, those of COCO as x, y, width, height."""
        rows = (labels >= 0) & (scores >= self.score_threshold)
        corners = boxes[rows].double()
        numbers = labels[rows].tolist()
        ids = self.facts.outputs.get("category_ids") or ()
        return {
            "prediction": [self._name(number) for number in numbers],
            "probability": scores[rows].tolist(),
            "category_id": [ids[n] if n < len(ids) else n for n in numbers],
            "bbox": torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist(),
        }

    def _ranked(self, numbers: Sequence[int], probabilities: Sequence[float]) -> Row:
        row: Row = {"prediction": self._name(numbers[0]), "probability": probabilities[0]}
        for place in range(1, len(numbers)):
            row[f"top{place + 1}"] = self._name(numbers[place])
            row[f"probability{place + 1}"] = probabilities[place]
        return row

    def _tags(self, numbers: Tensor, places: Sequence[int] | None) -> list[str]:
        """Return the tags of words, given the class at each place and the places of the words."""
        chosen = numbers if places is None else numbers[list(places)]
        return [self._name(number) for number in chosen.tolist()]

    def _name(self, number: int) -> str:
        names = self.facts.classes or ()
        return names[number] if number < len(names) else str(number)

    def _text(self, tokens: Sequence[int]) -> str:
        if self.facts.inputs.get("encoding") == "bytes":
            return bytes(tokens).decode(errors="replace")  # they may end within a character
        return "".join(map(self._name, tokens))


def _beside(text: Row, answer: Row) -> Row:
    """Return the columns of a text, then those of the answer; one of the same name is renamed."""
    row: Row = {}
    for name, value in text.items():
        if name == "file" or name in answer:
            name = f"{name}_given"
        row[name] = value
    return row | answer


def _columns(values: Mapping[str, Tensor], count: int, most: float = _COLUMNS) -> list[Row]:
    """Return `count` rows with the numbers of each output, or its shape if it has over `most`."""
    rows: list[Row] = [{} for _ in range(count)]
    for name, tensor in values.items():
        column = "prediction" if name == OUTPUT else name
        shape = "shape" if name == OUTPUT else f"{name}_shape"
        # The outputs are on the host: nothing waits.
        for row, numbers in zip(rows, tensor.reshape(count, -1).tolist(), strict=True):
            if len(numbers) > most:
                row[shape] = list(tensor.shape[1:])
            elif tensor.ndim == 1:
                row[column] = numbers[0]
            else:
                for place, number in enumerate(numbers, start=1):
                    row[f"{column}{place}"] = number
    return rows
