"""What libraries say beside us: warnings of theirs go to `train.log`, not to the terminal."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import warnings
from functools import cache
from pathlib import Path
from typing import TextIO

from scripts.cli.shadow import PACKAGES, ROOT

LOG_ONLY = "regimen.log"  # the logger whose records the terminal does not show
_OF_CPP = "TORCH_CPP_LOG_LEVEL"


def quiet_others() -> None:
    """Show warnings of the user's own code alone, each in one line.

    Whoever reads the terminal can mend nothing in a library; a set TORCH_CPP_LOG_LEVEL stands.
    """
    os.environ.setdefault(_OF_CPP, "ERROR")
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
            name = LOG_ONLY if theirs else "regimen"
            logging.getLogger(name).warning("warning: %s", text)
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
