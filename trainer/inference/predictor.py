"""What a trained model takes and answers: the facts about its data, its outputs, their rows."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regimen.conf.json_text import form_fault
from regimen.conf.schema import Config
from regimen.data.batch import inputs_of
from regimen.data.keys import preserved_rng
from regimen.data.loading.loader import Loader
from regimen.data.transforms import Pipeline
from regimen.trainer.assembly.data import Data, names_of
from regimen.trainer.assembly.parts import with_classes
from regimen.trainer.device import accumulate_dtype
from regimen.trainer.errors import SHAPE_ERRORS, ModelError, explain_shape_error
from regimen.trainer.files.atomic import write_json
from regimen.trainer.rng import derived_seed
from regimen.trainer.runs.status import INFERENCE, RunDirectoryError, read_json
from regimen.trainer.task import Task
from regimen.trainer.trainer import Trainer

Row = dict[str, Any]
Sampling = Literal["greedy", "random"]
OUTPUT = "output"  # the name of an output that is one tensor
# The form of `inference.json`, and of its `inputs` by their kind.
_FORM: Mapping[str, Any] = {
    "classes": list | None,
    "num_classes": int | None,
    **dict.fromkeys(("inputs", "outputs", "transforms", "model"), dict),
}
_INPUTS: Mapping[str, Mapping[str, Any]] = {
    "picture": {"channels": int, "size": list | None},
    "table": {"features": list, "missing": str},
    "text": {"encoding": str, "context": int},
}
_OUTPUTS: Mapping[str, Any] = {"threshold": int | float, "scale": list}
_NUMBER = int | float
_FEATURE: Mapping[str, Any] = {
    "name": str,
    "categories": list | None,
    "mean": _NUMBER,
    "std": _NUMBER,
}
_MOST_CLASSES = 1_000_000  # a network is built with as many outputs
_LARGEST_SIDE = 1 << 16  # pixels
_COLUMNS = 16  # numbers of a sample that have columns of a table; more are an array


class InferenceMetadata(NamedTuple):
    """The inputs and outputs of a model, as plain values."""

    classes: list[str] | None  # names, by class number
    num_classes: int | None
    inputs: dict[str, Any]  # of the transforms: kind "picture" (channels, size), "table", "array"
    outputs: dict[str, Any]  # `Task.output_kind`, the threshold of labels, the scale of values
    transforms: dict[str, Any]  # those of evaluation, as in the configuration
    model: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write `inference.json` into a run's folder, whole or not at all."""
        write_json(folder / INFERENCE, self._asdict())


def inference_metadata(config: Config, data: Data, task: Task) -> InferenceMetadata:
    """Return the facts of a run whose data are open."""
    order = [*config.data.validations, *config.data.tests, "train"]
    known = [data.sets[s] for s in order if data.sets.get(s) is not None]
    outputs: dict[str, Any] = {"kind": task.output_kind}
    if (threshold := getattr(task, "threshold", None)) is not None:
        outputs["threshold"] = threshold
    if (scale := getattr(known[0], "target_scale", None)) is not None:
        outputs["scale"] = list(scale)  # mean and deviation of the training targets
    return InferenceMetadata(
        classes=next(filter(None, map(names_of, known)), None),
        num_classes=data.num_classes,
        inputs=_input_form(known[0]),
        outputs=outputs,
        transforms=dict(config.transforms.eval),
        model=with_classes(config.model, data.num_classes),
    )


def read_facts(folder: Path) -> InferenceMetadata:
    """Read a run's `inference.json`. Raises RunDirectoryError."""
    path = folder / INFERENCE
    found = read_json(path)
    fault = next(_faults(found), None)
    if fault is not None:
        raise RunDirectoryError(
            f"{path} is missing or damaged ({fault}): training writes it, with resume=auto again"
        )
    return InferenceMetadata(*(found[name] for name in InferenceMetadata._fields))


def _faults(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of `inference.json` is not as `InferenceFacts` has it; the first one counts."""
    yield from _fault(found, _FORM)
    inputs, outputs = found["inputs"], found["outputs"]
    yield from _fault(inputs, {"kind": str})
    yield from _fault(inputs, _INPUTS.get(inputs["kind"], {}))
    given = {name: kind for name, kind in _OUTPUTS.items() if name in outputs}
    yield from _fault(outputs, {"kind": str, **given})
    if not _are(found["classes"] or (), str):
        yield "its 'classes' are no names"
    if not 0 <= (found["num_classes"] or 0) <= _MOST_CLASSES:
        yield f"its 'num_classes' are {found['num_classes']}"
    scale = outputs.get("scale", [0.0, 1.0])
    if len(scale) != 2 or not _are(scale, _NUMBER):
        yield "its 'scale' is no mean and deviation"
    size = inputs.get("size") or [1, 1]
    if len(size) != 2 or not _are(size, int) or not 0 < min(size) <= max(size) <= _LARGEST_SIDE:
        yield "its 'size' is no height and width"
    features = inputs.get("features", [])
    if not _are(features, dict):
        yield "its 'features' are no list of columns"
    for feature in features:
        yield from _fault(feature, _FEATURE)


def _fault(values: Mapping[str, Any], form: Mapping[str, Any]) -> Iterator[str]:
    fault = form_fault(values, form)
    if fault is not None:
        yield fault


def _are(values: Iterable[Any], kind: Any) -> bool:
    return all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


def classes_of(folder: Path) -> list[str] | None:
    """Return the names of a run's classes; None of one without names. Raises RunDirectoryError."""
    found: list[str] | None = read_json(folder / INFERENCE).get("classes")
    return found


def class_count_of(folder: Path, here: int | None) -> int | None:
    """Return the number of a run's classes; `here`, that of the data at hand, of an older run."""
    found: int | None = read_json(folder / INFERENCE).get("num_classes", here)
    return found


def _input_form(dataset: Any) -> dict[str, Any]:
    """Return the form of samples before the transforms: as declared, or as the samples show."""
    if callable(told := getattr(dataset, "input_form", None)):
        return dict(told())
    if not isinstance(pipeline := getattr(dataset, "transform", None), Pipeline):
        return {"kind": "array"}
    kept = pipeline.steps, pipeline.deferred
    pipeline.steps, pipeline.deferred = {}, {}
    try:
        with preserved_rng():
            first, last = (_picture_form(inputs_of(dataset[n])) for n in (0, len(dataset) - 1))
    except Exception:  # the user's own data set, which may do anything with what it transforms
        return {"kind": "array"}
    finally:
        pipeline.steps, pipeline.deferred = kept
    size = first[1] if first[1] == last[1] else None
    return {"kind": "picture", "channels": max(first[0], last[0]), "size": size}


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

    What is no tensor is left out; names within names are joined by `_`.
    """
    if isinstance(value, Tensor):
        return {name: value}
    parts: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", [f"output{n}" for n in range(1, len(value) + 1)])
        parts = dict(zip(names, value, strict=True))
    above = "" if name == OUTPUT else f"{name}_"
    found: dict[str, Tensor] = {}
    for key, part in parts.items():
        found |= named_tensors(part, f"{above}{key}")
    return found


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
        window, lengths, numbers = batch
        draws = torch.zeros(len(window), self.max_new_tokens, dtype=torch.float64)  # on the host
        if self.sampling == "random":
            for row, number in zip(draws, numbers.tolist(), strict=True):
                generator = torch.Generator().manual_seed(
                    derived_seed(self.seed, "generate", number)
                )
                row.uniform_(generator=generator)
        rows = torch.arange(len(window), device=window.device)
        longest, context = int(lengths.max()), window.shape[1]
        found = []
        for step in range(self.max_new_tokens):
            logits = logits_of(window[:, :longest])[rows, :, lengths - 1]
            token = self._choose(logits, draws[:, step])
            found.append(token)
            window = torch.where((lengths == context)[:, None], window.roll(-1, 1), window)
            place = lengths.clamp(max=context - 1)
            window = window.scatter(1, place[:, None], token[:, None])
            lengths, longest = place + 1, min(longest + 1, context)
        return torch.stack(found, 1)

    def _choose(self, logits: Tensor, draw: Tensor) -> Tensor:
        """Return a token for each row of logits [n, vocabulary]."""
        if self.sampling == "greedy":
            return logits.argmax(1)
        scaled = logits.to(accumulate_dtype(logits.device)) / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[1]:
            least = scaled.topk(self.top_k, dim=1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        shares = scaled.softmax(1).cumsum(1)
        # The share that the draw falls into; one of probability 0 has no width.
        wanted = draw.to(shares)[:, None] * shares[:, -1:]
        return (shares <= wanted).sum(1).clamp(max=shares.shape[1] - 1)


class Answers(NamedTuple):
    """The outputs for some samples on the host, of one process."""

    indices: Sequence[int]  # of the samples that were read
    values: Mapping[str, Tensor]  # what `Task.interpret` returned, [n, ...] by name
    kept: Mapping[str, Tensor]  # the values to save for each sample, [n, ...] by name
    broken: dict[int, str]  # samples not read, and why


class Predictor:
    """Run a trainer's model with the weights that its run was evaluated with.

    keep: "logits", "probabilities", "embeddings:MODULE" (the output of a module of the model), or
    None: nothing but the outputs. generation: the outputs are new tokens after prompts.
    Raises ModelError if the model has no such module.
    """

    def __init__(
        self, trainer: Trainer, keep: str | None = None, generation: Generation | None = None
    ) -> None:
        self.trainer, self._keep, self._generation = trainer, keep, generation
        self._embedding: Any = None
        modules: dict[str, nn.Module] = dict(trainer.model.named_modules())
        kind, _, name = (keep or "").partition(":")
        self._module = modules.get(name) if kind == "embeddings" else None
        if kind == "embeddings" and self._module is None:
            top = ", ".join(n for n in modules if n and "." not in n)
            raise ModelError(f"save={keep}: the model has no such module; it has {top}")

    @torch.inference_mode()
    def __call__(self, loader: Loader) -> Iterator[Answers]:
        """Yield the outputs for each batch, gathered from all processes."""
        trainer, told = self.trainer, 0
        with self.ready():
            expected = loader.sampler.walk(0, 0, len(loader))
            for whole, micro in zip(expected, loader.epoch(0, 0), strict=True):
                indices = micro.batch_slice.indices[: micro.batch_slice.count]
                own = self.ask(trainer.to_device(micro.batch), indices)
                reasons = {s.index: s.reason for s in loader.skipped[told:]}
                told = len(loader.skipped)
                lost = set(whole.indices[: whole.count]) - set(indices)
                own.broken.update((index, reasons[index]) for index in lost)
                yield from trainer.group.gather_data(own)

    def ask(self, batch: Any, indices: Sequence[int]) -> Answers:
        """Return the outputs for the samples that a batch begins with; behind them are others."""
        step = partial(self.trainer.task.prediction_step, self.trainer.model)
        self._embedding = None
        try:
            with self.trainer.precision.autocast():
                if self._generation is None:
                    output = step(batch)
                    values = self.trainer.task.interpret(output)
                else:
                    output = values = self._generation(step, batch)
        except SHAPE_ERRORS as error:
            if (known := explain_shape_error(error, batch, 0)) is not None:
                raise known from error
            raise
        kept = {"logits": output, "probabilities": values}.get(self._keep or "", self._embedding)
        if self._keep is not None and kept is None:
            raise ModelError(f"save={self._keep}: the model does not call it in its forward")
        count = len(indices)
        saved = {} if self._keep is None else _on_host(kept, count)
        return Answers(indices, _on_host(values, count), saved, {})

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Bring the model into the state of an evaluation, and look at the module asked for."""
        module = self._module
        asked = nullcontext() if module is None else module.register_forward_hook(self._embed)
        with asked, self.trainer.evaluating():
            yield

    def _embed(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._embedding = output[0] if isinstance(output, (tuple, list)) else output


def _on_host(value: Any, count: int) -> dict[str, Tensor]:
    # A loss that the model computes beside its output is no answer of a sample.
    found = {name: tensor for name, tensor in named_tensors(value).items() if tensor.ndim}
    if not found or any(len(tensor) < count for tensor in found.values()):
        raise ModelError(
            f"the task's prediction_step returned {type(value).__name__}, which holds no tensors "
            "with an answer for each sample: give the task an `interpret` that makes such"
        )
    return {name: tensor[:count].cpu() for name, tensor in found.items()}


class Rows(NamedTuple):
    """Turn outputs into rows of a table, by the kind of the task's outputs.

    mask_of: writes a mask and returns its path, by index and mask. prompts: of all samples, by
    index; None: the outputs are not text.
    """

    facts: InferenceMetadata
    top_k: int = 1
    mask_of: Callable[[int, Tensor], Any] = lambda index, mask: mask.tolist()
    prompts: Sequence[str] | None = None

    def __call__(self, answers: Answers) -> list[Row]:
        """Return a row for each sample that was read."""
        kind, values = self.facts.outputs["kind"], answers.values
        count, output = len(answers.indices), values.get(OUTPUT)
        if not count:
            return []
        if output is None:
            return _columns(values, count)
        both = list(zip(answers.indices, output, strict=True))
        if kind == "classes":
            best = output.topk(min(self.top_k, output.shape[1]), dim=1)
            return list(map(self._ranked, best.indices.tolist(), best.values.tolist()))
        if kind == "labels":
            least = float(self.facts.outputs.get("threshold", 0.5))
            above = [
                {self._name(i): p for i, p in enumerate(t.tolist()) if p > least} for _, t in both
            ]
            return [{"prediction": [*f], "probability": [*f.values()]} for f in above]
        if kind == "values":
            mean, std = self.facts.outputs.get("scale", (0.0, 1.0))
            # In the units of the file, as training standardised them.
            return _columns({OUTPUT: output * std + mean}, count, math.inf)
        if kind == "mask":
            return [{"prediction": self.mask_of(index, mask)} for index, mask in both]
        if kind == "text" and self.prompts is not None:
            texts = ((self.prompts[index], self._text(tokens.tolist())) for index, tokens in both)
            return [{"prompt": prompt, "prediction": text} for prompt, text in texts]
        return _columns(values, count)

    def _ranked(self, numbers: Sequence[int], shares: Sequence[float]) -> Row:
        row: Row = {"prediction": self._name(numbers[0]), "probability": shares[0]}
        for place in range(1, len(numbers)):
            row[f"top{place + 1}"] = self._name(numbers[place])
            row[f"probability{place + 1}"] = shares[place]
        return row

    def _name(self, number: int) -> str:
        names = self.facts.classes or ()
        return names[number] if number < len(names) else str(number)

    def _text(self, tokens: Sequence[int]) -> str:
        if self.facts.inputs.get("encoding") == "bytes":
            return bytes(tokens).decode(errors="replace")  # they may end within a character
        return "".join(map(self._name, tokens))


def _columns(values: Mapping[str, Tensor], count: int, most: float = _COLUMNS) -> list[Row]:
    """Return the numbers of outputs by name; of larger ones the shape."""
    rows: list[Row] = [{} for _ in range(count)]
    for name, tensor in values.items():
        column, shape = ("prediction", "shape") if name == OUTPUT else (name, f"{name}_shape")
        for row, numbers in zip(rows, tensor.reshape(count, -1).tolist(), strict=True):
            if len(numbers) > most:
                row[shape] = list(tensor.shape[1:])
            elif tensor.ndim == 1:
                row[column] = numbers[0]
            else:
                row |= {f"{column}{place}": number for place, number in enumerate(numbers, start=1)}
    return rows
