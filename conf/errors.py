"""A mistake in the configuration as a value, and the error that carries all of them.

Every room may import this module: a mistake stays a `Problem` from where it arises to where it is
printed.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from typing import Self

MOST_PROBLEMS = 100  # that are looked for and told: a stranger's file can hold 50,000
_LONGEST = 4000  # characters of a part of a message, such as a list of what is available
_LONG_WORD = re.compile(r"\S{400,}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: the key, what is wrong with it, the way out, and where it was written."""

    key: str
    message: str
    hint: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        # Each part may hold what a stranger's file holds: a text of a megabyte, too.
        where = f" [{readable(self.file)}]" if self.file else ""
        hint = f"; {readable(self.hint)}" if self.hint else ""
        message = readable(self.message.rstrip(".") if self.hint else self.message)
        text = f"{shortened(self.key)}: {message}" if self.key else message
        return one_line(f"{text}{hint}{where}")


class ConfigError(Exception):
    """The mistakes that were found in a configuration or a command line: one, or a list of them."""

    exit_code = 2
    found_in = "the configuration"
    more: Callable[[], list[Problem]] | None = None  # finds further mistakes, in a longer time

    def __init__(
        self, where: Iterable[Problem] | str, message: str | None = None, hint: str | None = None
    ) -> None:
        """`where`: the key of one mistake, or without a `message` all of its text; or a list."""
        if isinstance(where, str):
            where = [Problem(*("", where) if message is None else (where, message, hint))]
        self.problems = list(dict.fromkeys(where))
        super().__init__(_text(self.problems, self.found_in))

    def __reduce__(self) -> tuple[type[Self], tuple[list[Problem]]]:
        # Exceptions are rebuilt from `args`, which holds the text: it would lose the problems.
        return type(self), (self.problems,)

    def change(self, change: Callable[[Problem], Problem]) -> None:
        """Change each problem in place: type, cause and traceback stay."""
        self.problems = [change(problem) for problem in self.problems]
        self.args = (_text(self.problems, self.found_in),)


@contextmanager
def problems_at(key: str) -> Iterator[None]:
    """Give a key to the problems of a ConfigError that have none: who raised it knew no key."""
    try:
        yield
    except ConfigError as error:
        error.change(lambda problem: problem if problem.key else replace(problem, key=key))
        raise


@contextmanager
def collect_problems(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a ConfigError to a list, and go on."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def raise_problems(found: Iterable[Problem], kind: type[ConfigError] = ConfigError) -> None:
    """Raise all problems as one error, if there are any."""
    if problems := list(found):
        raise kind(problems)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name that a misspelt one was most likely meant for."""
    # Of thousands of names a stranger's file may hold, the first thousand is looked at.
    known = {known[:100].lower(): known for known in islice(names, 1000)}
    # The cost grows with the product of the lengths, and nobody mistypes a thousand letters.
    near = get_close_matches(name[:100].lower(), list(known), n=1, cutoff=cutoff)
    return known[near[0]] if near else None


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """Return a hint with the nearest of some names; None where none is near."""
    near = nearest(name, names)
    return f"did you mean {near}?" if near else None


def truncated_list(names: Sequence[str], limit: int = 8) -> str:
    """Join the first `limit` names, with the number of the others."""
    more = f" (+{len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def shortened(text: str, limit: int = 200) -> str:
    """Return a text of at most `limit` characters: the first ones of a longer one, and dots."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def readable(text: str) -> str:
    """Return a message whose endless words are shortened, so that what is behind them is told."""
    return shortened(_LONG_WORD.sub(lambda word: shortened(word[0]), text), _LONGEST)


def one_line(text: object) -> str:
    """Return a value as text, with control characters and line breaks escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


# What torch's allocators, that of the host among them, and the libraries of vendors say: "out of
# memory", STATUS_ALLOC_FAILED, ERROR_OUT_OF_DEVICE_MEMORY, "Insufficient memory".
_NO_MEMORY = re.compile(
    r"allocate memory|out[ _]?of[ _]?(\w+[ _])?(memory|resources)"
    r"|(insufficient|not enough|lack of|exceed\w*|exhausted) ([\w-]+ ){0,2}memory"
    r"|memory ([\w-]+ ){0,2}(exhausted|insufficient|exceeded)"
    r"|(memory|mem)[ _]?alloc\w*[ _]?fail|alloc_?fail|fail\w* to (re)?alloc|bad_alloc"
    r"|allocat\w+ ([\w.-]+ ){0,6}failed",
    re.IGNORECASE,
)


def lacks_memory(error: BaseException) -> bool:
    """Return whether an exception shows that the memory of the host or of a device gave out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        return True
    if isinstance(error, OSError):
        return "allocate memory" in str(error)
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def _text(problems: list[Problem], found_in: str) -> str:
    if len(problems) == 1:
        return str(problems[0])
    lines = "".join(f"\n  {problem}" for problem in problems)
    return f"{len(problems)} mistakes in {found_in}:{lines}"
