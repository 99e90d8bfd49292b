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

MOST_PROBLEMS = 100  # so many are searched for and printed: a stranger's file can hold 50,000
_MAX_PART = 4000  # characters of a part of a message, such as a list of what is available
_MAX_NAME = 100  # characters that are compared to find a similar name
_MAX_NAMES = 1000  # names that are compared: a stranger's file may hold thousands
_LONG_WORD = re.compile(r"\S{400,}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: the key, what is wrong with it, the way out, and where the key was written."""

    key: str
    message: str
    hint: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        # Each part may quote a stranger's file, even a text of a megabyte: shorten each by itself.
        text = readable(self.message)
        if self.hint:
            text = f"{readable(self.message.rstrip('.'))}; {readable(self.hint)}"
        if self.key:
            text = f"{shortened(self.key)}: {text}"
        if self.file:
            text = f"{text} [{readable(self.file)}]"
        return one_line(text)


class ConfigError(Exception):
    """One mistake, or a list of mistakes, in a configuration or a command line."""

    exit_code = 2
    found_in = "the configuration"
    more: Callable[[], list[Problem]] | None = None  # a slower search for further mistakes

    def __init__(
        self, where: Iterable[Problem] | str, message: str | None = None, hint: str | None = None
    ) -> None:
        """Take a list of mistakes; or key, message and hint of one; or its text alone."""
        if not isinstance(where, str):
            problems = where
        elif message is None:
            problems = [Problem("", where)]
        else:
            problems = [Problem(where, message, hint)]
        self.problems = list(dict.fromkeys(problems))
        super().__init__(_text(self.problems, self.found_in))

    def __reduce__(self) -> tuple[type[Self], tuple[list[Problem]]]:
        # pickle rebuilds an exception from `args`, which holds only the text.
        return type(self), (self.problems,)

    def change(self, change: Callable[[Problem], Problem]) -> None:
        """Change each problem in place: type, cause and traceback stay."""
        self.problems = [change(problem) for problem in self.problems]
        self.args = (_text(self.problems, self.found_in),)


@contextmanager
def problems_at(key: str) -> Iterator[None]:
    """Give a key to the problems of a ConfigError that was raised without one."""
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


def raise_problems(problems: Iterable[Problem], kind: type[ConfigError] = ConfigError) -> None:
    """Raise all problems as one error, if there are any."""
    listed = list(problems)
    if listed:
        raise kind(listed)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name that a misspelt one was most likely meant for."""
    # The cost of a comparison grows with the product of the lengths: compare the beginnings.
    by_beginning = {known[:_MAX_NAME].lower(): known for known in islice(names, _MAX_NAMES)}
    wanted = name[:_MAX_NAME].lower()
    matches = get_close_matches(wanted, list(by_beginning), n=1, cutoff=cutoff)
    return by_beginning[matches[0]] if matches else None


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """Return a hint with the nearest of some names; None where none is near."""
    match = nearest(name, names)
    return f"did you mean {match}?" if match else None


def truncated_list(names: Sequence[str], limit: int = 8) -> str:
    """Join the first `limit` names, with the number of the others."""
    text = ", ".join(names[:limit])
    if len(names) > limit:
        text += f" (+{len(names) - limit} more)"
    return text


def shortened(text: str, limit: int = 200) -> str:
    """Return a text of at most `limit` characters; a longer one ends in dots."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def readable(text: str) -> str:
    """Return a message whose very long words are shortened, so that the rest of it is seen."""
    with_short_words = _LONG_WORD.sub(lambda word: shortened(word[0]), text)
    return shortened(with_short_words, _MAX_PART)


def one_line(text: object) -> str:
    """Return a value as text, with control characters and line breaks escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


# The messages of torch's allocators, for the host too, and of vendors' libraries: "out of memory",
# STATUS_ALLOC_FAILED, ERROR_OUT_OF_DEVICE_MEMORY, "Insufficient memory".
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
    # torch's own type is known by its name, since this module does not import torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return "allocate memory" in str(error)
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def _text(problems: list[Problem], found_in: str) -> str:
    if len(problems) == 1:
        return str(problems[0])
    title = f"{len(problems)} mistakes in {found_in}:"
    return "\n  ".join([title, *map(str, problems)])
