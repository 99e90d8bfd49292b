"""The accelerator that tests compute on: this machine's, or the simulated one of `sim/`."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from regimen.trainer.device import default_device

SOURCES = Path(__file__).parent / "sim"
COMPILE = """
import sys
from torch.utils.cpp_extension import load
folder, *sources = sys.argv[1:]
options = {"extra_cflags": ["-O1"], "is_python_module": False}
load("regimen_sim", sources, build_directory=folder, **options)
"""

CPU = torch.device("cpu")
DEVICE = default_device()  # the CPU where there is no other
needs_accelerator = pytest.mark.skipif(
    DEVICE == CPU, reason="no accelerator: tests/integration/test_accelerator.py simulates one"
)
SIMULATED = DEVICE.type == "sim"  # whose numbers are the CPU's to the bit
LEAST = 1e-6  # between two real devices: 8e-9 was seen on an H200, with convolutions
needs_simulation = pytest.mark.skipif(not SIMULATED, reason="only the simulated one can tell")


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Count what makes the host wait for the device, by the line of code."""
    if DEVICE.type != "cuda":
        with torch.get_device_module(DEVICE).waits() as found:
            yield found
        return
    found = Counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for warning in told:
                # torch also warns, once, that this mode is a prototype: that is no wait.
                if "called a synchronizing" in str(warning.message):
                    found[f"{warning.filename}:{warning.lineno}"] += 1


def check_same(one: Any, other: Any, tolerance: float = LEAST) -> None:
    """Compare what was computed in float64 on two devices: to the bit on the simulated one.

    tolerance: relative and absolute, of a narrower format.
    """
    if SIMULATED and tolerance <= LEAST:
        tolerance = 0.0
    else:
        tolerance = max(tolerance, LEAST)
    options: Any = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(one, other, check_device=False, **options)


@functools.cache
def environment() -> dict[str, str]:
    """Return the variables with which `import torch` registers the device `sim`.

    It is compiled at the first call of all (a minute) and kept beside other temporary files.

    Raises:
        FileNotFoundError: there is no compiler.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for tool in ("g++", "ninja"):
        if not shutil.which(tool, path=path):
            raise FileNotFoundError(f"the simulated accelerator is compiled by {tool}: not found")
    files = sorted(map(str, SOURCES.glob("*.cpp")))
    text = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]*")))
    digest = hashlib.sha256(text + torch.__version__.encode() + sys.version.encode()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"regimen-sim-{os.getuid()}-{digest[:16]}"
    information = folder / "regimen_sim-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", COMPILE, str(folder), *files]
    subprocess.run(command, check=True, env={**os.environ, "PATH": path})
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: regimen-sim\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[torch.backends]\nsim = sim_device:load\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(SOURCES)])}
