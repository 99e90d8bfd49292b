"""Documents of tokens in rows of one length, packed so that few places stay empty."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from regimen.data.batch import IGNORED
from regimen.data.questions import Question, Questions
from regimen.data.sources import digest_of


class TokenizedText(NamedTuple):
    """The tokens of one document, and which of them are learnt; both have shape [length]."""

    tokens: NDArray[np.int64]
    is_learnt: NDArray[np.bool_]


def first_fit_decreasing(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the documents of each row, by number: no row is longer than `size`.

    The longest document comes first, of equal ones the earlier. Each goes into the first row that
    has room for it. The result depends on the lengths alone. Takes n log n steps. Raises ValueError
    for a document that is longer than a row.
    """
    if max(lengths, default=0) > size:
        raise ValueError(f"a document of {max(lengths)} tokens is longer than a row of {size}")
    # A binary tree over as many rows as there are documents: each node holds the largest room of
    # the rows below it, so the first row with enough room is found by descending once.
    leaves = 1
    while leaves < len(lengths):
        leaves *= 2
    room = [size] * (2 * leaves)
    rows = list[list[int]]()
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[document]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        row = node - leaves
        if row == len(rows):
            rows.append([])
        rows[row].append(document)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


class PackedDocuments:
    """Rows of `context` tokens that hold whole documents: samples for language models.

    A sample is a dict of int64 tensors [context]:

    input_ids: the tokens of the row's documents, one after the other, then zeros.
    position_ids: 0, 1, 2, ... of each document, and 0 of each place that is empty. Models of
        transformers whose forward takes them, and no `attention_mask`, attend from a token to those
        of its own document only.
    labels: the token at each place if it is learnt, else -100. They are not shifted.
    prompts: only with `questions`: those of the row's documents, as `Questions.tensors` returns
        them.

    `pack`: several documents share a row; without, each has its own. How documents are packed
    depends on their lengths and `context` alone, so it is the same in every epoch and process.
    """

    def __init__(
        self,
        documents: Sequence[TokenizedText],
        context: int,
        pack: bool = True,
        num_classes: int | None = None,
        remarks: Sequence[str] = (),
        questions: Sequence[Question | None] | None = None,
        end_tokens: Sequence[int] = (),
        form: Mapping[str, Any] | None = None,
    ) -> None:
        """`num_classes`: tokens of the vocabulary. `remarks`: on the data, for `explain`.

        `questions`: one for each document, of which any of the `end_tokens` ends an answer. `form`:
        of the samples, for `predict`.
        """
        lengths = [len(document.tokens) for document in documents]
        self.context = context
        self.num_classes = num_classes
        self.rows = [[number] for number in range(len(lengths))]
        if pack:
            self.rows = first_fit_decreasing(lengths, context)
        self._starts = [0, *np.cumsum(lengths).tolist()]
        self._tokens = np.concatenate([document.tokens for document in documents])
        is_learnt = np.concatenate([document.is_learnt for document in documents])
        # Nothing precedes the first token of a document: no model can predict it.
        is_learnt[self._starts[:-1]] = False
        self._labels = np.where(is_learnt, self._tokens, IGNORED)
        self._remarks = list(remarks)
        self._form = {"kind": "array", **(form or {})}
        self._questions: Questions | None = None
        if questions is not None:
            places = 0  # the most questions of a row
            for row in self.rows:
                asked = [number for number in row if questions[number] is not None]
                places = max(places, len(asked))
            self._questions = Questions(questions, end_tokens, places)

    @property
    def is_packed(self) -> bool:
        """Whether any row holds more than one document."""
        return any(len(row) > 1 for row in self.rows)

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt; None if the samples hold no prompts."""
        return None if self._questions is None else self._questions.longest_prompt

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        input_ids = torch.zeros(self.context, dtype=torch.int64)
        position_ids = torch.zeros(self.context, dtype=torch.int64)
        labels = torch.full((self.context,), IGNORED)
        begin = 0
        for document in self.rows[index]:
            own = slice(self._starts[document], self._starts[document + 1])
            end = begin + own.stop - own.start
            input_ids[begin:end] = torch.from_numpy(self._tokens[own])
            position_ids[begin:end] = torch.arange(end - begin)
            labels[begin:end] = torch.from_numpy(self._labels[own])
            begin = end
        sample: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "labels": labels,
        }
        if self._questions is not None:
            sample["prompts"] = self._questions.tensors(self.rows[index])
        return sample

    def input_form(self) -> dict[str, Any]:
        """Return the form of the samples, for `predict`."""
        return dict(self._form)

    def fingerprint(self) -> str:
        """Return a digest of the tokens, the labels and the rows."""
        places = f"{self.context} {self.rows} {self._starts}"
        return digest_of(places, self._tokens, self._labels)

    def explain(self) -> list[str]:
        """Return what the plan says about the rows, and how much of them is learnt."""
        tokens = len(self._tokens)
        learnt = int((self._labels != IGNORED).sum())
        places = len(self.rows) * self.context
        return [
            f"{len(self._starts) - 1:,} conversations in {len(self.rows):,} rows of "
            f"{self.context:,} tokens, {tokens / places:.1%} of them filled; {learnt:,} of "
            f"{tokens:,} tokens are learnt ({learnt / tokens:.1%})",
            *self._remarks,
        ]
