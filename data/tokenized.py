"""Tokenized texts in memory, padded to the longest of a micro-batch or to one length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import default_collate

from regimen.conf.errors import ConfigError
from regimen.data.batch import IGNORED
from regimen.data.errors import DataError
from regimen.data.sources import digest_of

Padding = Literal["longest", "max_length"]
TooLong = Literal["cut", "error"]
LABELS = "labels"
_TRIED = 12  # tokens of the text that a model is tried with
_EMPTY = 3  # places behind it


class Encoded(NamedTuple):
    """What a tokenizer returned for some texts: integers of each token, [tokens] of all texts."""

    columns: dict[str, NDArray[np.int64]]  # `input_ids`, and what else the model is given
    starts: NDArray[np.int64]  # of each text in them, and the end of the last
    words: list[list[int | None]]  # the word of each token, by text; empty if texts are whole
    fill: dict[str, int]  # what a place without a token has, by column
    cut: set[int]  # which texts were longer


@dataclass(eq=False, repr=False)
class TokenizedSamples:
    """Samples are dicts of int64 tensors [length], as models of transformers take them by name.

    encoded: the tokens. `input_ids`, `attention_mask` and so on are what the tokenizer returns.
    names: where each text comes from (FILE:LINE).
    shown: what `predict` writes beside the answer to each text, by column.
    form: what new texts need, for `inference.json`.
    targets: `labels` of a sample is a number [n], below 0 if it has none.
    token_labels: `labels` are a class for each token, or -100 [tokens of all texts].
    is_first: which tokens are the first of a word, [tokens of all texts].
    classes: names of the classes. has_labels: without any, an evaluation has nothing to measure.
    length: tokens of each sample, empty places included; None: a micro-batch has the length of its
    longest. Empty places are behind the text: no model that takes an `attention_mask`, or reads
    from left to right, sees them.
    """

    encoded: Encoded
    names: Sequence[str]
    shown: Mapping[str, Sequence[Any]]
    form: Mapping[str, Any]
    targets: Tensor | None = None
    token_labels: NDArray[np.int64] | None = None
    is_first: NDArray[np.bool_] | None = None
    classes: list[str] | None = None
    has_labels: bool = True
    length: int | None = None
    remarks: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        own = self._tokens_of(index)
        sample = {}
        for name, values in self.encoded.columns.items():
            sample[name] = torch.from_numpy(values[own])
        if self.token_labels is not None:
            sample[LABELS] = torch.from_numpy(self.token_labels[own])
        if self.length is not None:
            sample = self._padded(sample, self.length)
        if self.targets is not None:
            sample[LABELS] = self.targets[index]
        return sample

    def collate_batch(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack samples, padded to the longest of them."""
        longest = max(len(sample["input_ids"]) for sample in samples)
        padded = [self._padded(sample, longest) for sample in samples]
        batch: dict[str, Tensor] = default_collate(padded)
        return batch

    def padding_trial(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the inputs [1, length] of the first text, and with empty places behind it.

        Of a longer text it is the beginning: the model has positions for it.
        """
        own = self._tokens_of(0)
        alone = {}
        for name, values in self.encoded.columns.items():
            alone[name] = torch.from_numpy(values[own][:_TRIED])
        padded = self._padded(alone, len(alone["input_ids"]) + _EMPTY)
        return default_collate([alone]), default_collate([padded])

    def path(self, index: int) -> str:
        """Return the name of a text: its file and line."""
        return self.names[index]

    def shown_of(self, index: int) -> dict[str, Any]:
        """Return what `predict` writes beside an answer: the text."""
        return {name: values[index] for name, values in self.shown.items()}

    def word_places(self, index: int) -> list[int] | None:
        """Return the places of the tokens that stand for words; None if texts are whole."""
        if self.is_first is None:
            return None
        places: list[int] = np.flatnonzero(self.is_first[self._tokens_of(index)]).tolist()
        return places

    def renumber(self, classes: Sequence[str]) -> None:
        """Number the classes by their places in other names, which hold all of them."""
        numbers = np.array([classes.index(name) for name in self.classes or ()])
        for labels in self._labels():
            is_class = labels >= 0
            labels[is_class] = numbers[labels[is_class]]
        self.classes = [*classes]

    def input_form(self) -> dict[str, Any]:
        """Return the form of the texts, for `predict`."""
        return dict(self.form)

    def fingerprint(self) -> str:
        """Return a digest of tokens and labels."""
        form = f"{self.length} {self.classes} {[*self.encoded.columns]}"
        columns = self.encoded.columns.values()
        return digest_of(form, *columns, self.encoded.starts, *self._labels())

    def explain(self) -> list[str]:
        """Return what the plan says about the texts."""
        lengths = np.diff(self.encoded.starts)
        size = "the longest of a micro-batch"
        if self.length is not None:
            size = f"{self.length:,} tokens"
        return [
            f"{len(self):,} texts of {lengths.min():,} to {lengths.max():,} tokens, padded to "
            f"{size}",
            *self.remarks,
        ]

    def _labels(self) -> list[NDArray[Any]]:
        """Return the labels that there are; they share the memory of the samples'."""
        labels = list[NDArray[Any]]()
        if self.token_labels is not None:
            labels.append(self.token_labels)
        if self.targets is not None:
            labels.append(self.targets.numpy())
        return labels

    def _tokens_of(self, index: int) -> slice:
        return slice(self.encoded.starts[index], self.encoded.starts[index + 1])

    def _padded(self, sample: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
        padded = {}
        for name, values in sample.items():
            padded[name] = values
            if values.ndim:  # the label of a whole text has no length
                fill = self.encoded.fill.get(name, IGNORED)
                padded[name] = pad(values, (0, length - len(values)), value=fill)
        return padded


def encode(
    tokenizer: Any,
    texts: Sequence[Sequence[Any]],
    names: Sequence[str],
    length: int,
    too_long: TooLong,
    in_words: bool = False,
) -> Encoded:
    """Return the tokens of texts, or of pairs of texts.

    texts: the first texts of all samples, and the second ones of pairs; with `in_words` texts are
    lists of words. names: of the samples, for messages.
    length: tokens that a sample may have; of a longer one the end is cut off, of a pair the end of
    the longer text, unless `too_long` is "error".
    Raises DataError and ConfigError.
    """
    check_length(tokenizer, length)
    tokenizer.truncation_side = "right"
    try:
        encoded = tokenizer(*texts, verbose=False, is_split_into_words=in_words)
    except AssertionError as error:  # byte-level tokenizers, of words without blanks
        raise ConfigError(
            "data.tokenizer",
            f"{type(tokenizer).__name__} does not take words: {error}",
            "save one with add_prefix_space=True",
        ) from error
    cut = set[int]()
    for number, tokens in enumerate(encoded["input_ids"]):
        if not tokens:
            raise DataError(f"{names[number]}: its text has no token: take it out")
        if len(tokens) <= length:
            continue
        if too_long == "error":
            raise DataError(
                f"{names[number]}: {len(tokens):,} tokens are more than data.length={length}: set "
                "data.length, or data.too_long=cut"
            )
        cut.add(number)
    if cut:
        encoded = tokenizer(
            *texts, truncation=True, max_length=length, is_split_into_words=in_words
        )
    words = []
    if in_words:
        words = [encoded.word_ids(number) for number in range(len(names))]
    lengths = [len(row) for row in encoded["input_ids"]]
    flat = {}
    for name, rows in encoded.items():
        flat[name] = np.fromiter(chain.from_iterable(rows), np.int64, sum(lengths))
    fill = dict.fromkeys(flat, 0)
    fill["input_ids"] = tokenizer.pad_token_id
    if "token_type_ids" in fill:
        fill["token_type_ids"] = tokenizer.pad_token_type_id
    return Encoded(flat, np.concatenate([[0], np.cumsum(lengths)]), words, fill, cut)


def check_length(tokenizer: Any, length: int) -> None:
    """Raise ConfigError for a tokenizer that cannot pad, or cannot cut texts to a length."""
    name = tokenizer.name_or_path
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            "data.tokenizer",
            f"{name} has no padding token",
            "give it one, such as tokenizer.pad_token = tokenizer.eos_token, its model the same "
            "(model.config.pad_token_id), and save both",
        )
    if length > tokenizer.model_max_length:
        raise ConfigError(
            "data.length",
            f"is {length}, and {name} takes {tokenizer.model_max_length} tokens at most",
            f"set data.length={tokenizer.model_max_length}",
        )
    special = tokenizer.num_special_tokens_to_add()
    if length <= special:
        raise ConfigError(
            "data.length", f"is {length}, of which the tokenizer's own tokens take {special}"
        )
