"""What a command prints beside its answer, and how it ends: the `error:` line and the exit code.

One line comes first, before torch is imported. What libraries say goes to the log. Streams whose
reader has left take what is written.
"""

import ctypes
import gc
import logging
import os
import sys
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
from regimen.trainer.files.layout import VisibleFormatter, indented_lines, visible

logger = logging.getLogger("regimen")
log_file = logging.getLogger("regimen.log")  # for `train.log`: the terminal does not show it
_JOB = "REGIMEN_SWEEP_JOB"
AS_JOB = {_JOB: "1"}  # what the environment of a job of a sweep has
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MOST_KEPT, _LARGEST_KEPT = 2**31 - 1, 2**25  # bytes: the most that mallopt takes


def leave_with(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> NoReturn:
    """Run a whole command and exit with its code, or after an `error:` line with the error's."""
    set_up()
    try:
        code = command(argv)
    except BaseException as error:
        code = report(error)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def set_up() -> None:
    """Prepare memory, imports, streams, warnings and signals of a process, before it does more."""
    # torch, which is not imported yet, then asks for huge pages: a large tensor's first use of
    # new memory takes a third of the time (a batch of 64 x 3 x 224 x 224: 10 ms, not 30).
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    keep_freed_memory()
    defer_imports()
    outlive_readers()
    quiet_others()
    end_on_signals()


def keep_freed_memory() -> None:
    """Let glibc keep up to 2 GiB of freed memory, in blocks of at most 32 MiB, for the next update.

    It would give back gradients and activations after each update, and the kernel would clear the
    pages that the next one asks for: 5,000 of them, 1 to 2% of an update of ResNet-18 on a CPU.
    What the user has set in the environment is kept; other C libraries have no such settings.
    """
    names = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if names or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)


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
    if (code := exit_code(error)) == 0:  # help was asked for
        return 0
    # Of several processes of torchrun the first to fail speaks.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from regimen.trainer.distributed import is_first_to_fail

        if not is_first_to_fail(error):
            return code
    text, trace = describe(error), ""
    if code == 1:
        shown = traceback.TracebackException.from_exception(error)
        shown.__notes__ = [note for note in shown.__notes__ or () if note != text]
        trace = "".join(shown.format())
    print_error(text, trace)
    if isinstance(error, ConfigError) and error.more is not None:
        sys.stderr.flush()  # the search that follows imports torch
        further = error.more()
        if further:
            print(f"  {len(further)} more in what else is configured:", file=sys.stderr)
        for problem in further:
            print(f"  {problem}", file=sys.stderr)
    return code


def print_error(text: str, trace: str = "") -> None:
    """Print the `error:` line, and before it a traceback."""
    first, *rest = map(readable, indented_lines(text))
    print(f"{visible(trace)}error: {first}", *rest, sep="\n", file=sys.stderr)


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
    """Return whether this process works for a job of a sweep, which itself tells what is done."""
    return os.environ.get(_JOB) == "1"


def greet() -> None:
    """Print versions to stderr, then the log; not in jobs of a sweep, nor on other ranks."""
    first = os.environ.get("RANK", "0") == "0"
    log_to_stderr(first)
    if first and not is_job():
        line = f"regimen {installed_version()}, torch {metadata.version('torch')}\n"
        sys.stderr.write(line)  # at once: a signal must not part the line
        sys.stderr.flush()


def usable_cpus() -> Collection[int]:
    """Return the CPUs that this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return os.sched_getaffinity(0) if known else range(os.cpu_count() or 1)


class _Outlet:
    """A text stream that drops its output after a write error (a closed pipe, a full disk)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, or drop it after an error."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # lone surrogates, or letters that a terminal's encoding lacks
            encoding = self._stream.encoding
            known = text.encode(encoding, "backslashreplace").decode(encoding)
            return self._stream.write(known)
        except OSError:
            # The buffer of the stream goes there as well: Python would flush it again at exit.
            _into_nothing(self._stream.fileno())
            return len(text)

    def flush(self) -> None:
        """Flush the stream, or drop its buffer after an error."""
        try:
            self._stream.flush()
        except OSError:
            _into_nothing(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """Make stdout and stderr ignore write errors, and open streams that were closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            try:
                os.fstat(number)
            except OSError:  # another file would get its descriptor
                _into_nothing(number)
            null = open(os.devnull, "w" if number else "r")  # noqa: SIM115 (until the end)
            setattr(sys, name, null)
        elif number and not isinstance(stream, _Outlet):
            setattr(sys, name, cast(TextIO, _Outlet(stream)))


def _into_nothing(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)


def quiet_others() -> None:
    """Show warnings of the user's own code alone, each in one line; those of libraries are logged.

    Whoever reads the terminal can mend nothing in a library; a set TORCH_CPP_LOG_LEVEL stands.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    process = os.getpid()

    def tell(text: Warning | str, kind: type[Warning], file: str, line: int, *_: object) -> None:
        theirs, message = not is_user_code(file), " ".join(str(text).split())
        said = f"warning: {kind.__name__}: {message} ({file}:{line})"
        if os.getpid() == process and logging.getLogger().handlers:
            (log_file if theirs else logger).warning("%s", said)
        elif not theirs:  # in a worker, which must not write to the log of its parent
            print(said, file=sys.stderr, flush=True)

    warnings.showwarning = tell  # type: ignore[assignment]
