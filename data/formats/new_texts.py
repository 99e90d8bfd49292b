"""New texts for a trained run: from a file, from standard input, or given in Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regimen.data.errors import DataError
from regimen.data.formats.tagged_words import ENDINGS as WORDS_ENDINGS
from regimen.data.formats.tagged_words import Sentence, read_sentences, tokenized_words
from regimen.data.formats.texts import ENDINGS, Records, read_records, tokenized
from regimen.data.tokenized import TokenizedSamples

Form = Mapping[str, Any]  # what `TokenizedSamples.input_form` returned


def find_texts(form: Form, source: str, lines: Sequence[str]) -> TokenizedSamples:
    """Open the texts of a file, or those of `lines` if it is `-`. Raises DataError.

    A file has the columns of the run's data; of a single column a .txt file, like standard input,
    has one text a line. Sentences are read as the run's, without tags, and lines as words between
    blanks.
    """
    if source == "-":
        return given_texts(form, [line for line in lines if line.strip()])
    path = Path(source).expanduser()
    endings = WORDS_ENDINGS if form["kind"] == "words" else (*ENDINGS, ".txt")
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
    try:
        texts = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from error
    numbered = [(f"{path}:{n}", text) for n, text in enumerate(texts, start=1) if text.strip()]
    (column,) = _only_column(form)
    names = [name for name, _ in numbered]
    return _texts(form, Records(str(path), names, {column: [text for _, text in numbered]}))


def given_texts(form: Form, given: Sequence[Any]) -> TokenizedSamples:
    """Return texts that are given: strings, or dicts by column; sentences also as lists of words.

    Raises DataError.
    """
    names = [f"text {number}" for number in range(1, len(given) + 1)]
    if form["kind"] == "words":
        sentences = []
        for name, one in zip(names, given, strict=True):
            words = one["words"] if isinstance(one, Mapping) else one
            words = words.split() if isinstance(words, str) else list(words)
            if not words or not all(isinstance(word, str) and word.strip() for word in words):
                raise DataError(f"{name}: {one!r:.60} is neither a text nor a list of words")
            sentences.append(Sentence(name, words, None))
        return _words(form, sentences)
    rows = []
    for name, one in zip(names, given, strict=True):
        row = {_only_column(form)[0]: one} if isinstance(one, str) else one
        if not isinstance(row, Mapping):
            raise DataError(f"{name}: {one!r:.60} is neither a text nor a dict by column")
        rows.append(row)
    columns = {name: [row.get(name) for row in rows] for name in form["columns"]}
    return _texts(form, Records("the texts", names, columns))


def _only_column(form: Form) -> list[str]:
    columns: list[str] = form["columns"]
    if len(columns) > 1:
        raise DataError(
            f"the run takes pairs of texts, {', '.join(columns)}: give a table with these columns "
            "(.csv, .jsonl, .parquet), or dicts"
        )
    return columns


def _texts(form: Form, records: Records) -> TokenizedSamples:
    _check_any(records.names)
    options = {name: form[name] for name in ("tokenizer", "length", "too_long")}
    return tokenized(records, form["columns"], **options)


def _words(form: Form, sentences: Sequence[Sentence]) -> TokenizedSamples:
    _check_any(sentences)
    options = {name: form[name] for name in ("tokenizer", "length", "too_long")}
    return tokenized_words(sentences, **options)


def _check_any(samples: Sequence[Any]) -> None:
    if not samples:
        raise DataError("source: holds no text")
