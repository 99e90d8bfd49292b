"""The installed torch: its build, the devices that it sees, their formats, its derivatives."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import conv2d, layer_norm, linear

from scripts.checkup.finding import Check, Finding
from trainer.update import precision

_DRIVER_SECONDS = 20.0


def device_checks() -> dict[str, Check]:
    """Return the checks by name."""
    return {
        "torch": torch_build,
        "driver": lambda: of_driver(driver(), torch.version.cuda, torch.cuda.is_available()),
        "devices": devices,
        "CPU formats": lambda: cpu_formats(Path("/proc/cpuinfo")),
        "GPU formats": gpu_formats,
        "derivatives": derivatives,
    }


def torch_build() -> Finding:
    """Tell which build of torch is installed."""
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs only"
    if torch.version.hip:
        build = f"built for ROCm {torch.version.hip}"
    return Finding("torch", f"{torch.__version__}, {build}")


def driver() -> str | None:
    """Return the version of NVIDIA's driver; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def of_driver(version: str | None, cuda: str | None, works: bool) -> Finding:
    """Hold the driver against the build of torch and whether that finds a GPU."""
    if version is None:
        return Finding("driver", "no NVIDIA driver answers: training is on the CPU")
    text = f"NVIDIA driver {version}"
    if works:
        return Finding("driver", text)
    if cuda is None:
        cure = "this torch is built for CPUs only: pip install torch from PyTorch's CUDA index"
        return Finding("driver", text, cure)
    cure = f"torch finds no GPU: update the driver for CUDA {cuda}, or unset CUDA_VISIBLE_DEVICES"
    return Finding("driver", text, cure)


def devices() -> Finding:
    """Name what a run can be on; each GPU must add two numbers."""
    if not torch.cuda.is_available():
        mps = torch.backends.mps.is_available()
        return Finding("devices", "cpu, mps" if mps else "cpu")
    names = []
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        names.append(f"cuda:{number} {facts.name} {facts.total_memory / 2**30:.0f} GiB")
        try:
            answer = (torch.ones(2, device=f"cuda:{number}") + 1).sum().item()
        except RuntimeError as error:
            cure = f"leave it out by CUDA_VISIBLE_DEVICES: {str(error).splitlines()[0]}"
            return Finding("devices", ", ".join(names), cure)
        if answer != 4.0:
            cure = f"leave it out by CUDA_VISIBLE_DEVICES: it added 1 + 1 wrongly ({answer})"
            return Finding("devices", ", ".join(names), cure)
    return Finding("devices", ", ".join(names))


def cpu_formats(cpuinfo: Path) -> Finding:
    """Name the number formats that the CPU computes in without emulation."""
    fast = sorted(precision.cpu_formats(cpuinfo) or ())
    level = torch.backends.cpu.get_cpu_capability()
    emulated = "" if "bf16" in fast else "; trainer.precision=bf16 works, but slowly"
    return Finding("CPU formats", f"{', '.join(['fp32', *fast])} ({level}){emulated}")


def gpu_formats() -> Finding:
    """Name the number formats that the GPUs compute in."""
    if not torch.cuda.is_available():
        return Finding("GPU formats", "no GPU")
    lines = [of_capability(torch.cuda.get_device_capability(n)) for n in range(gpu_count())]
    return Finding("GPU formats", "; ".join(f"cuda:{n} {line}" for n, line in enumerate(lines)))


def of_capability(capability: tuple[int, int]) -> str:
    """Return the formats of a GPU of a compute capability."""
    since = {"fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
    return ", ".join(["fp32", *(name for name, low in since.items() if capability >= low)])


def derivatives() -> Finding:
    """Hold torch's derivatives of three operators against finite differences."""
    places = ["cpu", *(f"cuda:{n}" for n in range(gpu_count()))]
    wrong = [
        f"{name} on {place}"
        for place in places
        for name, function, shapes in _operators()
        if not derivative_holds(function, shapes, place)
    ]
    if wrong:
        cure = "install another version of torch: its derivatives are not those of its functions"
        return Finding("derivatives", f"wrong: {', '.join(wrong)}", cure)
    names = ", ".join(name for name, _, _ in _operators())
    return Finding("derivatives", f"{names} agree with finite differences on {', '.join(places)}")


def derivative_holds(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]], place: str
) -> bool:
    """Return whether a function of float64 tensors of these shapes has the derivative it claims."""
    draws = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(shape, dtype=torch.float64, generator=draws).to(place).requires_grad_()
        for shape in shapes
    ]
    return torch.autograd.gradcheck(function, inputs, raise_exception=False)


def _operators() -> list[tuple[str, Callable[..., Tensor], list[tuple[int, ...]]]]:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return layer_norm(x, (4,), weight)

    return [
        ("linear", linear, [(3, 4), (2, 4), (2,)]),
        ("conv2d", conv2d, [(1, 2, 4, 4), (2, 2, 3, 3), (2,)]),
        ("layer_norm", norm, [(3, 4), (4,)]),
    ]


def gpu_count() -> int:
    """Return how many GPUs torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
