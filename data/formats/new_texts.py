"""New texts for a trained run: from a file, from standard input, or given in Python."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regimen.data.errors import DataError
from regimen.data.formats.jsonl import read_lines
from regimen.data.formats.tagged_words import ENDINGS as WORDS_ENDINGS
from regimen.data.formats.tagged_words import Sentence, read_sentences, tokenized_words
from regimen.data.formats.texts import ENDINGS, Records, read_records, tokenized
from regimen.data.text import filled_lines
from regimen.data.tokenized import TokenizedSamples

Form = Mapping[str, Any]  # what `TokenizedSamples.input_form` returned


def find_texts(form: Form, source: str, lines: Sequence[str]) -> TokenizedSamples:
    """Open the texts of a file, or those of `lines` if it is `-`. Raises DataError.

    A file has the columns of the run's data; of a single column a .txt file, like standard input,
    has one text a line. Sentences are read as the run's, without tags, and lines as words between
    blanks.
    """
    if source == "-":
        _, texts = filled_lines(source, lines)
        return given_texts(form, texts)
    path = Path(source).expanduser()
    endings = (*ENDINGS, ".txt")
    if form["kind"] == "words":
        endings = WORDS_ENDINGS
    if not path.is_file() or not path.name.lower().endswith(endings):
        raise DataError(
            f"source={source}: is no file of texts: give one as {', '.join(endings)}, or - for "
            "standard input"
        )
    if form["kind"] == "words":
        sentences = read_sentences(path, tagged=False)
        return _words(form, sentences)
    if path.suffix.lower() != ".txt":
        return _texts(form, read_records(path))
    names, texts = filled_lines(str(path), read_lines(path))
    return _texts(form, Records(str(path), names, {_only_column(form): texts}))


def given_texts(form: Form, given: Sequence[Any]) -> TokenizedSamples:
    """Return texts that are given: strings, or dicts by column; sentences also as lists of words.

    Raises DataError.
    """
    names = [f"text {number}" for number in range(1, len(given) + 1)]
    if form["kind"] == "words":
        sentences = []
        for name, one in zip(names, given, strict=True):
            words = one
            if isinstance(one, Mapping):
                words = one.get("words")
            if isinstance(words, str):
                words = words.split()
            if not isinstance(words, Iterable):
                words = ()  # refused below
            words = list(words)
            if not words or not all(isinstance(word, str) and word.strip() for word in words):
                raise DataError(f"{name}: {one!r:.60} is neither a text nor a list of words")
            sentences.append(Sentence(name, words, None))
        return _words(form, sentences)
    rows = []
    for name, one in zip(names, given, strict=True):
        row = one
        if isinstance(one, str):
            row = {_only_column(form): one}
        if not isinstance(row, Mapping):
            raise DataError(f"{name}: {one!r:.60} is neither a text nor a dict by column")
        rows.append(row)
    columns = {}
    for name in form["columns"]:
        columns[name] = [row.get(name) for row in rows]
    return _texts(form, Records("the texts", names, columns))


def _only_column(form: Form) -> str:
    """Return the column of the run's texts. Raises DataError if it takes pairs of texts."""
    columns: list[str] = form["columns"]
    if len(columns) > 1:
        raise DataError(
            f"the run takes pairs of texts, {', '.join(columns)}: give a table with these columns "
            "(.csv, .jsonl, .parquet), or dicts"
        )
    return columns[0]


def _texts(form: Form, records: Records) -> TokenizedSamples:
    _check_any(records.names)
    return tokenized(
        records, form["columns"], form["tokenizer"], form["length"], too_long=form["too_long"]
    )


def _words(form: Form, sentences: Sequence[Sentence]) -> TokenizedSamples:
    _check_any(sentences)
    return tokenized_words(sentences, form["tokenizer"], form["length"], too_long=form["too_long"])


def _check_any(samples: Sequence[Any]) -> None:
    if not samples:
        raise DataError("source: holds no text")
