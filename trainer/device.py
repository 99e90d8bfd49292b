"""What an accelerator is: all in which the devices that torch knows differ.

No other module names a kind of device, but for what is CUDA's alone. Everything here goes through
`torch.accelerator` and the module that torch has for a kind (`torch.cuda`, `torch.xpu`, or one that
a vendor's package registers), so that a device needs no code of its own.
"""

import functools
import gc
import os
import re
import resource
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# No streams on MPS until somebody has run them: torch has their names there.
_WITHOUT_STREAMS = ("cpu", "meta", "mps")
# The environment variable that limits the devices that a process sees, by their type.
_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
}
_SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}
_OF_HIP = "HIP_VISIBLE_DEVICES"
_OF_SYCL = "ONEAPI_DEVICE_SELECTOR"  # terms BACKEND:DEVICES, as level_zero:0,1


def device_types() -> list[str]:
    """Return the kinds of device of this machine, the one that `auto` takes first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    return [accelerator.type, "cpu"]


def device_count(kind: str = "auto") -> int:
    """Return how many accelerators of a kind this machine has; of `auto`, of any."""
    first = device_types()[0]
    if first == "cpu" or kind not in ("auto", first):
        return 0
    return torch.accelerator.device_count()


def with_index(device: torch.device | str) -> torch.device:
    """Return a device with its number, 0 without one; a CPU has none."""
    device = torch.device(device)
    if device.index is not None or device.type in ("cpu", "meta"):
        return device
    return torch.device(device.type, 0)


def default_device() -> torch.device:
    """Return the device that `auto` computes on."""
    return with_index(device_types()[0])


def _works(probe: Callable[[], object]) -> bool:
    # A device that failed, or has no memory left, has not answered.
    try:
        probe()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    return True


# Whether a device can do something is tried on the device, once: those of vendors have any part of
# it, and none of the abilities below implies another.


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Return whether work is queued in streams that can wait for each other's events."""
    if device.type in _WITHOUT_STREAMS:
        return False

    def probe() -> None:
        current = current_stream(device)
        current.wait_event(side_stream(device).record_event())
        torch.empty(1, device=device).record_stream(current)

    return _works(probe)


@functools.cache
def pins(device: torch.device) -> bool:
    """Return whether copies between a device and pinned memory of the host need no wait.

    torch keeps such memory by the events of streams until a copy is done.
    """
    if not has_streams(device):
        return False
    return _works(lambda: torch.zeros(1).pin_memory().to(device, non_blocking=True))


def supports_collectives(device: torch.device, backend: str | None = None) -> bool:
    """Return whether a backend of torch.distributed, by default the device's, serves a device."""
    # Not imported at the top: data sets import this module, and need no torch.distributed.
    backends = torch.distributed.Backend
    if backend is None:
        backend = backends.default_device_backend_map.get(device.type, "")
    return device.type in backends.backend_capability.get(backend, ())


@functools.cache
def counts_memory(device: torch.device) -> bool:
    """Return whether torch counts the memory of a device."""
    return device.type != "cpu" and _works(lambda: torch.accelerator.max_memory_reserved(device))


def is_async(device: torch.device) -> bool:
    """Return whether the host must wait to read a number of the device."""
    return device.type != "cpu"


@functools.cache
def accumulate_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating-point format of a device, in which counts are divided.

    Waits for the device, once: some find out only while they compute.
    """
    if device.type in ("cpu", "meta"):
        return torch.float64
    # The host waits for the result: only then a device that lacks the format has raised.
    has_double = _works(lambda: torch.ones(1, dtype=torch.float64, device=device).add(1).item())
    return torch.float64 if has_double else torch.float32


def count_true(flags: Tensor) -> Tensor:
    """Return the number of flags (bool) that are set, without waiting for their device."""
    if flags.device.type == "cpu":
        return flags.count_nonzero()  # up to twenty times as fast as a sum there
    return flags.sum()  # one kernel, where the other has two


def storage_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the format in which a device holds numbers of a format: single for double if need be.

    Data in double precision come about by themselves, as from Python's numbers.
    """
    if dtype not in _SINGLE or accumulate_dtype(device) == torch.float64:
        return dtype
    return _SINGLE[dtype]


def autocasts(kind: str, dtype: torch.dtype) -> bool:
    """Return whether forward passes can run in a format; torch's autocast warns or raises else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.autocast(kind, dtype=dtype):
                return torch.is_autocast_enabled(kind)
        except RuntimeError:
            return False


def has_hardware_format(device: torch.device, name: str) -> bool:
    """Return whether an accelerator has units for `bf16` or `tf32`; True if it does not say.

    Without them torch emulates bfloat16, and computes in float32 where TF32 is allowed.
    """
    is_supported = getattr(torch.get_device_module(device), f"is_{name}_supported", None)
    if is_supported is None:
        return True
    if name == "bf16":
        with suppress(TypeError):  # a device whose function has no such argument
            return bool(is_supported(including_emulation=False))
    return bool(is_supported())


def backend_of(device: torch.device) -> str:
    """Return torch's backend of collectives between devices of a kind."""
    # Not imported at the top: data sets import this module, and need no torch.distributed.
    return torch.distributed.get_default_backend_for_device(device)


def product_name(device: torch.device) -> str:
    """Return the product name of an accelerator; for a CPU `cpu`."""
    if not is_async(device):
        return str(device)
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name_of is None else str(name_of(device))


def describe_all() -> list[str]:
    """Return number, product name and memory, if it tells, of every accelerator of this machine."""
    descriptions = []
    for number in range(device_count()):
        device = torch.device(device_types()[0], number)
        text = f"{device} {product_name(device)}"
        with suppress(RuntimeError):
            _, total = torch.accelerator.get_memory_info(device)
            text += f" {total / 2**30:.0f} GiB"
        descriptions.append(text)
    return descriptions


def visible() -> tuple[str, list[str]]:
    """Return the environment variable that limits which accelerators a process sees, and these."""
    kind = device_types()[0]
    variable = _VISIBLE.get(kind, f"{kind.upper()}_VISIBLE_DEVICES")
    if torch.version.hip is not None and _OF_HIP in os.environ:
        variable = _OF_HIP  # before which ROCm passes over CUDA's name
    number = device_count()
    if kind == "xpu":
        selected = _selected(os.environ.get(_OF_SYCL, ""))
        if selected:
            # The selector counts what the mask leaves: with a mask of one device, a job would see
            # none.
            return _OF_SYCL, selected[:number]
    names = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    if not names:
        names = [str(index) for index in range(number)]
    return variable, names[:number]


def _selected(selector: str) -> list[str]:
    """Return a term for each device that a selector names by numbers; none if it has others."""
    terms = []
    for term in filter(None, selector.split(";")):
        backend, _, devices = term.strip().partition(":")
        for device in devices.split(","):
            if not re.fullmatch(r"\d+(\.\d+)*", device.strip()):
                return []  # such as level_zero:gpu, of whatever number
            terms.append(f"{backend}:{device.strip()}")
    return terms


def select(device: torch.device) -> None:
    """Make a device the one that this process allocates on and queues work for."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)


# One for all loaders and epochs: torch caches memory for each stream, and that of an old one would
# stay allocated.
@functools.cache
def side_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which batches are prepared beside the computation."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream in which work on the device is queued now."""
    return torch.accelerator.current_stream(device)


def module_to_device(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module; its parameters stay the same objects, and tied ones tied.

    torch sets the memory of parameters, but for devices of vendors' packages, for which it would
    make new ones.
    """
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps or not _sets_memory(device))
    try:
        return module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


@functools.cache
def _sets_memory(device: torch.device) -> bool:
    module = nn.ParameterList([torch.zeros(())])
    before = module[0]
    return device.type in ("cpu", "meta") or module.to(device)[0] is before


def record_stream(stream: torch.Stream, tensor: Tensor) -> Tensor:
    """Keep a tensor's memory from being used again before a stream has finished with it."""
    if has_streams(tensor.device):
        tensor.record_stream(stream)
    return tensor


def copy_async(rows: Tensor, device: torch.device) -> Tensor:
    """Copy rows of numbers to a device, from pinned memory so that the host does not wait."""
    if device.type == rows.device.type:
        return rows
    if not pins(device):
        return rows.to(device)
    return rows.contiguous().pin_memory().to(device, non_blocking=True)


def rng_state(device: torch.device) -> Tensor:
    """Return the state of an accelerator's generator, in host memory."""
    state: Tensor = torch.get_device_module(device).get_rng_state(*_device_arguments(device))
    return state


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Let an accelerator's generator go on from a state."""
    torch.get_device_module(device).set_rng_state(state, *_device_arguments(device))


def seed_device(value: int, device: torch.device) -> None:
    """Seed an accelerator's generator, and no other."""
    with torch.accelerator.device_index(device.index or 0):
        torch.get_device_module(device).manual_seed(value)


def _device_arguments(device: torch.device) -> list[Any]:
    return [] if device.type == "mps" else [device]  # there is one MPS device, and no argument


def reset_peaks(device: torch.device) -> None:
    """Begin to measure the peaks of memory anew."""
    torch.accelerator.reset_peak_memory_stats(device)


def peaks(device: torch.device) -> dict[str, int]:
    """Return the peak memory in bytes: of tensors, and of torch's caching allocator."""
    return {
        "allocated": torch.accelerator.max_memory_allocated(device),
        "reserved": torch.accelerator.max_memory_reserved(device),
    }


def spare_memory(device: torch.device) -> int:
    """Return a tenth of an accelerator's memory in bytes; 0 of a CPU, or if the device tells none.

    It is what a run that was tried beforehand may take beyond the trial.
    """
    if not is_async(device):
        return 0
    with suppress(RuntimeError, NotImplementedError):
        _, total = torch.accelerator.get_memory_info(device)
        return int(total // 10)
    return 0


def empty_caches() -> None:
    """Give back the memory of what is no longer used: of the host, and what torch keeps."""
    gc.collect()
    if device_count():
        torch.accelerator.empty_cache()


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux


def reset_peak_rss() -> None:
    """Begin to measure that peak anew, where the system can (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
