"""Depth of a parameter: in which layer of the model, from the input on, it lies."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainer.param_selectors import Candidate

Patterns = tuple[re.Pattern[str], ...]


class Layers:
    """Number the layers of a model by lists of patterns, from the input on.

    A pattern with a capture group (`blocks\\.(\\d+)`) stands for as many layers as it finds
    different numbers. What no pattern finds is noted in `problems`.
    """

    def __init__(self, found: Sequence[Candidate], problems: list[str]) -> None:
        self._found = found
        self._problems = problems
        self._numbers: dict[Patterns, dict[tuple[int, int], int]] = {}

    def depth(self, candidate: Candidate, layers: Patterns, key: str) -> int:
        """Return the layer that a parameter lies in; `key` is the rule's, for a complaint."""
        place = _place(candidate, layers)
        if place is None:
            self._problems.append(f"{key}.layers says nothing of {candidate.name}")
            return 0
        return self._numbering(layers)[place]

    def count(self, layers: Patterns) -> int:
        """Return how many layers the whole model has."""
        return len(self._numbering(layers))

    def _numbering(self, layers: Patterns) -> dict[tuple[int, int], int]:
        if layers not in self._numbers:
            places = {place for c in self._found if (place := _place(c, layers)) is not None}
            self._numbers[layers] = {place: i for i, place in enumerate(sorted(places))}
        return self._numbers[layers]


def _place(candidate: Candidate, layers: Patterns) -> tuple[int, int] | None:
    for i, pattern in enumerate(layers):
        found = pattern.search(candidate.name)
        if found:
            number = found.group(1) if pattern.groups else None
            return i, int(number) if number and number.isdigit() else 0
    return None
