"""The outputs of a trained model: for the samples of a loader, in order, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from data.loading.loader import Loader
from trainer import rng
from trainer.errors import MISFITS, ModelError, misfit
from trainer.inference.facts import InferenceFacts
from trainer.rng import derived
from trainer.trainer import Trainer

Row = dict[str, Any]
Sampling = Literal["greedy", "random"]
OUTPUT = "output"  # the name of an output that is one tensor
_COLUMNS = 16  # numbers of a sample that have columns of a table; more are an array


def named_tensors(value: Any, name: str = OUTPUT) -> dict[str, Tensor]:
    """Return the tensors of an output by name: a dict's keys, or `output1`, ... of a tuple.

    What is no tensor is left out; names within names are joined by `_`.
    """
    if isinstance(value, Tensor):
        return {name: value}
    above = "" if name == OUTPUT else f"{name}_"
    parts: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        parts = value
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", [f"output{n}" for n in range(1, len(value) + 1)])
        parts = dict(zip(fields, value, strict=True))
    found: dict[str, Tensor] = {}
    for key, part in parts.items():
        found |= named_tensors(part, f"{above}{key}")
    return found


@dataclass(frozen=True, slots=True)
class Generation:
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
        on its own and earlier positions only. batch: what `data.text.Prompts` returns, collated.
        """
        window, lengths, numbers = batch
        draws = self._draws(numbers.tolist())
        rows = torch.arange(len(window), device=window.device)
        longest, context = int(lengths.max()), window.shape[1]
        found = []
        for step in range(self.max_new_tokens):
            logits = logits_of(window[:, :longest])[rows, :, lengths - 1]
            token = self._choose(logits, draws[:, step])
            found.append(token)
            full = lengths == context
            window = torch.where(full[:, None], window.roll(-1, 1), window)
            place = lengths.clamp(max=context - 1)
            window = window.scatter(1, place[:, None], token[:, None])
            lengths = place + 1
            longest = min(longest + 1, context)
        return torch.stack(found, 1)

    def _draws(self, numbers: Sequence[int]) -> Tensor:
        """Return a number from 0 to 1 for each new token of each prompt, on the host."""
        draws = torch.zeros(len(numbers), self.max_new_tokens, dtype=torch.float64)
        for row, number in zip(draws, numbers, strict=True) if self.sampling == "random" else ():
            generator = torch.Generator().manual_seed(derived(self.seed, "generate", number))
            torch.rand(len(row), generator=generator, dtype=torch.float64, out=row)
        return draws

    def _choose(self, logits: Tensor, draw: Tensor) -> Tensor:
        """Return a token for each row of logits [n, vocabulary]."""
        if self.sampling == "greedy":
            return logits.argmax(1)
        scaled = logits.double() / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[1]:
            least = scaled.topk(self.top_k, dim=1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        shares = scaled.softmax(1).cumsum(1)
        # The share that the draw falls into; one of probability 0 has no width.
        wanted = draw.to(shares)[:, None] * shares[:, -1:]
        return (shares <= wanted).sum(1).clamp(max=shares.shape[1] - 1)


@dataclass(frozen=True, slots=True)
class Answers:
    """The outputs for some samples on the host, of one process."""

    indices: Sequence[int]  # of the samples that were read
    values: Mapping[str, Tensor]  # what `Task.interpret` returned, [n, ...] by name
    kept: Mapping[str, Tensor]  # the values to save for each sample, [n, ...] by name
    broken: dict[int, str] = field(default_factory=dict)  # samples not read, and why


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
            modules: dict[str, nn.Module] = dict(trainer.model.named_modules())
            self._module = modules.get(keep.partition(":")[2])
            if self._module is None:
                top = ", ".join(n for n in modules if n and "." not in n)
                raise ModelError(f"save={keep}: the model has no such module; it has {top}")

    @torch.inference_mode()
    def __call__(self, loader: Loader) -> Iterator[Answers]:
        """Yield the outputs for each batch, gathered from all processes."""
        trainer, told = self.trainer, 0
        with self.ready():
            expected = loader.sampler.walk(0, 0, len(loader))
            for whole, micro in zip(expected, loader.epoch(0, 0), strict=True):
                indices = micro.piece.indices[: micro.piece.count]
                own = self.ask(trainer.to_device(micro.batch), indices)
                reasons = {s.index: s.reason for s in loader.skipped[told:]}
                told = len(loader.skipped)
                lost = set(whole.indices[: whole.count]) - set(indices)
                own.broken.update((index, reasons[index]) for index in lost)
                yield from trainer.group.gather(own)

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
        except MISFITS as error:
            if (known := misfit(error, batch, 0)) is not None:
                raise known from error
            raise
        kept = {"logits": output, "probabilities": values}.get(self._keep or "", self._embedding)
        if self._keep is not None and kept is None:
            raise ModelError(f"save={self._keep}: the model does not call it in its forward")
        count = len(indices)
        saved = {} if self._keep is None else _on_host(kept, count)
        return Answers(indices, _on_host(values, count), saved)

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


@dataclass(frozen=True, slots=True)
class Rows:
    """Turn outputs into rows, by the kind of the task's outputs.

    name_of: a sample's file, or its number in the data set, by index.
    mask_of: writes a mask and returns its path, by index and mask; None: masks as lists.
    prompts: the prompt of each sample; None: the outputs are not text.
    """

    facts: InferenceFacts
    top_k: int = 1
    name_of: Callable[[int], str] = str
    mask_of: Callable[[int, Tensor], str] | None = None
    prompts: Sequence[str] | None = None

    def __call__(self, answers: Answers) -> Iterator[Row]:
        """Yield the rows of a batch in the order of its samples, including broken ones."""
        rows: dict[int, Row] = {index: {"error": why} for index, why in answers.broken.items()}
        if answers.indices:
            made = self._made(answers.indices, answers.values)
            rows |= dict(zip(answers.indices, made, strict=True))
        for index in sorted(rows):
            yield {"file": self.name_of(index)} | rows[index]

    def _made(self, indices: Sequence[int], values: Mapping[str, Tensor]) -> list[Row]:
        kind = self.facts.outputs["kind"] if OUTPUT in values else None
        if kind == "classes":
            return self._likeliest(values[OUTPUT])
        if kind == "labels":
            return self._labels(values[OUTPUT])
        if kind == "values":
            return self._values(values[OUTPUT])
        if kind == "mask":
            masks = zip(indices, values[OUTPUT], strict=True)
            path_of: Callable[[int, Tensor], Any] = self.mask_of or (lambda _, mask: mask.tolist())
            return [{"prediction": path_of(index, mask)} for index, mask in masks]
        if kind == "text" and self.prompts is not None:
            texts = zip(indices, values[OUTPUT].tolist(), strict=True)
            return [{"prompt": self.prompts[i], "prediction": self._text(t)} for i, t in texts]
        return _columns(values, len(indices))

    def _name(self, number: int) -> str:
        return self.facts.classes[number] if self.facts.classes else str(number)

    def _likeliest(self, values: Tensor) -> list[Row]:
        best = values.topk(min(self.top_k, values.shape[1]), dim=1)
        rows = []
        for shares, numbers in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            row: Row = {}
            for place, (share, number) in enumerate(zip(shares, numbers, strict=True), start=1):
                row["prediction" if place == 1 else f"top{place}"] = self._name(number)
                row["probability" if place == 1 else f"probability{place}"] = share
            rows.append(row)
        return rows

    def _labels(self, values: Tensor) -> list[Row]:
        threshold = float(self.facts.outputs.get("threshold", 0.5))
        rows = []
        for shares in values.tolist():
            found = {self._name(i): share for i, share in enumerate(shares) if share > threshold}
            rows.append({"prediction": list(found), "probability": list(found.values())})
        return rows

    def _values(self, values: Tensor) -> list[Row]:
        mean, std = self.facts.outputs.get("scale", (0.0, 1.0))
        values = values * std + mean  # in the units of the file, as training standardised them
        if values.ndim == 1:
            return [{"prediction": value} for value in values.tolist()]
        return [
            {f"prediction{place}": value for place, value in enumerate(row, start=1)}
            for row in values.flatten(1).tolist()
        ]

    def _text(self, tokens: Sequence[int]) -> str:
        if self.facts.inputs.get("encoding") == "bytes":
            return bytes(tokens).decode(errors="replace")  # they may end within a character
        return "".join(map(self._name, tokens))


def _columns(values: Mapping[str, Tensor], count: int) -> list[Row]:
    """Return the numbers of outputs without a known meaning; of large ones the shape."""
    rows: list[Row] = [{} for _ in range(count)]
    for name, tensor in values.items():
        column = "prediction" if name == OUTPUT else name
        shape = {"shape" if name == OUTPUT else f"{name}_shape": list(tensor.shape[1:])}
        for row, numbers in zip(rows, tensor.reshape(count, -1).tolist(), strict=True):
            if len(numbers) > _COLUMNS:
                row |= shape
            elif tensor.ndim == 1:
                row[column] = numbers[0]
            else:
                row |= {f"{column}{place}": number for place, number in enumerate(numbers, start=1)}
    return rows
