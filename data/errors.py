"""Errors of data: each has an exit code and a one-line message."""

import importlib
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from regimen.conf.errors import one_line, shortened


class DataError(Exception):
    """Data that is missing, unreadable or inconsistent; the message names key, file or sample."""

    exit_code = 3

    def __str__(self) -> str:
        """Return the text on one line: file names may hold line breaks and a terminal's codes."""
        return one_line(super().__str__())


class ClassNamesError(DataError):
    """Classes that are not those of the run."""


class UnreadableError(DataError):
    """A single file that cannot be read."""


class MissingPackageError(DataError):
    """A data set needs a package that is not installed: an error of the configuration."""

    exit_code = 2


class WorkerError(Exception):
    """A loader worker died, hung or ran out of memory; the message names the keys to change."""

    exit_code = 8


@contextmanager
def as_data_error(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into a DataError: `what` failed, and the reason."""
    try:
        yield
    except kinds as error:
        raise DataError(f"{what}: {reason(error)}") from error


def check_regular(path: Path) -> None:
    """Raise DataError for a pipe or a device: opening it could wait for ever."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise DataError(f"{path}: is a pipe or device, not a file")


def no_column(key: str, source: object, name: str, columns: Iterable[str]) -> DataError:
    """Return the error of a key that names a column which a table lacks."""
    available = ", ".join(map(repr, columns))
    return DataError(f"{key}: {source} has no column {name!r}; it has {available}")


def import_package(package: str, extra: str) -> ModuleType:
    """Import a package of an extra. Raises MissingPackageError with what installs it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"the package {package} is not installed: pip install 'torch-regimen[{extra}]'"
        ) from error


def is_fault(error: BaseException) -> bool:
    """Return whether an exception, or `SystemExit`, was raised by code of a data set.

    Exceptions of signal handlers have an attribute `from_outside`.
    """
    return not getattr(error, "from_outside", isinstance(error, KeyboardInterrupt))


def short_line(text: object) -> str:
    """Return the text on one line of at most 300 characters."""
    return shortened(" ".join(str(text).split()), 300)


def reason(error: BaseException) -> str:
    """Name an exception's type and message on one line."""
    name = type(error).__name__
    return f"{name}: {short_line(error)}" if str(error) else name
