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
    """Check everything; return 0, or 8 where something has a cure."""
    parser = command_parser("regimen doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="for machines: a list of objects")
    arguments = parser.parse_intermixed_args(argv)
    results = []
    for name, check in _checks():
        try:
            text, cure = check()
        except Exception as error:
            text = f"could not be checked: {type(error).__name__}: {error}"
            cure = "report it with this line, and train without it"
        results.append({"name": name, "text": text, "cure": cure, "good": cure is None})
        if not arguments.json:
            line = f"good  {name:<20} {text}"
            if cure is not None:
                line = f"WARN  {name:<20} {text}; cure: {cure}"
            print(one_line(line), flush=True)
    bad = [result for result in results if not result["good"]]
    if arguments.json:
        print(json.dumps(results))
    elif bad:
        print(f"to look at: {len(bad)} of {len(results)}")
    else:
        print("all is well")
    return 8 if bad else 0


def _checks() -> Iterator[tuple[str, Callable[[], Finding]]]:
    yield "versions", _versions
    yield "import name", _import_name
    yield "threads", _threads
    yield "open files", _open_files
    yield "disk", _disk
    with importing():
        import torch

        from regimen.trainer import device
    yield "torch", _torch
    yield "driver", lambda: of_driver(torch.version.cuda, device.device_count() > 0)
    yield "devices", _devices


def _versions() -> Finding:
    return ", ".join(f"{name} {version}" for name, version in versions().items()), None


def _import_name() -> Finding:
    """Look for the other project that is called `regimen`, whose files would overwrite ours."""
    try:
        version = metadata.version("regimen")
    except metadata.PackageNotFoundError:
        return f"`import regimen` is {ROOT}", None
    return (
        f"the package regimen {version} is another project with the same import name",
        f"pip uninstall regimen; pip install --force-reinstall {DISTRIBUTION}",
    )


def _threads() -> Finding:
    cpus = len(usable_cpus())
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    text = f"{cpus} CPUs for this process, OMP_NUM_THREADS {threads}"
    outermost = threads.split(",")[0]  # a list has the numbers of nested levels
    if threads == "not set" or (outermost.isdigit() and int(outermost) <= cpus):
        return text, None
    return text, f"unset OMP_NUM_THREADS, or set it to a number up to {cpus}"


def _open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return "limit none", None
    return f"limit {limit}", None if limit >= _OPEN_FILES else "ulimit -n 4096"


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    text = f"{free / _GIB:.1f} GiB free in {Path.cwd()}"
    return text, None if free >= _SPACE else "free some space, or set run_dir on another disk"


def _torch() -> Finding:
    import torch

    platforms = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    built = [f"{name} {version}" for name, version in platforms.items() if version]
    return f"{torch.__version__}, built for {', '.join(built) or 'CPUs only'}", None


def of_driver(cuda: str | None, works: bool) -> Finding:
    """Compare the NVIDIA driver with the build of torch; `works`: torch finds a GPU."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.CalledProcessError):
        if works:
            return "no NVIDIA driver answers; the devices below need none", None
        return "no NVIDIA driver answers: training is on the CPU", None
    text = f"NVIDIA driver {done.stdout.split(chr(10))[0]}"
    if works:
        return text, None
    if cuda is None:
        return (
            text,
            "this torch is built for CPUs only: pip install torch from PyTorch's CUDA index",
        )
    return (
        text,
        f"torch finds no GPU: update the driver for CUDA {cuda}, or unset CUDA_VISIBLE_DEVICES",
    )


def _devices() -> Finding:
    """Name the devices; of a CPU the number formats in which it is fast."""
    import torch

    from regimen.trainer.components.precision import cpu_formats
    from regimen.trainer.device import describe_all

    formats = ["fp32", *sorted(cpu_formats())]
    hint = "" if "bf16" in formats else "; trainer.precision=bf16 works, but slowly"
    cpu = f"cpu ({', '.join(formats)}; {torch.backends.cpu.get_cpu_capability()}{hint})"
    return ", ".join([cpu, *describe_all()]), None
