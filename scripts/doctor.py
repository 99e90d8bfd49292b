"""`regimen doctor`: whether this machine can train, a line for each part and its cure."""

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from regimen.conf.errors import one_line
from regimen.conf.layout import DISTRIBUTION, ROOT
from regimen.scripts.cli.arguments import command_parser
from regimen.scripts.cli.console import importing, usable_cpus
from regimen.trainer.runs.directory import versions

_GIB = 2**30
_OPEN_FILES = 1024
_SPACE = 5 * _GIB

Finding = tuple[str, str | None]  # what was found, and what to do where that is not good


def doctor(argv: Sequence[str]) -> int:
    """Look at everything; return 0, or 8 where something has a cure."""
    parser = command_parser("regimen doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="for machines: a list of objects")
    arguments = parser.parse_intermixed_args(argv)
    found = []
    for name, check in _checks():
        try:
            text, cure = check()
        except Exception as error:
            text = f"could not be checked: {type(error).__name__}: {error}"
            cure = "report it with this line, and train without it"
        found.append({"name": name, "text": text, "cure": cure, "good": cure is None})
        if not arguments.json:
            mark, end = ("good", "") if cure is None else ("WARN", f"; cure: {cure}")
            print(one_line(f"{mark}  {name:<20} {text}{end}"), flush=True)
    bad = sum(not one["good"] for one in found)
    told = "all is well" if not bad else f"to look at: {bad} of {len(found)}"
    print(json.dumps(found) if arguments.json else told)
    return 8 if bad else 0


def _checks() -> Iterator[tuple[str, Callable[[], Finding]]]:
    found = (f"{name} {version}" for name, version in versions().items())
    yield "versions", lambda: (", ".join(found), None)
    yield "import name", _import_name
    yield "threads", _threads
    yield "open files", _open_files
    yield "disk", _disk
    with importing():
        import torch

        from regimen.trainer import device
    cuda = torch.version.cuda
    there = {"CUDA": cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    built = ", ".join(f"{name} {version}" for name, version in there.items() if version)
    yield "torch", lambda: (f"{torch.__version__}, built for {built or 'CPUs only'}", None)
    yield "driver", lambda: of_driver(cuda, device.device_count() > 0)
    yield "devices", _devices


def _import_name() -> Finding:
    """Look for the other project that is called `regimen`, whose files would overwrite ours."""
    try:
        version = metadata.version("regimen")
    except metadata.PackageNotFoundError:
        return f"`import regimen` is {ROOT}", None
    cure = f"pip uninstall regimen; pip install --force-reinstall {DISTRIBUTION}"
    return f"the package regimen {version} is another project with the same import name", cure


def _threads() -> Finding:
    cpus = len(usable_cpus())
    wanted = os.environ.get("OMP_NUM_THREADS", "not set")
    text, first = f"{cpus} CPUs for this process, OMP_NUM_THREADS {wanted}", wanted.split(",")[0]
    good = wanted == "not set" or (first.isdigit() and int(first) <= cpus)
    return text, None if good else f"unset OMP_NUM_THREADS, or set it to a number up to {cpus}"


def _open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = limit == resource.RLIM_INFINITY
    good = unlimited or limit >= _OPEN_FILES
    return f"limit {'none' if unlimited else limit}", None if good else "ulimit -n 4096"


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    text = f"{free / _GIB:.1f} GiB free in {Path.cwd()}"
    return text, None if free >= _SPACE else "free some space, or set run_dir on another disk"


def of_driver(cuda: str | None, works: bool) -> Finding:
    """Hold the driver against the build of torch and whether that finds a GPU."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.CalledProcessError):
        if works:
            return "no NVIDIA driver answers; the devices below need none", None
        return "no NVIDIA driver answers: training is on the CPU", None
    cure = "this torch is built for CPUs only: pip install torch from PyTorch's CUDA index"
    if cuda is not None:
        unset = "or unset CUDA_VISIBLE_DEVICES"
        cure = f"torch finds no GPU: update the driver for CUDA {cuda}, {unset}"
    return f"NVIDIA driver {done.stdout.partition(chr(10))[0]}", None if works else cure


def _devices() -> Finding:
    """Name the devices; of a CPU the number formats in which it is fast."""
    import torch

    from regimen.trainer.device import describe_all
    from regimen.trainer.update.precision import cpu_formats

    fast = ", ".join(["fp32", *sorted(cpu_formats())])
    emulated = "" if "bf16" in fast else "; trainer.precision=bf16 works, but slowly"
    named = [f"cpu ({fast}; {torch.backends.cpu.get_cpu_capability()}{emulated})"]
    return ", ".join([*named, *describe_all()]), None
