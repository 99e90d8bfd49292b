"""Messages about a configuration, in the words of a user who calls Regimen from Python."""

import re
from collections.abc import Callable

from regimen.conf.fields import declared
from regimen.conf.schema_trainer import TrainerConfig

_LITERALS = {"true": "True", "false": "False", "null": "None"}
_VALUE = r"(?:=(?P<value>[\w.+-]*\w))?"
_START = r"(?<![\w.])"  # not within an import path
_OPTIONS = "|".join(declared(TrainerConfig))


def _literal(word: str | None) -> str:
    """Return a value of a message as Python writes it."""
    if word is None:
        return "..."
    if re.fullmatch(r"[\d.+-][\d.e+-]*", word):
        return word
    return _LITERALS.get(word, f'"{word}"')


def _options(match: re.Match[str]) -> str:
    return f"TrainerOptions({match['key']}={_literal(match['value'])})"


def _data_loader(match: re.Match[str]) -> str:
    return f"DataLoader({match['key']}={_literal(match['value'])})"


# Applied in this order: an earlier replacement wins.
_REPLACEMENTS: dict[str, str | Callable[[re.Match[str]], str]] = {
    rf"{_START}trainer\.(?P<key>{_OPTIONS})\b{_VALUE}": _options,
    rf"{_START}loader\.(?P<key>batch_size|drop_last|shuffle|num_workers)\b{_VALUE}": _data_loader,
    rf"{_START}optimizer\.lr\b": "the optimizer's lr",
    r"does transforms\.eval do as transforms\.train\?": (
        "are its samples made as those of the training are?"
    ),
    r"belong in data\.predict": "belong in a prediction",
    rf"{_START}data\.num_classes\b": "num_classes",
    r" \(model\.num_classes[^)]*\)": "",
    rf"{_START}task\.(?P<key>loss|metrics|top_k)\b(?!=)": r"the task's \g<key>",
    r" with '~callbacks\.[\w.]+'": "",
    r"\bnull\b": "None",
    r"\btrue or false\b": "True or False",
    r"\bgot true\b": "got True",
    r"\bgot false\b": "got False",
    r"\bgot ('[^']*') \(text\)": r"got \1",
    r"\btext\b(?= or None)": "str",
    r"a section of keys": "a dict",
}


def in_python(text: str) -> str:
    """Return a message in which arguments of calls take the place of the configuration's keys."""
    for pattern, replacement in _REPLACEMENTS.items():
        text = re.sub(pattern, replacement, text)
    return text
