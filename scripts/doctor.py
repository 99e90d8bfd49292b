"""`regimen doctor`: whether this machine can train, a line for each part and its cure."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from scripts.cli.arguments import command_parser, parse_command
from scripts.cli.console import importing
from trainer.files.layout import on_one_line
from trainer.runs.manifest import versions

_GIB = 2**30
_PYTHON, _TORCH = ((3, 11), (3, 14)), (2, 11)  # as pyproject.toml has them
_OPEN_FILES = 1024
_SPACE = 5 * _GIB
_SPEED = 50  # MiB/s
_WRITTEN = 32  # MiB
_PAIR_SECONDS = 120  # two imports of torch on a busy machine are part of it


class Finding(NamedTuple):
    """What was found of a part of the machine, and what to do where that is not good."""

    text: str
    cure: str | None = None  # None: it is good


Check = Callable[[], Finding]


def doctor(argv: Sequence[str]) -> int:
    """Look at everything; return 0, or 8 where something has a cure."""
    parser = command_parser("regimen doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="for machines: a list of objects")
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    found = []
    for name, check in _checks(Path.cwd()):
        try:
            text, cure = check()
        except Exception as error:
            text = f"could not be checked: {type(error).__name__}: {error}"
            cure = "report it with this line, and train without it"
        found.append({"name": name, "text": text, "cure": cure, "good": cure is None})
        if not arguments.json:
            end = "" if cure is None else f"; cure: {cure}"
            mark = "good" if cure is None else "WARN"
            print(on_one_line(f"{mark}  {name:<20} {text}{end}"), flush=True)
    bad = sum(not one["good"] for one in found)
    if arguments.json:
        print(json.dumps(found))
    else:
        print("all is well" if not bad else f"to look at: {bad} of {len(found)}")
    return 8 if bad else 0


def _checks(folder: Path) -> Iterator[tuple[str, Check]]:
    yield from machine_checks(folder).items()
    with importing():
        import torch
    yield from device_checks().items()
    yield "two processes (gloo)", lambda: pair("gloo")
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        yield "two processes (nccl)", lambda: pair("nccl")


def machine_checks(folder: Path) -> dict[str, Check]:
    """Return the checks without torch; files are written into `folder` for a moment."""
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {
        "versions": lambda: of_versions(versions()),
        "threads": lambda: of_threads(cpus, os.environ.get("OMP_NUM_THREADS")),
        "shared memory": lambda: of_shared_memory(Path("/dev/shm")),
        "open files": lambda: of_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        "disk space": lambda: of_space(folder, shutil.disk_usage(folder).free),
        "disk speed": lambda: of_speed(folder, write_speed(folder)),
    }


def of_versions(found: dict[str, str]) -> Finding:
    """Hold the versions of Python and torch against those that are supported."""
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    python, torch = (
        tuple(map(int, found.get(name, "0.0").split(".")[:2])) for name in ("python", "torch")
    )
    if not _PYTHON[0] <= python < _PYTHON[1]:
        return Finding(text, "use Python 3.11, 3.12 or 3.13")
    return Finding(text, "pip install 'torch>=2.11'" if torch < _TORCH else None)


def of_threads(cpus: int, wanted: str | None) -> Finding:
    """Hold the number of threads that the environment asks for against the CPUs."""
    text = f"{cpus} CPUs for this process, OMP_NUM_THREADS {wanted or 'not set'}"
    if wanted is not None and not wanted.replace(",", "").isdigit():
        return Finding(text, "set OMP_NUM_THREADS to a number, or unset it")
    if wanted is not None and int(wanted.split(",")[0]) > cpus:
        return Finding(text, f"unset OMP_NUM_THREADS, or set it to at most {cpus}")
    return Finding(text)


def of_shared_memory(place: Path, needed: int = _GIB) -> Finding:
    """Look at the memory that batches of worker processes travel in."""
    if sys.platform != "linux":
        return Finding(f"{sys.platform} has no {place}")
    try:
        total, _, free = shutil.disk_usage(place)
    except OSError as error:
        cure = f"mount a tmpfs at {place}, or set loader.num_workers=0"
        return Finding(f"{place}: {error.strerror}", cure)
    text = f"{place} has {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    cure = f"docker run --shm-size=2g, or mount -o remount,size=2G {place}, or loader.num_workers=0"
    return Finding(text, None if free >= needed else cure)


def of_open_files(limit: int) -> Finding:
    """Hold the limit of open files against what workers and their queues need."""
    unlimited = limit == resource.RLIM_INFINITY
    enough = unlimited or limit >= _OPEN_FILES
    return Finding(f"limit {'none' if unlimited else limit}", None if enough else "ulimit -n 4096")


def of_space(folder: Path, free: int) -> Finding:
    """Hold the free bytes against what checkpoints take."""
    cure = "free some space, or set run_dir on another disk"
    return Finding(f"{free / _GIB:.1f} GiB free in {folder}", None if free >= _SPACE else cure)


def of_speed(folder: Path, speed: float) -> Finding:
    """Hold the speed of a durable write, in MiB/s, against what checkpoints want."""
    cure = "set run_dir on a faster disk, or save less often: callbacks.checkpoint.every_n_epochs"
    text = f"{speed:.0f} MiB/s written and synced in {folder}"
    return Finding(text, None if speed >= _SPEED else cure)


def write_speed(folder: Path, size: float = _WRITTEN) -> float:
    """Return how many MiB/s a file of `size` MiB is written and synced with."""
    content = os.urandom(int(size * 2**20))
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return size / max(time.perf_counter() - start, 1e-6)


def device_checks() -> dict[str, Check]:
    """Return the checks of the installed torch and of the devices that it sees."""
    import torch

    from trainer.update.precision import cpu_formats

    cuda = torch.version.cuda
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    build = f"built for CUDA {cuda}" if cuda else "built for CPUs only"
    build = f"built for ROCm {torch.version.hip}" if torch.version.hip else build

    def formats_of_cpu() -> Finding:
        fast = sorted(cpu_formats(Path("/proc/cpuinfo")) or ())
        emulated = "" if "bf16" in fast else "; trainer.precision=bf16 works, but slowly"
        level = torch.backends.cpu.get_cpu_capability()
        return Finding(f"{', '.join(['fp32', *fast])} ({level}){emulated}")

    def formats_of_gpus() -> Finding:
        lines = [of_capability(torch.cuda.get_device_capability(n)) for n in range(gpus)]
        named = "; ".join(f"cuda:{n} {line}" for n, line in enumerate(lines))
        return Finding(named or "no GPU")

    return {
        "torch": lambda: Finding(f"{torch.__version__}, {build}"),
        "driver": lambda: of_driver(_driver(), cuda, gpus > 0),
        "devices": lambda: _devices(gpus),
        "CPU formats": formats_of_cpu,
        "GPU formats": formats_of_gpus,
        "derivatives": lambda: derivatives(["cpu", *(f"cuda:{n}" for n in range(gpus))]),
    }


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.split() else None


def of_driver(version: str | None, cuda: str | None, works: bool) -> Finding:
    """Hold the driver against the build of torch and whether that finds a GPU."""
    if version is None:
        return Finding("no NVIDIA driver answers: training is on the CPU")
    cure = "this torch is built for CPUs only: pip install torch from PyTorch's CUDA index"
    if cuda is not None:
        unset = "or unset CUDA_VISIBLE_DEVICES"
        cure = f"torch finds no GPU: update the driver for CUDA {cuda}, {unset}"
    return Finding(f"NVIDIA driver {version}", None if works else cure)


def _devices(gpus: int) -> Finding:
    # What a run can be on; each GPU must add two numbers.
    import torch

    names, cure = [], None
    for number in range(gpus):
        facts = torch.cuda.get_device_properties(number)
        names.append(f"cuda:{number} {facts.name} {facts.total_memory / 2**30:.0f} GiB")
        try:
            answer = (torch.ones(2, device=f"cuda:{number}") + 1).sum().item()
            wrong = "" if answer == 4.0 else f"it added 1 + 1 wrongly ({answer})"
        except RuntimeError as error:
            wrong = str(error).splitlines()[0]
        cure = cure or (f"leave it out by CUDA_VISIBLE_DEVICES: {wrong}" if wrong else None)
    other = "cpu, mps" if torch.backends.mps.is_available() else "cpu"
    return Finding(", ".join(names) or other, cure)


def of_capability(capability: tuple[int, int]) -> str:
    """Return the number formats of a GPU of a compute capability."""
    since = {"fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
    return ", ".join(["fp32", *(name for name, low in since.items() if capability >= low)])


def derivatives(places: Sequence[str], operators: dict[str, Any] | None = None) -> Finding:
    """Hold torch's derivatives of some operators against finite differences."""
    import torch
    from torch.nn.functional import conv2d, layer_norm, linear

    operators = operators or {
        "linear": (linear, [(3, 4), (2, 4), (2,)]),
        "conv2d": (conv2d, [(1, 2, 4, 4), (2, 2, 3, 3), (2,)]),
        "layer_norm": (lambda x, weight: layer_norm(x, (4,), weight), [(3, 4), (4,)]),
    }
    wrong = []
    for place in places:
        for name, (function, shapes) in operators.items():
            draws = torch.Generator().manual_seed(0)
            inputs = [
                torch.randn(s, dtype=torch.float64, generator=draws).to(place).requires_grad_()
                for s in shapes
            ]
            if not torch.autograd.gradcheck(function, inputs, raise_exception=False):
                wrong.append(f"{name} on {place}")
    if wrong:
        cure = "install another version of torch: its derivatives are not those of its functions"
        return Finding(f"wrong: {', '.join(wrong)}", cure)
    names = ", ".join(operators)
    return Finding(f"{names} agree with finite differences on {', '.join(places)}")


def pair(backend: str) -> Finding:
    """Let two processes of this machine meet."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "scripts.doctor", backend, f"{folder}/store"]
        failure = run_together([[*command, str(rank)] for rank in range(2)], _PAIR_SECONDS)
    if failure is None:
        return Finding("found each other and added up their numbers")
    variable = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}[backend]
    cure = f"let this host's name resolve (/etc/hosts), or {variable}=lo; strategy=single works"
    return Finding(failure, cure)


def run_together(commands: Sequence[Sequence[str]], seconds: float) -> str | None:
    """Run commands at the same time; return what failed, None if nothing did. None outlives it."""
    processes = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=seconds)[1] for process in processes]
    except subprocess.TimeoutExpired:
        return f"they did not find each other within {seconds:g} s"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [text for process, text in zip(processes, said, strict=True) if process.returncode]
    return (failed[0].strip().splitlines() or ["no reason given"])[-1] if failed else None


def _meet(backend: str, store: str, rank: int) -> None:
    # One of the two processes.
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_PAIR_SECONDS / 4),
    )
    number = torch.tensor([rank + 1.0], device=f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.all_reduce(number)
    dist.destroy_process_group()
    if number.item() != 3.0:
        raise SystemExit(f"1 + 2 was {number.item()}")


if __name__ == "__main__":
    _meet(sys.argv[1], sys.argv[2], int(sys.argv[3]))
