"""The failures that data can cause: each knows its exit code and crosses processes as one text."""


class DataError(Exception):
    """Data that is absent, unreadable or contradictory; the text names the key, file or sample."""

    exit_code = 3

    def __str__(self) -> str:
        """Return the text on one line: file names may hold line breaks and a terminal's codes."""
        text = super().__str__()
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class UnreadableError(DataError):
    """One file that cannot be read; the others may be well."""


class WorkerError(Exception):
    """A loader worker died, hung or ran out of memory; the text names the keys to turn."""

    exit_code = 8


def is_fault(error: BaseException) -> bool:
    """Tell what code of a data set raised, `SystemExit` too, from what broke it off from outside.

    A signal's handler marks its exceptions by `from_outside`.
    """
    return not getattr(error, "from_outside", isinstance(error, KeyboardInterrupt))


def one_line(text: object, limit: int = 300) -> str:
    """Return the text on one line, cut at `limit` characters: libraries explain at length."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def reason(error: BaseException) -> str:
    """Name an exception's type and message on one line."""
    return f"{type(error).__name__}: {one_line(error)}" if str(error) else type(error).__name__
