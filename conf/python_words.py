"""What our messages say of a configuration, in the words of who has none and calls from Python."""

import re
from collections.abc import Callable

from regimen.conf.fields import declared
from regimen.conf.schema_trainer import TrainerConfig

_LITERALS = {"true": "True", "false": "False", "null": "None"}
_VALUE = r"(?:=(?P<value>[\w.+-]*\w))?"
_START = r"(?<![\w.])"  # no part of an import path


def _call(name: str) -> Callable[[re.Match[str]], str]:
    """Return what makes a key and its value an argument of a call."""

    def call(found: re.Match[str]) -> str:
        return f"{name}({found['key']}={_literal(found['value'])})"

    return call


def _literal(word: str | None) -> str:
    if word is None:
        return "..."
    if re.fullmatch(r"[\d.+-][\d.e+-]*", word):
        return word
    return _LITERALS.get(word, f'"{word}"')


_OPTIONS = "|".join(declared(TrainerConfig))
# Of several that fit the first one.
_WORDS: dict[str, str | Callable[[re.Match[str]], str]] = {
    rf"{_START}trainer\.(?P<key>{_OPTIONS})\b{_VALUE}": _call("TrainerOptions"),
    rf"{_START}loader\.(?P<key>batch_size|drop_last|shuffle|num_workers)\b{_VALUE}": (
        _call("DataLoader")
    ),
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
    """Return a message whose keys of a configuration are arguments of calls."""
    for pattern, words in _WORDS.items():
        text = re.sub(pattern, words, text)
    return text
