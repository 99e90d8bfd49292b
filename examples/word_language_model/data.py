"""Words in columns: a text that a recurrent network reads from batch to batch."""

import functools
import re
from collections import Counter

import torch
from torch import Tensor

from regimen.data.splits import Split, unlabelled_parts
from regimen.data.text import MODULES, docstrings

Sample = tuple[tuple[Tensor, int], Tensor]


class Words:
    """The words of the standard library's docstrings, read in `columns` columns at once.

    The text is cut into `columns` parts of one length, and these into windows of `bptt` words, the
    last ones shorter. Samples are `((words, column), following words)`, ordered by window, then by
    column: a batch of `columns` samples, unshuffled, goes on where the batch before it ended.

    min_count: words that are rarer in the training text are `<unk>`.
    """

    def __init__(
        self, split: Split, columns: int, bptt: int = 35, min_count: int = 3, split_seed: int = 0
    ) -> None:
        texts = _texts(split_seed)
        self.classes = _dictionary(texts["train"], min_count)
        numbers = {word: number for number, word in enumerate(self.classes)}
        words = torch.tensor([numbers.get(word, 0) for word in texts[split]])
        length = len(words) // columns
        self.text = words[: columns * length].view(columns, length)
        self._bptt = bptt

    def __len__(self) -> int:
        columns, length = self.text.shape
        windows = -(-(length - 1) // self._bptt)
        return windows * columns

    def __getitem__(self, index: int) -> Sample:
        window, column = divmod(index, len(self.text))
        start = window * self._bptt
        words = self.text[column, start : start + self._bptt + 1]
        return (words[:-1], column), words[1:]


@functools.cache
def _texts(split_seed: int) -> dict[str, list[str]]:
    strings = [string for module in MODULES.split() for string in docstrings(module)]
    tenth = len(strings) // 10  # of the strings, for val, and as many for test
    parts = unlabelled_parts(len(strings), tenth, 3, split_seed, fold=0, folds=0)
    texts = dict[str, list[str]]()
    for split, numbers in parts.items():
        texts[split] = []
        for number in sorted(numbers):
            for line in strings[number].splitlines():
                texts[split] += [*re.findall(r"\w+|[^\w\s]", line), "<eos>"]
    return texts


def _dictionary(words: list[str], min_count: int) -> list[str]:
    counts = Counter(words)
    return ["<unk>", *sorted(word for word, count in counts.items() if count >= min_count)]
