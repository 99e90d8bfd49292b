"""Regular expressions of a configuration: each search ends, or is refused before it begins.

Python's matcher goes back and tries another way wherever a repeat or an alternative leaves a
choice: `(a+)+b` takes a time exponential in the length of a text, `.*.*.*b` a power of it.
"""

import importlib
import math
import re
from typing import Any

from regimen.conf.errors import ConfigError, shortened

MOST_WAYS = 10**8  # that a search may try: about a second
_LONGEST = 1000  # characters of a pattern
_USUAL_LENGTH = 60  # of a parameter's name
_MANY, _ROUNDS = 1e4, 60  # more of either is too many in any case, and no float
_LETTERS = ("LITERAL", "NOT_LITERAL", "IN", "ANY")  # what matches one letter
_parser: Any = importlib.import_module("re._parser")
_compiler: Any = importlib.import_module("re._compiler")


class Pattern:
    """A compiled pattern. Raises ConfigError for one that is invalid or could search for ever."""

    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) > _LONGEST:
            raise ConfigError("", f"{shortened(text)!r} has more than {_LONGEST} characters")
        try:
            self._tree = _parser.parse(text)
            self._compiled = re.compile(text)
            self.groups = self._compiled.groups
            self._check(_USUAL_LENGTH)
        except (re.error, RecursionError, OverflowError) as error:
            message = f"{shortened(text)!r} is not a valid regular expression: {error}"
            raise ConfigError("", message) from None

    def search(self, name: str) -> re.Match[str] | None:
        """Return the first match in a name. Raises ConfigError if looking could take too long."""
        self._check(len(name))
        return self._compiled.search(name)

    def _check(self, length: int) -> None:
        if _ways(self._tree, length, starts=True) > MOST_WAYS:
            message = f"{shortened(self._text)!r} could search a name of {length} letters for ages"
            hint = "repeat nothing that itself repeats or has alternatives, and less often"
            raise ConfigError("", message, hint)


def _ways(items: Any, length: int, starts: bool = False) -> float:
    """Return in how many ways a sequence can match texts of a length, at most.

    `starts`: at any place of the text.
    """
    ways = 1.0
    lengths = 1.0  # how long each repeat without a choice of its own can be, by itself
    repeats = 0
    for index, (operation, arguments) in enumerate(items):
        if str(operation).endswith("REPEAT"):
            least, most, body = arguments
            inside = _ways(body, length)
            if inside > 1 and most > 1:  # a choice in each round
                ways *= min(inside, _MANY) ** min(most, length, _ROUNDS)
            elif not _ends_at_once(body, items[index + 1 : index + 2]):
                lengths *= min(most, length) - min(least, length) + 1
                repeats += 1
            if body.getwidth()[0] == 0:  # its rounds are not bounded by the length
                ways *= max(least, 1)
        elif str(operation) == "BRANCH":
            ways *= sum(_ways(branch, length) for branch in arguments[1])
        else:
            for part in _parts(arguments):
                ways *= _ways(part, length)
        if ways > MOST_WAYS:
            return ways
    # All repeats of a sequence share the length of the text: each way is a place for each of them,
    # none before the one before it.
    if starts:  # a place more
        lengths *= length + 1
        repeats += 1
    return ways * min(lengths, math.comb(length + repeats, repeats))


def _ends_at_once(body: Any, following: Any) -> bool:
    """Return whether a repeat of one letter has one way only: what follows it is no such letter.

    That of `\\w+\\.` ends where the dot is.
    """
    if len(following) == 0 or len(body) != 1 or str(body[0][0]) not in _LETTERS:
        return False
    operation, code = following[0]
    if str(operation) != "LITERAL":
        return False
    letter = _compiler.compile(body)
    spelled = {chr(code), chr(code).lower(), chr(code).upper()}
    return not any(letter.fullmatch(text) for text in spelled)


def _parts(arguments: Any) -> list[Any]:
    """Return the sequences within a group, an assertion or a condition."""
    if isinstance(arguments, _parser.SubPattern):
        return [arguments]
    if isinstance(arguments, tuple):
        return [part for part in arguments if isinstance(part, _parser.SubPattern)]
    return []
