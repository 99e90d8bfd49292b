"""The outputs of a trained model: for the samples of a loader, in order, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from data.loading.loader import Loader
from trainer import rng
from trainer.errors import ModelError
from trainer.inference.facts import InferenceFacts
from trainer.inference.generation import Generation
from trainer.rng import derived
from trainer.trainer import Trainer
from trainer.user_code import MISFITS, misfit

Row = dict[str, Any]
OUTPUT = "output"  # the name of an output that is one tensor
_COLUMNS = 16  # numbers of a sample that have columns of a table; more are an array


@dataclass(frozen=True, slots=True)
class Answers:
    """The outputs for some samples on the host, of one process or gathered from all."""

    indices: Sequence[int]  # of the samples that were read
    values: Mapping[str, Tensor]  # what `Task.interpret` returned, [n, ...] by name
    kept: Mapping[str, Tensor] | None  # the values to save for each sample, [n, ...] by name
    broken: dict[int, str]  # samples that could not be read, and why


def named_tensors(value: Any, name: str = OUTPUT) -> dict[str, Tensor]:
    """Return the tensors of an output by name: a dict's keys, or `output1`, ... of a tuple.

    What is no tensor is left out; names within names are joined by `_`.
    """
    if isinstance(value, Tensor):
        return {name: value}
    above = "" if name == OUTPUT else f"{name}_"
    parts: dict[str, Any] = {}
    if isinstance(value, Mapping):
        parts = {f"{above}{key}": part for key, part in value.items()}
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", [f"output{n}" for n in range(1, len(value) + 1)])
        parts = {f"{above}{key}": part for key, part in zip(fields, value, strict=True)}
    found: dict[str, Tensor] = {}
    for key, part in parts.items():
        found |= named_tensors(part, key)
    return found


class Predictor:
    """Run a trainer's model with the weights that its run was evaluated with.

    keep: "logits", "probabilities", "embeddings:MODULE" (the output of a module of the model), or
    None: nothing but the outputs. generation: the outputs are new tokens after prompts.
    Raises ModelError if the model has no such module.
    """

    def __init__(
        self, trainer: Trainer, keep: str | None = None, generation: Generation | None = None
    ) -> None:
        self.trainer = trainer
        self._generation = generation
        self._keep = keep
        self._module: nn.Module | None = None
        self._embedding: Any = None
        if keep is not None and keep.startswith("embeddings:"):
            name = keep.partition(":")[2]
            modules: dict[str, nn.Module] = dict(trainer.model.named_modules())
            if name not in modules:
                top = ", ".join(n for n in modules if n and "." not in n)
                raise ModelError(f"save={keep}: the model has no such module; it has {top}")
            self._module = modules[name]

    @torch.inference_mode()
    def __call__(self, loader: Loader) -> Iterator[Answers]:
        """Yield the outputs for each batch, gathered from all processes."""
        trainer = self.trainer
        told = 0
        with self.ready():
            expected = loader.sampler.walk(0, 0, len(loader))
            for whole, micro in zip(expected, loader.epoch(0, 0), strict=True):
                indices = micro.piece.indices[: micro.piece.count]
                values, kept = self.ask(trainer.to_device(micro.batch), len(indices))
                broken = {s.index: s.reason for s in loader.skipped[told:]}
                told = len(loader.skipped)
                lost = set(whole.indices[: whole.count]) - set(indices)
                own = Answers(indices, values, kept, {i: broken[i] for i in lost})
                yield from trainer.group.gather(own)

    def ask(
        self, batch: Any, count: int
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor] | None]:
        """Return the outputs for the first `count` samples of a batch, and the values to keep."""
        task = self.trainer.task
        try:
            with self.trainer.precision.autocast():
                if self._generation is None:
                    output = task.prediction_step(self.trainer.model, batch)
                    values = task.interpret(output)
                else:
                    logits_of = partial(task.prediction_step, self.trainer.model)
                    output = values = self._generation(logits_of, batch)
        except MISFITS as error:
            if (known := misfit(error, batch, 0)) is not None:
                raise known from error
            raise
        if self._keep is None:
            return _on_host(values, count), None
        kept = {"logits": output, "probabilities": values}.get(self._keep, self._embedding)
        if kept is None:
            raise ModelError(f"save={self._keep}: the model does not call it in its forward")
        self._embedding = None
        return _on_host(values, count), _on_host(kept, count)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Use the evaluated weights, in evaluation mode; draws are keyed by the seed alone."""
        trainer = self.trainer
        seed = derived(trainer.options.seed, "predict")
        with ExitStack() as stack:
            stack.enter_context(rng.keyed(trainer.strategy.device, seed))
            stack.enter_context(trainer.evaluation_weights())
            trainer.model.eval()
            if self._module is not None:
                stack.callback(self._module.register_forward_hook(self._embed).remove)
            yield

    def _embed(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._embedding = output[0] if isinstance(output, (tuple, list)) else output


def _on_host(value: Any, count: int) -> dict[str, Tensor]:
    found = named_tensors(value)
    if not found or any(not t.ndim or len(t) < count for t in found.values()):
        raise ModelError(
            f"the task's prediction_step returned {type(value).__name__}, which holds no tensors "
            "with an answer for each sample: give the task an `interpret` that makes such"
        )
    return {name: tensor[:count].cpu() for name, tensor in found.items()}


class Rows:
    """Turn outputs into rows, by the kind of the task's outputs.

    name_of: a sample's file, or its number in the data set, by index.
    mask_of: writes a mask and returns its path, by index and mask; None: masks as lists.
    prompt_of: the prompt of a sample, by index; None: the outputs are not text.
    """

    def __init__(
        self,
        facts: InferenceFacts,
        top_k: int,
        name_of: Callable[[int], str],
        mask_of: Callable[[int, Tensor], str] | None = None,
        prompt_of: Callable[[int], str] | None = None,
    ) -> None:
        self._facts = facts
        self._top_k = top_k
        self._name_of = name_of
        self._mask_of = mask_of
        self._prompt_of = prompt_of
        kinds: dict[str, Callable[[Sequence[int], Tensor], list[Row]]] = {
            "classes": self._likeliest,
            "labels": self._labels,
            "values": self._values,
            "mask": self._masks,
        }
        if prompt_of is not None:
            kinds["text"] = self._texts
        self._of_kind = kinds.get(facts.outputs["kind"])

    def __call__(self, answers: Answers) -> Iterator[Row]:
        """Yield the rows of a batch in the order of its samples, including broken ones."""
        if self._of_kind is None or OUTPUT not in answers.values:
            made = _columns(answers.values, len(answers.indices)) if answers.indices else []
        else:
            made = self._of_kind(answers.indices, answers.values[OUTPUT])
        rows = dict(zip(answers.indices, made, strict=True))
        for index in sorted((*rows, *answers.broken)):
            row = rows.get(index)
            name = {"file": self._name_of(index)}
            yield name | ({"error": answers.broken[index]} if row is None else row)

    def _name(self, number: int) -> str:
        return self._facts.classes[number] if self._facts.classes else str(number)

    def _likeliest(self, indices: Sequence[int], values: Tensor) -> list[Row]:
        best = values.topk(min(self._top_k, values.shape[1]), dim=1)
        rows = []
        for shares, numbers in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            row: Row = {}
            for place, (share, number) in enumerate(zip(shares, numbers, strict=True), start=1):
                row["prediction" if place == 1 else f"top{place}"] = self._name(number)
                row["probability" if place == 1 else f"probability{place}"] = share
            rows.append(row)
        return rows

    def _labels(self, indices: Sequence[int], values: Tensor) -> list[Row]:
        threshold = float(self._facts.outputs.get("threshold", 0.5))
        rows = []
        for shares in values.tolist():
            found = [(self._name(i), s) for i, s in enumerate(shares) if s > threshold]
            names, parts = [name for name, _ in found], [share for _, share in found]
            rows.append({"prediction": names, "probability": parts})
        return rows

    def _values(self, indices: Sequence[int], values: Tensor) -> list[Row]:
        mean, std = self._facts.outputs.get("scale", (0.0, 1.0))
        values = values * std + mean  # in the units of the file, as training standardised them
        if values.ndim == 1:
            return [{"prediction": value} for value in values.tolist()]
        return [
            {f"prediction{place}": value for place, value in enumerate(row, start=1)}
            for row in values.flatten(1).tolist()
        ]

    def _masks(self, indices: Sequence[int], values: Tensor) -> list[Row]:
        if self._mask_of is None:
            return [{"prediction": mask.tolist()} for mask in values]
        return [{"prediction": self._mask_of(i, m)} for i, m in zip(indices, values, strict=True)]

    def _texts(self, indices: Sequence[int], values: Tensor) -> list[Row]:
        assert self._prompt_of is not None
        rows = []
        for index, tokens in zip(indices, values.tolist(), strict=True):
            if self._facts.inputs.get("encoding") == "bytes":
                text = bytes(tokens).decode(errors="replace")  # they may end within a character
            else:
                text = "".join(map(self._name, tokens))
            rows.append({"prompt": self._prompt_of(index), "prediction": text})
        return rows


def _columns(values: Mapping[str, Tensor], count: int) -> list[Row]:
    """Return the numbers of outputs without a known meaning; of large ones the shape."""
    rows: list[Row] = [{} for _ in range(count)]
    for name, tensor in values.items():
        single = name == OUTPUT
        if tensor[0].numel() > _COLUMNS:
            key, shape = "shape" if single else f"{name}_shape", list(tensor.shape[1:])
            for row in rows:
                row[key] = shape
            continue
        name = "prediction" if single else name
        for row, numbers in zip(rows, tensor.reshape(count, -1).tolist(), strict=True):
            if tensor.ndim == 1:
                row[name] = numbers[0]
            else:
                row |= {f"{name}{place}": number for place, number in enumerate(numbers, start=1)}
    return rows
