"""The interpolations that stay open until the length of the training is known."""

from collections.abc import Mapping
from typing import Any

RESERVED = ("total_steps", "steps_per_epoch")


def fill(node: Any, values: Mapping[str, int]) -> Any:
    """Return a copy of plain containers with `${total_steps}` and its like replaced.

    A string that is nothing but the interpolation becomes the number itself; inside a longer
    string it is replaced by its digits. A name that `values` lacks stays as it is.
    """
    if isinstance(node, dict):
        return {key: fill(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [fill(value, values) for value in node]
    return _fill_text(node, values) if isinstance(node, str) else node


def _fill_text(text: str, values: Mapping[str, int]) -> str | int:
    for name, value in values.items():
        if text == placeholder(name):
            return value
        text = text.replace(placeholder(name), str(value))
    return text


def placeholder(name: str) -> str:
    """Spell the interpolation of a reserved name."""
    return "${" + name + "}"
