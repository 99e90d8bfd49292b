"""What a command prints beside its answer: one line first, and nothing of what libraries say.

The first line is printed before torch is imported, so it names a device only where no other can be
meant. Streams whose reader has left take what is written to them.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import sysconfig
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO, cast

from scripts.cli.shadow import PACKAGES, ROOT

log_file = logging.getLogger("regimen.log")  # for `train.log`: the terminal does not show it
_JOB = "REGIMEN_SWEEP_JOB"
AS_JOB: Mapping[str, str] = {_JOB: "1"}  # what the environment of a job of a sweep has
_TOPOLOGY = Path("/sys/devices/system/cpu")
_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg", "/proc/driver/nvidia")


def is_job() -> bool:
    """Return whether this process works for a job of a sweep, which itself tells what is done."""
    return os.environ.get(_JOB) == "1"


def greet(asked: str = "auto") -> None:
    """Print versions, device and threads to stderr; not in jobs of a sweep, nor on other ranks.

    `asked`: the kind of device that the command line asks for.
    """
    if is_job() or os.environ.get("RANK", "0") != "0":
        return
    count = threads()
    computing = f"{count} thread{'s' * (count != 1)}"
    if (device := known_device(asked)) is not None:
        computing = f"{device}, {computing}"
    facts = [f"{name} {metadata.version(name)}" for name in ("regimen", "torch")]
    encoding = getattr(sys.stderr, "encoding", None) or "ascii"
    dot = "·" if encoding.lower().startswith("utf") else "-"
    print(*facts, computing, sep=f" {dot} ", file=sys.stderr, flush=True)


def asked_device(overrides: Sequence[str], key: str = "strategy.accelerator") -> str:
    """Return the kind of device that a command line names; auto where it names none."""
    given = [text.partition("=")[2] for text in overrides if text.lstrip("+").startswith(f"{key}=")]
    return given[-1].partition(":")[0] if given else "auto"


def known_device(asked: str = "auto") -> str | None:
    """Return the kind of device that will compute; None where torch has to look."""
    if asked in ("cpu", "cuda", "mps"):
        return asked
    if sys.platform == "darwin":
        return None if platform.machine() == "arm64" else "cpu"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    driver = sys.platform != "linux" or any(Path(path).exists() for path in _DRIVERS)
    return None if driver and not hidden else "cpu"


def threads() -> int:
    """Return how many threads an operation of torch will use, by its own default on this CPU."""
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):  # torch asks MKL first
        given = os.environ.get(name, "").partition(",")[0]
        if given.isdigit() and int(given):
            return int(given)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_core(cpu) for cpu in os.sched_getaffinity(0)})  # MKL counts no hyper-threads


def _core(cpu: int) -> tuple[str, str]:
    folder = _TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        package, core = folder / "physical_package_id", folder / "core_id"
        return package.read_text().strip(), core.read_text().strip()
    except OSError:
        return "", str(cpu)


class _Outlet:
    """A text stream that drops its output after a write error (a closed pipe, a full disk)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, or drop it after an error."""
        try:
            return self._stream.write(text)
        except OSError:
            self._silence()
            return len(text)

    def flush(self) -> None:
        """Flush the stream, or drop its buffer after an error."""
        try:
            self._stream.flush()
        except OSError:
            self._silence()

    def _silence(self) -> None:
        # The buffer of the stream goes there as well: Python would flush it again at exit.
        _into_nothing(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """Make stdout and stderr ignore write errors, and open streams that were closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _opened(number))
        elif number and not isinstance(stream, _Outlet):
            setattr(sys, name, cast(TextIO, _Outlet(stream)))


def _opened(number: int) -> TextIO:
    """Open the null device for a missing stream, or another file would get its descriptor."""
    try:
        os.fstat(number)
    except OSError:
        _into_nothing(number)
    return open(os.devnull, "w" if number else "r", encoding="utf-8")


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
    process, show = os.getpid(), warnings.formatwarning

    def tell(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is not None:
            file.write(show(message, category, filename, lineno, line))
            return
        theirs = is_library(filename)
        text = f"{category.__name__}: {' '.join(str(message).split())} ({filename}:{lineno})"
        if os.getpid() == process and logging.getLogger().handlers:
            log = log_file if theirs else logging.getLogger("regimen")
            log.warning("warning: %s", text)
        elif not theirs:  # in a worker, which must not write to the log of its parent
            print(f"warning: {text}", file=sys.stderr, flush=True)

    warnings.showwarning = tell


def is_library(filename: str) -> bool:
    """Return whether a file is part of Python, of an installed package, or of Regimen."""
    path = Path(filename)
    return not path.is_absolute() or any(path.is_relative_to(folder) for folder in _libraries())


@cache
def _libraries() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [Path(sysconfig.get_path(name)) for name in names]
    return (*installed, *(path.resolve() for path in installed), *(ROOT / p for p in PACKAGES))
