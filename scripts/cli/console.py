"""The output and the end of a command: log lines, the `error:` line, the exit code."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from scripts.cli.deferred import defer_imports
from scripts.cli.output import is_job, log_file, outlive_readers, quiet_others
from scripts.cli.signals import end_on_signals
from trainer.files.layout import (
    VisibleFormatter,
    columns_of,
    folded,
    folded_command,
    indented_lines,
    visible,
)

logger = logging.getLogger("regimen")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MOST_KEPT, _LARGEST_KEPT = 2**31 - 1, 2**25  # bytes: the most that mallopt takes


_LESS_MEMORY = (
    "raise trainer.gradient_accumulation_steps (the same training in less memory), set "
    "trainer.activation_checkpointing or trainer.precision=bf16, or lower loader.batch_size"
)


class Command:
    """The context of a whole command: it exits with `code`, or with the code of an exception.

    A failure prints one `error:` line.
    """

    code = 0

    def __enter__(self) -> Command:
        set_up()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> NoReturn:
        if error is not None:
            self.code = report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        sys.exit(self.code)


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


def report(error: BaseException) -> int:
    """Print the error that ended the command, and return its exit code."""
    code = exit_code(error)
    if not _speaks(error):
        return code
    text = describe(error)
    if code == 1:
        shown = traceback.TracebackException.from_exception(error)
        shown.__notes__ = [note for note in shown.__notes__ or () if note != text]
        print(visible("".join(shown.format())), end="", file=sys.stderr)
    first, *rest = indented_lines(text)
    print(f"error: {first}", *rest, sep="\n", file=sys.stderr)
    return code


def _speaks(error: BaseException) -> bool:
    """Return whether this process prints its error: under torchrun the first to fail does."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    from trainer.distributed.peers import Cause, agent_board

    board = agent_board()
    return board is None or board.claim(Cause.of(error, int(os.environ["RANK"])))


def exit_code(error: BaseException) -> int:
    """Return the exit code of an exception; 1 for an unexpected one."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if is_out_of_memory(error):
        return 8
    code = getattr(error, "exit_code", 1)
    return code if isinstance(code, int) else 1


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the GPU or the host ran out of memory; does not import torch."""
    named = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return named or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def describe(error: BaseException) -> str:
    """Return the message of an exception, or the name of its type if it has none."""
    text = str(error).strip()
    if is_out_of_memory(error):
        first = text.splitlines()[0] if text else "no memory is left"
        return f"out of memory: {first}; {_LESS_MEMORY}"
    if hasattr(error, "exit_code") or exit_code(error) != 1:
        return text or type(error).__name__
    from trainer.user_code import account  # needed by few commands, and only at their end

    first = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}".rstrip(": ")
    return account(error) or first


class _Folding(VisibleFormatter):
    """Break long lines between words on a terminal; elsewhere each message is one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record; a command (`extra={"command": ...}`) can still be pasted."""
        text, columns = super().format(record), columns_of(sys.stderr)
        command = getattr(record, "command", None)
        if columns is None or command is None or len(text) <= columns:
            return folded(text, columns)
        before = text.partition(command)[0].rstrip()
        return f"{before}\n  {folded_command(command, columns - 2, indent='      ')}"


def log_to_stderr(verbose: bool) -> None:
    """Print log messages without a prefix: all, or warnings only, as in jobs of a sweep."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Folding("%(message)s"))
    handler.setLevel(logging.INFO if verbose and not is_job() else logging.WARNING)
    handler.addFilter(lambda record: record.name != log_file.name)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during imports, which create many objects that all stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
