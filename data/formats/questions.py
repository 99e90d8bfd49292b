"""Conversations of a jsonl file that a trained model is to answer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from regimen.data.errors import DataError, UnreadableError
from regimen.data.formats.chat import Encoder
from regimen.data.formats.jsonl import Row, read_rows
from regimen.data.questions import Question, Questions

ANSWER = "answer"  # the key of what a model writes


class QuestionFile:
    """The rows of a file as samples `{"prompts"}`; see `Questions.tensors`.

    A row is `{"messages"}` or `{"prompt"}`, as `Encoder.prompt` takes them. One that asks nothing
    raises UnreadableError, with the reason that `faults` has. Raises DataError for a file without
    rows, or that cannot be read, and ConfigError.
    """

    def __init__(self, path: str, encoder: Encoder) -> None:
        self.rows = list(read_rows(Path(path).expanduser()))
        if not self.rows:
            raise DataError(f"source={path} holds no conversation: one a line, as JSON")
        self.faults: dict[int, str] = {}
        nothing = np.zeros(0, dtype=np.int64)
        questions = list[Question | None]()
        for number, row in enumerate(self.rows):
            question = None
            try:
                question = Question(_prompt(encoder, row), nothing)
            except DataError as error:
                self.faults[number] = str(error)
            questions.append(question)
        self._questions = Questions(questions, encoder.end_tokens)

    def __len__(self) -> int:
        return len(self.rows)

    def path(self, index: int) -> str:
        """Return the name of a row: its file and line."""
        return self.rows[index].name

    def stand_in(self) -> dict[str, dict[str, Tensor]]:
        """Return a sample for a batch without a row that asks something."""
        return {"prompts": self._questions.tensors([])}

    def __getitem__(self, index: int) -> dict[str, dict[str, Tensor]]:
        if index in self.faults:
            raise UnreadableError(self.faults[index])
        return {"prompts": self._questions.tensors([index])}

    def values(self, index: int) -> Mapping[str, Any]:
        """Return the keys that a row has."""
        return self.rows[index].values


def _prompt(encoder: Encoder, row: Row) -> Any:
    if ANSWER in row.values:
        raise DataError(
            f"{row.name}: has a key {ANSWER!r}, which the model's answer would take the place of: "
            "give it another name"
        )
    return encoder.prompt(row)
