"""What a command prints besides its result, and how it ends: the `error:` line and the exit code.

A banner comes first, before torch is imported. Warnings and log messages of libraries go to the
log. Output after a closed pipe or a full disk is dropped.
"""

import atexit
import gc
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, NoReturn, TextIO, cast

from regimen.conf.errors import ConfigError, readable
from regimen.conf.layout import installed_version
from regimen.scripts.cli.deferred import defer_imports
from regimen.scripts.cli.signals import end_on_signals
from regimen.trainer.errors import describe as describe
from regimen.trainer.errors import exit_code as exit_code
from regimen.trainer.errors import is_user_code
from regimen.trainer.files.layout import VisibleFormatter, escape_controls, indented_lines

logger = logging.getLogger("regimen")
log_file = logging.getLogger("regimen.log")  # for `train.log`: the terminal does not show it
_JOB = "REGIMEN_SWEEP_JOB"
AS_JOB = {_JOB: "1"}  # added to the environment of a job of a sweep


def run_and_exit(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> NoReturn:
    """Run a whole command and exit with its code, or after an `error:` line with the error's."""
    set_up()
    try:
        code = command(argv)
    except BaseException as error:
        code = report(error)
    if "RANK" in os.environ:  # one of several processes
        end_process(code)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def end_process(code: int) -> NoReturn:
    """Exit as Python does, but without tearing the interpreter down.

    Threads of gloo live on until then, and one may still hold a tensor. If it asks for the
    interpreter while that is torn down, the process is aborted, and a whole run is reported as
    killed by SIGABRT. Processes of `multiprocessing` end in the same way.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, ends executors
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def set_up() -> None:
    """Prepare imports, streams, warnings and signals of a process, before it does more."""
    # torch, which is not imported yet, then asks for huge pages: a large tensor's first use of
    # new memory takes a third of the time (a batch of 64 x 3 x 224 x 224: 10 ms, not 30).
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    defer_imports()
    ignore_broken_pipes()
    route_warnings()
    end_on_signals()


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during imports, which create many objects that all stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def report(error: BaseException) -> int:
    """Print the error that ended the command, and return its exit code."""
    code = exit_code(error)
    if code == 0:  # help was requested, and is printed
        return 0
    # Of several processes of torchrun only the first to fail prints its error.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from regimen.trainer.distributed import is_first_to_fail

        if not is_first_to_fail(error):
            return code
    text = describe(error)
    print_error(text, _format_traceback(error, text) if code == 1 else "")
    if isinstance(error, ConfigError) and error.more is not None:
        sys.stderr.flush()  # the search that follows imports torch
        problems = error.more()
        if problems:
            print(f"  {len(problems)} more in what else is configured:", file=sys.stderr)
        for problem in problems:
            print(f"  {problem}", file=sys.stderr)
    return code


def _format_traceback(error: BaseException, text: str) -> str:
    """Format a traceback without the note that is printed as the `error:` line."""
    trace = traceback.TracebackException.from_exception(error)
    trace.__notes__ = [note for note in trace.__notes__ or () if note != text]
    return "".join(trace.format())


def print_error(text: str, trace: str = "") -> None:
    """Print the `error:` line, and before it a traceback."""
    first, *rest = map(readable, indented_lines(text))
    print(f"{escape_controls(trace)}error: {first}", *rest, sep="\n", file=sys.stderr)


def log_to_stderr(verbose: bool) -> None:
    """Print log messages without a prefix: all, or warnings only, as in jobs of a sweep."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(VisibleFormatter("%(message)s"))
    handler.setLevel(logging.INFO if verbose and not is_job() else logging.WARNING)
    handler.addFilter(lambda record: record.name != log_file.name)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)


def is_job() -> bool:
    """Return whether this process belongs to a job of a sweep; the sweep reports the progress."""
    return os.environ.get(_JOB) == "1"


def print_banner() -> None:
    """Print versions to stderr, then the log; not in jobs of a sweep, nor on other ranks."""
    is_first = os.environ.get("RANK", "0") == "0"
    log_to_stderr(is_first)
    if is_first and not is_job():
        # One write: a signal must not split the line.
        sys.stderr.write(f"regimen {installed_version()}, torch {metadata.version('torch')}\n")
        sys.stderr.flush()


def usable_cpus() -> Collection[int]:
    """Return the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


class _SafeStream:
    """A text stream that drops its output after a write error (a closed pipe, a full disk)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, or drop it after an error."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # lone surrogates, or letters that a terminal's encoding lacks
            encoding = self._stream.encoding
            escaped = text.encode(encoding, "backslashreplace").decode(encoding)
            return self._stream.write(escaped)
        except OSError:
            # The buffer of the stream goes there as well: Python would flush it again at exit.
            _redirect_to_null(self._stream.fileno())
            return len(text)

    def flush(self) -> None:
        """Flush the stream, or drop its buffer after an error."""
        try:
            self._stream.flush()
        except OSError:
            _redirect_to_null(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def ignore_broken_pipes() -> None:
    """Make stdout and stderr ignore write errors, and open streams that were closed."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            try:
                os.fstat(descriptor)
            except OSError:  # closed: the next file that is opened would get the number
                _redirect_to_null(descriptor)
            null = open(os.devnull, "w" if descriptor else "r")  # noqa: SIM115 (until the end)
            setattr(sys, name, null)
        elif descriptor and not isinstance(stream, _SafeStream):
            setattr(sys, name, cast(TextIO, _SafeStream(stream)))


def _redirect_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def route_warnings() -> None:
    """Show warnings of the user's own code, each in one line; log those of libraries.

    The user can change nothing in a library. A TORCH_CPP_LOG_LEVEL that is set stays.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    process = os.getpid()

    def showwarning(
        text: Warning | str, category: type[Warning], file: str, line: int, *_: object
    ) -> None:
        words = " ".join(str(text).split())
        message = f"warning: {category.__name__}: {words} ({file}:{line})"
        is_own_code = is_user_code(file)
        if os.getpid() == process and logging.getLogger().handlers:
            destination = logger if is_own_code else log_file
            destination.warning("%s", message)
        elif is_own_code:  # in a worker process, which must not write to the log of its parent
            print(message, file=sys.stderr, flush=True)

    warnings.showwarning = showwarning  # type: ignore[assignment]
