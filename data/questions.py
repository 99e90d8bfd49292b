"""What a language model is asked: prompts in tensors of one shape, whichever batch holds them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regimen.data.batch import NO_TOKEN


class Question(NamedTuple):
    """The tokens of a prompt, and those of the answer that the data give: both [length]."""

    prompt: NDArray[np.int64]
    reference: NDArray[np.int64]


class Questions:
    """The questions of a data set, by number; None stands for a document without one.

    end_tokens: any of them ends an answer. places: the most questions that one sample holds.
    """

    def __init__(
        self, questions: Sequence[Question | None], end_tokens: Sequence[int], places: int = 1
    ) -> None:
        self._questions = questions
        self._ends = torch.tensor(list(end_tokens), dtype=torch.int64)
        self._places = places
        self.longest_prompt = 0
        self._longest_reference = 0
        for question in questions:
            if question is not None:
                self.longest_prompt = max(self.longest_prompt, len(question.prompt))
                self._longest_reference = max(self._longest_reference, len(question.reference))

    def tensors(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return some questions as int64 tensors, whose shapes are the same for any of them.

        tokens [places, longest prompt]: each prompt at the right, zeros at its left.
        lengths [places]: tokens of each prompt; 0 where there is no question.
        references [places, longest reference]: each at the left, then -100.
        numbers [places]: which question it is.
        ends [count]: the tokens that end an answer.
        """
        tokens = torch.zeros(self._places, self.longest_prompt, dtype=torch.int64)
        lengths = torch.zeros(self._places, dtype=torch.int64)
        references = torch.full((self._places, self._longest_reference), NO_TOKEN)
        question_numbers = torch.zeros(self._places, dtype=torch.int64)
        place = 0  # the next one that is free
        for number in numbers:
            question = self._questions[number]
            if question is None:
                continue
            length = len(question.prompt)
            tokens[place, self.longest_prompt - length :] = torch.from_numpy(question.prompt)
            lengths[place] = length
            reference = torch.from_numpy(question.reference)
            references[place, : len(reference)] = reference
            question_numbers[place] = number
            place += 1
        return {
            "tokens": tokens,
            "lengths": lengths,
            "references": references,
            "numbers": question_numbers,
            "ends": self._ends,
        }
