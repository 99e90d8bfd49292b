"""One row for each sample: a model's outputs as names and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from trainer.errors import ModelError
from trainer.inference.facts import InferenceFacts
from trainer.inference.predictor import Answers

Row = dict[str, Any]


class Rows:
    """Turn outputs into rows, by the kind of the task's outputs.

    name_of: a sample's file, or its number in the data set, by index.
    mask_of: writes a mask and returns its path, by index and mask; None: no rows for masks.
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
        self._classes = facts.classes
        self._in_bytes = facts.inputs.get("encoding") == "bytes"
        self._threshold = float(facts.outputs.get("threshold", 0.5))
        self._mean, self._std = facts.outputs.get("scale", (0.0, 1.0))
        self._top_k = top_k
        self._name_of = name_of
        self._mask_of = mask_of
        self._prompt_of = prompt_of
        kinds: dict[str, Callable[[Sequence[int], Tensor], list[Row]]] = {
            "classes": self._likeliest,
            "labels": self._labels,
            "values": self._values,
            "mask": self._masks,
            "text": self._texts,
            "array": self._shapes,
        }
        kind = facts.outputs["kind"]
        if kind not in kinds:
            raise ModelError(f"task.output_kind is {kind!r}, not one of {', '.join(kinds)}")
        self._of_kind = kinds[kind]

    def __call__(self, answers: Answers) -> Iterator[Row]:
        """Yield the rows of a batch in the order of its samples, including broken ones."""
        rows = dict(
            zip(answers.indices, self._of_kind(answers.indices, answers.values), strict=True)
        )
        for index in sorted((*rows, *answers.broken)):
            row = rows.get(index)
            name = {"file": self._name_of(index)}
            yield name | ({"error": answers.broken[index]} if row is None else row)

    def _name(self, number: int) -> str:
        return self._classes[number] if self._classes else str(number)

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
        rows = []
        for shares in values.tolist():
            found = [(self._name(i), s) for i, s in enumerate(shares) if s > self._threshold]
            names, parts = [name for name, _ in found], [share for _, share in found]
            rows.append({"prediction": names, "probability": parts})
        return rows

    def _values(self, indices: Sequence[int], values: Tensor) -> list[Row]:
        values = (
            values * self._std + self._mean
        )  # in the units of the file, as training standardised them
        if values.ndim == 1:
            return [{"prediction": value} for value in values.tolist()]
        return [
            {f"prediction{place}": value for place, value in enumerate(row, start=1)}
            for row in values.flatten(1).tolist()
        ]

    def _masks(self, indices: Sequence[int], values: Tensor) -> list[Row]:
        if self._mask_of is None:
            return [{"prediction": mask.tolist()} for mask in values]
        return [
            {"prediction": self._mask_of(index, mask)}
            for index, mask in zip(indices, values, strict=True)
        ]

    def _texts(self, indices: Sequence[int], values: Tensor) -> list[Row]:
        if self._prompt_of is None:
            return self._shapes(indices, values)
        return [
            {"prompt": self._prompt_of(index), "prediction": self._text(tokens)}
            for index, tokens in zip(indices, values.tolist(), strict=True)
        ]

    def _text(self, tokens: Sequence[int]) -> str:
        if self._in_bytes:
            return bytes(tokens).decode(errors="replace")  # they may end within a character
        return "".join(map(self._name, tokens))

    def _shapes(self, indices: Sequence[int], values: Tensor) -> list[Row]:
        return [{"shape": list(values.shape[1:])} for _ in indices]
