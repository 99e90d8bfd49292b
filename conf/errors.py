"""A mistake in the configuration, and the error that carries all of them."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: the key, what is wrong with it, where it was written, the way out."""

    key: str
    message: str
    file: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        where = f" [{self.file}]" if self.file else ""
        hint = f"; {self.hint}" if self.hint else ""
        message = self.message.rstrip(".") if self.hint else self.message
        text = f"{self.key}: {message}" if self.key else message
        return one_line(f"{text}{hint}{where}")


class ConfigError(Exception):
    """Every mistake that was found in a configuration or a command line."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        found = [Problem("", problems)] if isinstance(problems, str) else list(problems)
        self.problems: list[Problem] = list(dict.fromkeys(found))
        super().__init__(_text(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[Problem]]]:
        # Exceptions are rebuilt from `args`, which holds the text: it would lose the problems.
        return type(self), (self.problems,)


def one_line(text: str) -> str:
    """Make control characters and line breaks visible, so that a message stays one line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _text(problems: list[Problem]) -> str:
    if len(problems) == 1:
        return str(problems[0])
    lines = "".join(f"\n  {problem}" for problem in problems)
    return f"{len(problems)} mistakes in the configuration:{lines}"
