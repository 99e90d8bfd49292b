"""Text that comes with Python: the docstrings of its standard library."""

import ast
import functools
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regimen.data.errors import DataError, UnreadableError, reason
from regimen.data.splits import Split, unlabelled_parts
from regimen.data.transforms import Transform, on_inputs

ALPHABET = ["\n", *map(chr, range(32, 127))]
# Modules with long docstrings, in every Python from 3.11 on.
MODULES = (
    "_pydecimal argparse codecs configparser difflib doctest http/server imaplib inspect ipaddress"
    " logging/__init__ pdb shutil smtplib socketserver statistics subprocess tarfile threading"
    " typing unittest/mock urllib/request"
)
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False, repr=False)
class StandardLibraryText:
    """Windows of `context` characters, and the next character at each position.

    Samples are `(tokens, next_tokens)`, both (context,). Every documentation string belongs to one
    split, drawn with `split_seed`. With `shift` each window begins at a random place in its
    stretch, another one in each epoch. Characters that are not ASCII are left out. With `folds`,
    val is fold number `fold` of the strings that are not in test.
    """

    split: Split
    context: int = 128
    shift: bool = False
    split_seed: int = 0
    modules: Sequence[str] | None = None
    transform: Transform = None
    fold: int = 0
    folds: int = 0

    def __post_init__(self) -> None:
        texts = list[str]()
        for module in self.modules or MODULES.split():
            texts += docstrings(module)
        held_out = len(texts) // 10  # strings for val, and as many for test
        parts = unlabelled_parts(len(texts), held_out, 3, self.split_seed, self.fold, self.folds)
        text = "\n\n".join(texts[i] for i in sorted(parts[self.split]))
        numbers = _numbers_of(ALPHABET)
        self.tokens = torch.tensor([numbers[c] for c in text if c in numbers], dtype=torch.long)
        self.classes = ALPHABET
        if len(self) < 1:
            raise DataError(
                f"data.{self.split}: {len(self.tokens)} characters, context={self.context}"
            )

    def input_form(self) -> dict[str, Any]:
        """Return how a text is encoded; `classes` is the vocabulary."""
        return {"kind": "text", "encoding": "characters", "context": self.context}

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Any:
        start = index * self.context
        if self.shift:
            # From the generator that the loader keys by seed, epoch, index and occurrence.
            start += int(torch.randint(self.context, ()))
        start = min(start, len(self.tokens) - self.context - 1)
        window = self.tokens[start : start + self.context + 1]
        return on_inputs(self.transform, (window[:-1], window[1:]))


@dataclass(eq=False)
class Prompts:
    """Texts to continue: samples are `(tokens, length, index)`.

    tokens: (context,), padded with zeros; of a longer text the last `context` ones.
    names: the names of the texts, for messages.
    encoding: "characters", numbered by their place in the vocabulary, or "bytes" of UTF-8.
    Raises UnreadableError for a text with characters that are not in the vocabulary.
    """

    names: Sequence[str]
    texts: Sequence[str]
    vocabulary: Sequence[str]
    context: int
    transform: Transform = None
    encoding: str = "characters"

    def __len__(self) -> int:
        return len(self.texts)

    def path(self, index: int) -> str:
        """Return the name of a text: its file and line."""
        return self.names[index]

    def stand_in(self) -> tuple[Tensor, int, int]:
        """Return a sample for a batch without a text that can be continued."""
        return self._sample([0] * self.context, 0)[0], 1, 0

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        text = self.texts[index]
        if not text:
            raise UnreadableError(f"{self.path(index)}: the run cannot continue it: it is empty")
        size = len(self.vocabulary)
        numbers = _numbers_of(self.vocabulary)
        tokens = list[int]()
        unknown = dict[str, None]()  # as a set that keeps its order
        for character in text:
            encoded = [numbers.get(character, size)]
            if self.encoding == "bytes":
                encoded = list(character.encode())
            if max(encoded) >= size:
                unknown[character] = None
            tokens += encoded
        if unknown:
            raise UnreadableError(
                f"{self.path(index)}: the run cannot continue it: {''.join(unknown)[:20]!r} is not "
                "in its vocabulary"
            )
        return self._sample(tokens, index)

    def _sample(self, numbers: list[int], index: int) -> tuple[Tensor, int, int]:
        tokens = on_inputs(self.transform, torch.tensor(numbers[-self.context :]))
        padded = tokens.new_zeros(self.context)
        padded[: len(tokens)] = tokens
        return padded, len(tokens), index


def _numbers_of(vocabulary: Sequence[str]) -> dict[str, int]:
    return {character: number for number, character in enumerate(vocabulary)}


def find_prompts(source: str, lines: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """Return names (FILE:LINE) and texts of the lines of a file, or of `lines` if it is `-`.

    Empty lines are left out. Raises DataError for a file that cannot be read or holds no line.
    """
    if source != "-":
        try:
            lines = Path(source).expanduser().read_text("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"source={source}: {reason(error)}: "
                "give a text file with one prompt a line, or - for standard input"
            ) from error
    names, texts = filled_lines(source, lines)
    if not texts:
        raise DataError(f"source={source} holds no prompt: one a line")
    return names, texts


def filled_lines(source: str, lines: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return names (FILE:LINE) and texts of the lines that are not blank."""
    names = []
    texts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            names.append(f"{source}:{number}")
            texts.append(line)
    return names, texts


@functools.cache  # the splits of a run read the same ones
def docstrings(module: str) -> tuple[str, ...]:
    """Return the documentation strings of a module's source file; the module is not imported."""
    path = Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py"
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"this Python has no source of its standard library: {path}") from error
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            text = ast.get_docstring(node)
            if text:
                texts.append(text)
    return tuple(texts)
