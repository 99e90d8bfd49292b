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
    """Windows of `context` characters, and the character that follows at each place.

    Samples are `(tokens, following)`, both [context]. Every documentation string belongs to one
    split, by `split_seed`. With `shift` each window begins at a random place in its stretch, one
    of its own for each epoch. Characters that are not ASCII are left out. With `folds` val is fold
    number `fold` of the strings that are not test.
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
        texts = [text for module in self.modules or MODULES.split() for text in docstrings(module)]
        held_out = len(texts) // 10  # of the strings, for val and for test each
        parts = unlabelled_parts(len(texts), held_out, 3, self.split_seed, self.fold, self.folds)
        text = "\n\n".join(texts[i] for i in sorted(parts[self.split]))
        numbers = {character: number for number, character in enumerate(ALPHABET)}
        self.tokens = torch.tensor([numbers[c] for c in text if c in numbers], dtype=torch.long)
        self.classes = ALPHABET
        if len(self) < 1:
            few = f"{len(self.tokens)} characters, context={self.context}"
            raise DataError(f"data.{self.split}: {few}")

    def input_form(self) -> dict[str, Any]:
        """Return what text must be brought to: tokens, of which `classes` is the vocabulary."""
        return {"kind": "text", "encoding": "characters", "context": self.context}

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Any:
        start = index * self.context
        if self.shift:  # the draw is keyed by seed, epoch, index and occurrence
            start += int(torch.randint(self.context, ()))
        start = min(start, len(self.tokens) - self.context - 1)
        window = self.tokens[start : start + self.context + 1]
        return on_inputs(self.transform, (window[:-1], window[1:]))


@dataclass(eq=False)
class Prompts:
    """Texts to continue: samples are `(tokens, length, index)`, tokens [context] with zeros behind.

    Of a longer text the last `context` tokens count. `names`: of the texts, for messages.
    `encoding`: characters, whose numbers are their places in the vocabulary, or bytes (UTF-8).
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
        """Return a sample, for a batch of which no text can be continued."""
        return self._sample([0] * self.context, 0)[0], 1, 0

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        text, size = self.texts[index], len(self.vocabulary)
        numbers = {character: number for number, character in enumerate(self.vocabulary)}
        tokens = [[numbers.get(character, size)] for character in text]
        if self.encoding == "bytes":
            tokens = [list(character.encode()) for character in text]
        unknown = [c for c, own in zip(text, tokens, strict=True) if max(own) >= size]
        if unknown or not text:
            shown = "".join(dict.fromkeys(unknown))[:20]
            what = f"{shown!r} is not in its vocabulary" if unknown else "it is empty"
            raise UnreadableError(f"{self.path(index)}: the run cannot continue it: {what}")
        return self._sample([token for own in tokens for token in own], index)

    def _sample(self, numbers: list[int], index: int) -> tuple[Tensor, int, int]:
        tokens = on_inputs(self.transform, torch.tensor(numbers[-self.context :]))
        padded = tokens.new_zeros(self.context)
        padded[: len(tokens)] = tokens
        return padded, len(tokens), index


def find_prompts(source: str, lines: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """Return names (FILE:LINE) and texts of the lines of a file, or of `lines` where it is `-`.

    Empty lines are left out. Raises DataError for a file that cannot be read or holds no line.
    """
    if source != "-":
        try:
            lines = Path(source).expanduser().read_text("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            way_out = "give a text file with one prompt a line, or - for standard input"
            raise DataError(f"source={source}: {reason(error)}: {way_out}") from error
    found = [(f"{source}:{n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise DataError(f"source={source} holds no prompt: one a line")
    return [name for name, _ in found], [text for _, text in found]


@functools.cache  # the splits of a run read the same ones
def docstrings(module: str) -> tuple[str, ...]:
    """Return the documentation strings of a module's source file; the module is not imported."""
    path = Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py"
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"this Python has no source of its standard library: {path}") from error
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    return tuple(text for text in texts if text)
