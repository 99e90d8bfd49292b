"""Regular expressions of a configuration, such as `match` of `optimizer.param_groups`.

A search that could take for ever is refused.

Python's matcher goes back and tries another way wherever a repeat or an alternative leaves a
choice. In the length of the text, `(a+)+b` takes exponential time and `.*.*.*b` cubic time.
"""

import importlib
import math
import re
from typing import Any

from regimen.conf.errors import ConfigError, shortened

MAX_WAYS = 10**8  # that a search may try: about a second
_MAX_LENGTH = 1000  # characters of a pattern
_USUAL_LENGTH = 60  # of a parameter's name
# The power `ways ** rounds` is bounded by these two, so that it stays a float. More of either is
# beyond MAX_WAYS in any case.
_MAX_WAYS_OF_ROUND = 1e4
_MAX_ROUNDS = 60
_ONE_LETTER = ("LITERAL", "NOT_LITERAL", "IN", "ANY")  # operations that match one letter
_parser: Any = importlib.import_module("re._parser")
_compiler: Any = importlib.import_module("re._compiler")


class Pattern:
    """A compiled pattern. Raises ConfigError if it is invalid or could search for ever."""

    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) > _MAX_LENGTH:
            raise ConfigError("", f"{shortened(text)!r} has more than {_MAX_LENGTH} characters")
        try:
            self._tree = _parser.parse(text)
            self._compiled = re.compile(text)
            self.groups = self._compiled.groups
            self._check(_USUAL_LENGTH)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                "", f"{shortened(text)!r} is not a valid regular expression: {error}"
            ) from None

    def search(self, name: str) -> re.Match[str] | None:
        """Return the first match in a name. Raises ConfigError if that could take too long."""
        self._check(len(name))
        return self._compiled.search(name)

    def _check(self, length: int) -> None:
        if _count_ways(self._tree, length, at_any_place=True) > MAX_WAYS:
            raise ConfigError(
                "",
                f"{shortened(self._text)!r} could search a name of {length} letters for ages",
                "repeat nothing that itself repeats or has alternatives, and less often",
            )


def _count_ways(items: Any, length: int, at_any_place: bool = False) -> float:
    """Return an upper bound of the ways in which a sequence can match texts of a length.

    `items`: of a parsed pattern. `at_any_place`: a match may begin at any place of the text.
    """
    ways = 1.0
    # Repeats without a choice of their own: how many there are, and the product of the numbers of
    # lengths that each can have.
    repeats = 0
    lengths = 1.0
    if at_any_place:  # what precedes the match is like one more repeat
        repeats = 1
        lengths = length + 1.0
    for index, (operation, arguments) in enumerate(items):
        if str(operation).endswith("REPEAT"):
            least, most, body = arguments
            ways_of_round = _count_ways(body, length)
            if ways_of_round > 1 and most > 1:
                rounds = min(most, length, _MAX_ROUNDS)
                ways *= min(ways_of_round, _MAX_WAYS_OF_ROUND) ** rounds
            elif not _has_one_end(body, items[index + 1 : index + 2]):
                repeats += 1
                lengths *= min(most, length) - min(least, length) + 1
            if body.getwidth()[0] == 0:
                # A round may match nothing: the length of the text does not bound their number.
                ways *= max(least, 1)
        elif str(operation) == "BRANCH":
            ways *= sum(_count_ways(branch, length) for branch in arguments[1])
        else:
            for part in arguments if isinstance(arguments, tuple) else [arguments]:
                if isinstance(part, _parser.SubPattern):  # of a group, an assertion, a condition
                    ways *= _count_ways(part, length)
        if ways > MAX_WAYS:
            return ways
    # All repeats of a sequence share the length of the text: a way is a place in the text for the
    # end of each, and these places are in order.
    return ways * min(lengths, math.comb(length + repeats, repeats))


def _has_one_end(body: Any, following: Any) -> bool:
    """Return whether a repeat of one letter can end at one place only.

    In `\\w+\\.` it ends before the dot, since a dot is no such letter. `following`: the item behind
    the repeat, if there is one.
    """
    is_one_letter = len(body) == 1 and str(body[0][0]) in _ONE_LETTER
    if not is_one_letter or not following or str(following[0][0]) != "LITERAL":
        return False
    next_letter = chr(following[0][1])
    letter = _compiler.compile(body)
    cases = (next_letter, next_letter.lower(), next_letter.upper())  # with IGNORECASE any of them
    return not any(letter.fullmatch(case) for case in cases)
