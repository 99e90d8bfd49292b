"""Sentences whose words have tags, from jsonl files and from those in CoNLL's columns."""

import logging
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regimen.data.batch import IGNORED
from regimen.data.errors import DataError
from regimen.data.formats.jsonl import read_lines, read_rows
from regimen.data.splits import Split, part_of_train, source_of_split, split_file
from regimen.data.tokenized import Padding, TokenizedSamples, TooLong, encode
from regimen.data.tokenizers import load_fast_tokenizer

logger = logging.getLogger(__name__)
ENDINGS = (".jsonl", ".conll", ".txt")


class Sentence(NamedTuple):
    """The words of a sentence, their tags if it has any, and its place (FILE:LINE)."""

    name: str
    words: list[str]
    tags: list[str] | None


def tagged_words(
    root: str,
    split: Split,
    tokenizer: str | None,
    length: int = 256,
    padding: Padding = "longest",
    too_long: TooLong = "error",
    val_fraction: float = 0.1,
    split_seed: int = 0,
    fold: int = 0,
    folds: int = 0,
) -> TokenizedSamples | None:
    """Open one split of sentences with a tag for each word.

    root: a folder with train, val and test, or a single file: .jsonl with lines `{"words": [...],
        "tags": [...]}`, or .conll or .txt with a word and its tag on a line, an empty line between
        sentences.
    too_long: of a sentence with more than `length` tokens: "error", or "cut" its end off, whose
        words are then neither learnt nor counted.

    `labels` are the number of a word's tag at its first token, and -100 elsewhere. Tags are those
    of train. Without a file for `val`, a part of train is taken; with `folds` val is fold number
    `fold` of train. None if there is no such split. Raises DataError, with the file and the line,
    and ConfigError.
    """
    find = partial(split_file, Path(root).expanduser(), suffixes=ENDINGS)
    train = find("train")
    if train is None and split == "train":
        raise DataError(
            f"data.root={root}: no such file, nor a folder with a train as {', '.join(ENDINGS)}"
        )
    own, is_part = source_of_split(find, split, val_fraction, folds)
    if own is None:
        return None

    sentences = read_sentences(own)
    known = sentences
    # An evaluation may open a folder without train: the run says which numbers tags have.
    if train is not None and train != own:
        known = read_sentences(train)
    tags = set[str]()
    for sentence in known:
        tags.update(sentence.tags or ())
    classes = sorted(tags)
    if is_part:
        sentences = part_of_train(split, sentences, val_fraction, split_seed, fold, folds)
    samples = tokenized_words(sentences, tokenizer, length, padding, too_long)
    samples.token_labels = _labels(sentences, classes, samples)
    samples.classes = classes
    return samples


def tokenized_words(
    sentences: Sequence[Sentence],
    tokenizer: str | None,
    length: int,
    padding: Padding = "longest",
    too_long: TooLong = "error",
) -> TokenizedSamples:
    """Return sentences as samples without labels. Raises DataError and ConfigError."""
    names = [sentence.name for sentence in sentences]
    words = [sentence.words for sentence in sentences]
    loaded = load_fast_tokenizer(tokenizer, "the words of the tokens are found")
    encoded = encode(loaded, [words], names, length, too_long, in_words=True)
    is_first = np.zeros(encoded.starts[-1], dtype=bool)
    for number, words_of_tokens in enumerate(encoded.words):
        start = encoded.starts[number]
        previous = -1
        for place, word in enumerate(words_of_tokens):
            if word is not None and word != previous:
                is_first[start + place] = True
                previous = word
        reached = len(words[number])
        if number in encoded.cut:
            reached = previous + 1
        _check_words(sentences[number], words_of_tokens, reached)
    remarks = []
    if encoded.cut:
        remarks.append(
            f"{len(encoded.cut):,} sentences are longer than data.length={length}: the words at "
            "their ends are neither learnt nor counted"
        )
        logger.warning("warning: %s", remarks[0])
    form = {"kind": "words", "tokenizer": tokenizer, "length": length, "too_long": too_long}
    return TokenizedSamples(
        encoded,
        names,
        {"words": words},
        form,
        is_first=is_first,
        length=length if padding == "max_length" else None,
        remarks=remarks,
    )


def _check_words(sentence: Sentence, words_of_tokens: Sequence[int | None], reached: int) -> None:
    """Raise DataError for one of the first `reached` words that has no token."""
    found = {*words_of_tokens}
    for number in range(reached):
        if number not in found:
            raise DataError(
                f"{sentence.name}: word {number + 1}, {sentence.words[number]!r}, has no token: "
                "take it out"
            )


def _labels(
    sentences: Sequence[Sentence], classes: Sequence[str], samples: TokenizedSamples
) -> Any:
    """Return the class at the first token of each word, and -100 elsewhere [tokens]."""
    numbers = {tag: number for number, tag in enumerate(classes)}
    starts = samples.encoded.starts
    labels = np.full(starts[-1], IGNORED)
    for index, sentence in enumerate(sentences):
        for tag in sentence.tags or ():
            if tag not in numbers:
                raise DataError(f"{sentence.name}: tag {tag!r} is not among those of train")
        places = samples.word_places(index) or []
        # Fewer places than tags: of a sentence whose end is cut off.
        for place, tag in zip(places, sentence.tags or (), strict=False):
            labels[starts[index] + place] = numbers[tag]
    return labels


def read_sentences(path: Path, tagged: bool = True) -> list[Sentence]:
    """Read a file of sentences; `tagged`: with tags. Raises DataError."""
    if path.suffix.lower() == ".jsonl":
        sentences = list(_of_jsonl(path, tagged))
    else:
        sentences = list(_of_columns(path, tagged))
    if not sentences:
        raise DataError(f"{path}: holds no sentence")
    return sentences


def _of_jsonl(path: Path, tagged: bool) -> Iterator[Sentence]:
    for row in read_rows(path):
        words = _texts(row.name, row.values, "words")
        tags = None
        if tagged:
            tags = _texts(row.name, row.values, "tags")
            if len(tags) != len(words):
                raise DataError(f"{row.name}: {len(words)} words have {len(tags)} tags")
        yield Sentence(row.name, words, tags)


def _texts(name: str, values: Any, key: str) -> list[str]:
    texts = values.get(key)
    if not isinstance(texts, list) or not texts:
        raise DataError(f"{name}: {key!r} is {texts!r:.60}, expected a list of texts")
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{name}: {key!r}, number {number}, is {text!r:.60} and no text")
    return texts


def _of_columns(path: Path, tagged: bool) -> Iterator[Sentence]:
    """Yield the sentences of a file in CoNLL's columns: the word comes first, its tag last."""
    words = list[str]()
    tags = list[str]()
    for number, line in enumerate([*read_lines(path), ""], start=1):
        cells = re.split("[ \t\r]+", line.strip(" \t\r"))  # other blanks may be within a word
        if cells[0] in ("", "-DOCSTART-"):
            if words:
                yield Sentence(f"{path}:{number - len(words)}", words, tags if tagged else None)
            words = []
            tags = []
            continue
        if tagged and len(cells) < 2:
            raise DataError(f"{path}:{number}: {line!r:.60} is a word without a tag")
        words.append(cells[0])
        tags.append(cells[-1])
