"""The simulated accelerator of `sim/`, compiled once: the environment in which torch finds it."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "sim"
COMPILE = """
import sys
from torch.utils.cpp_extension import load
folder, *sources = sys.argv[1:]
options = {"extra_cflags": ["-O1"], "is_python_module": False}
load("regimen_sim", sources, build_directory=folder, **options)
"""


@functools.cache
def environment() -> dict[str, str]:
    """Return the variables with which `import torch` registers the device `sim`.

    It is compiled at the first call of all (a minute) and kept beside other temporary files.

    Raises:
        FileNotFoundError: there is no compiler.
    """
    for tool in ("g++", "ninja"):
        if not shutil.which(tool):
            raise FileNotFoundError(f"the simulated accelerator is compiled by {tool}: not found")
    files = sorted(map(str, SOURCES.glob("*.cpp")))
    text = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]*")))
    digest = hashlib.sha256(text + torch.__version__.encode() + sys.version.encode()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"regimen-sim-{os.getuid()}-{digest[:16]}"
    (information := folder / "regimen_sim-0.dist-info").mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-c", COMPILE, str(folder), *files], check=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: regimen-sim\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[torch.backends]\nsim = sim_device:load\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(SOURCES)])}
