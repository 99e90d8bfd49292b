"""Text that comes with Python: the docstrings of its standard library."""

import ast
import functools
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.errors import DataError, UnreadableError, reason
from data.images import Transform
from data.keys import SPLIT, random_state
from data.sources import Split
from data.splits import fold_of

ALPHABET = ["\n", *map(chr, range(32, 127))]
# Modules with long docstrings, in every Python from 3.11 on.
MODULES = (
    "_pydecimal",
    "argparse",
    "codecs",
    "configparser",
    "difflib",
    "doctest",
    "http/server",
    "imaplib",
    "inspect",
    "ipaddress",
    "logging/__init__",
    "pdb",
    "shutil",
    "smtplib",
    "socketserver",
    "statistics",
    "subprocess",
    "tarfile",
    "threading",
    "typing",
    "unittest/mock",
    "urllib/request",
)
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_HELD_OUT = 0.1  # of the documentation strings, for val and for test each


class StandardLibraryText:
    """Windows of `context` characters, and the character that follows at each place.

    Samples are `(tokens, following)`, both [context]. Every documentation string belongs to one
    split, by `split_seed`. With `shift` each window begins at a random place in its stretch, one
    of its own for each epoch. Characters that are not ASCII are left out. With `folds` val is fold
    number `fold` of the strings that are not test.
    """

    def __init__(
        self,
        split: Split,
        context: int = 128,
        shift: bool = False,
        split_seed: int = 0,
        modules: Sequence[str] = MODULES,
        transform: Transform | None = None,
        fold: int | None = None,
        folds: int | None = None,
    ) -> None:
        texts = [text for module in modules for text in docstrings(module)]
        text = "\n\n".join(_part(texts, split, split_seed, fold, folds))
        self.tokens = torch.tensor([_NUMBERS[c] for c in text if c in _NUMBERS], dtype=torch.long)
        self.classes = ALPHABET
        self.context = context
        self.shift = shift
        self.transform = transform
        if len(self) < 1:
            raise DataError(f"data.{split}: {len(self.tokens)} characters, context={context}")

    def input_form(self) -> dict[str, Any]:
        """Return what text must be brought to: tokens, of which `classes` is the vocabulary."""
        return {"kind": "text", "encoding": "characters", "context": self.context}

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        if self.shift:  # the draw is keyed by seed, epoch and index
            start += int(torch.randint(self.context, ()))
        start = min(start, len(self.tokens) - self.context - 1)
        window = self.tokens[start : start + self.context + 1]
        tokens = window[:-1] if self.transform is None else self.transform(window[:-1])
        return tokens, window[1:]


_NUMBERS = {character: number for number, character in enumerate(ALPHABET)}


class Prompts:
    """Texts to continue: samples are `(tokens, length, index)`, tokens [context] with zeros behind.

    Of a longer text the last `context` tokens count. `names`: of the texts, for messages.
    `encoding`: characters, whose numbers are their places in the vocabulary, or bytes (UTF-8).
    Raises UnreadableError for a text with characters that are not in the vocabulary.
    """

    def __init__(
        self,
        names: Sequence[str],
        texts: Sequence[str],
        vocabulary: Sequence[str],
        context: int,
        transform: Transform | None = None,
        encoding: str = "characters",
    ) -> None:
        self.texts = list(texts)
        self._names = list(names)
        self._bytes, self._size = encoding == "bytes", len(vocabulary)
        self._numbers = {character: number for number, character in enumerate(vocabulary)}
        self._context = context
        self._transform = transform

    def __len__(self) -> int:
        return len(self.texts)

    def path(self, index: int) -> str:
        """Return the name of a text: its file and line."""
        return self._names[index]

    def stand_in(self) -> tuple[Tensor, int, int]:
        """Return a sample, for a batch of which no text can be continued."""
        tokens = torch.zeros(self._context, dtype=torch.long)
        return tokens if self._transform is None else self._transform(tokens), 1, 0

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        text = self.texts[index]
        unknown = "".join(dict.fromkeys(c for c in text if not self._known(c)))
        if unknown or not text:
            what = f"{unknown[:20]!r} is not in its vocabulary" if unknown else "it is empty"
            raise UnreadableError(f"{self.path(index)}: the run cannot continue it: {what}")
        numbers = list(text.encode()) if self._bytes else [self._numbers[c] for c in text]
        tokens = torch.tensor(numbers[-self._context :])
        tokens = tokens if self._transform is None else self._transform(tokens)
        padded = tokens.new_zeros(self._context)
        padded[: len(tokens)] = tokens
        return padded, len(tokens), index

    def _known(self, character: str) -> bool:
        if self._bytes:
            return max(character.encode()) < self._size
        return character in self._numbers


def find_prompts(source: str, lines: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """Return names (FILE:LINE) and texts of the lines of a file, or of `lines` where it is `-`.

    Empty lines are left out. Raises DataError for a file that cannot be read or holds no line.
    """
    if source != "-":
        try:
            lines = Path(source).expanduser().read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or reason(error)
            raise DataError(
                f"source={source}: cannot read it ({why}): give a text file with one prompt a "
                "line, or - for standard input"
            ) from error
    found = [(f"{source}:{n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise DataError(f"source={source} holds no prompt: one a line")
    return [name for name, _ in found], [text for _, text in found]


@functools.cache  # the splits of a run read the same ones
def docstrings(module: str) -> tuple[str, ...]:
    """Return the documentation strings of a module's source file; the module is not imported."""
    path = Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"this Python has no source of its standard library: {path}") from error
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    return tuple(text for text in texts if text)


def _part(
    texts: Sequence[str], split: str, seed: int, fold: int | None, folds: int | None
) -> list[str]:
    order = random_state(seed, SPLIT, 3).permutation(len(texts))
    held_out = int(len(texts) * _HELD_OUT)
    val, test, train = order[:held_out], order[held_out : 2 * held_out], order[2 * held_out :]
    if fold is not None and folds is not None:
        pool = np.sort(np.concatenate([val, train]))
        rest, part = fold_of(len(pool), fold, folds, seed)
        train, val = pool[rest], pool[part]
    parts = {"val": val, "test": test, "train": train}
    if split not in parts:
        raise DataError(f"split is {split!r}, not one of train, val, test")
    return [texts[i] for i in sorted(parts[split])]
