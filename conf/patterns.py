"""Regular expressions of a configuration: each search ends, or is refused before it begins.

Python's matcher goes back and tries another way wherever a repeat or an alternative leaves a
choice: `(a+)+b` takes a time exponential in the length of a text, `.*.*.*b` a power of it.
"""

import importlib
import re
from typing import Any

from regimen.conf.errors import ConfigError, shortened

MOST_WAYS = 10**8  # that a search may try: about a second
_LONGEST = 1000  # characters of a pattern
_USUAL_LENGTH = 60  # of a parameter's name
_MANY, _ROUNDS = 1e4, 60  # more of either is too many in any case, and no float
_parser: Any = importlib.import_module("re._parser")


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
        if (length + 1) * _ways(self._tree, length) > MOST_WAYS:
            message = f"{shortened(self._text)!r} could search a name of {length} letters for ages"
            hint = "repeat nothing that itself repeats or has alternatives, and less often"
            raise ConfigError("", message, hint)


def _ways(items: Any, length: int) -> float:
    """Return in how many ways a sequence can match texts of a length, at most."""
    ways = 1.0
    for operation, arguments in items:
        if str(operation).endswith("REPEAT"):
            least, most, body = arguments
            inside = _ways(body, length)
            may_be_empty = body.getwidth()[0] == 0
            if inside > 1 and most > 1:  # a choice in each round
                ways *= min(inside, _MANY) ** min(most, length, _ROUNDS)
            else:
                ways *= min(most, length) - min(least, length) + 1
            if may_be_empty:  # its rounds are not bounded by the length
                ways *= max(least, 1)
        elif str(operation) == "BRANCH":
            ways *= sum(_ways(branch, length) for branch in arguments[1])
        else:
            for part in _parts(arguments):
                ways *= _ways(part, length)
        if ways > MOST_WAYS:
            return ways
    return ways


def _parts(arguments: Any) -> list[Any]:
    """Return the sequences within a group, an assertion or a condition."""
    if isinstance(arguments, _parser.SubPattern):
        return [arguments]
    if isinstance(arguments, tuple):
        return [part for part in arguments if isinstance(part, _parser.SubPattern)]
    return []
