"""The random number generators of this process: seeding, and a state that can be saved."""

import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def capture(devices: Sequence[torch.device] | None = None) -> dict[str, Any]:
    """Return the states of torch, `random` and numpy.

    The states of torch are those of the CPU and of the CUDA devices among `devices`, which this
    process computes on; None means the current one, if CUDA is in use. `weights_only` loads accept
    the result.
    """
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _cuda(devices)],
        "python": _capture_python(),
        "numpy": capture_numpy(),
    }


def restore(state: dict[str, Any], devices: Sequence[torch.device] | None = None) -> list[str]:
    """Restore the generators; return a description of what could not be restored.

    `devices` are those of this process, in the order in which `capture` was given its own; they may
    be other devices than those.
    """
    torch.set_rng_state(state["torch"].cpu())
    _restore_python(state["python"])
    restore_numpy(state["numpy"])
    here, saved = _cuda(devices), state["cuda"]
    for device, own in zip(here, saved, strict=False):
        torch.cuda.set_rng_state(own.cpu(), device)
    lost = len(saved) - len(here)
    return [f"the random state of {lost} GPUs (this process has {len(here)})"] if lost > 0 else []


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Restore the generators afterwards: torch's (CPU and `device`), `random` and numpy's."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def keyed(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators within the context, and restore those of the run afterwards."""
    with preserved(device):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds every device
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        yield


def _cuda(devices: Sequence[torch.device] | None) -> list[torch.device]:
    if devices is not None:
        return [device for device in devices if device.type == "cuda"]
    # Reading the state would initialize CUDA, which a run on the CPU does not use.
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.device("cuda", torch.cuda.current_device())] if used else []


def _capture_python() -> dict[str, Any]:
    version, internal, gauss_next = random.getstate()
    return {
        "version": version,
        "internal": torch.tensor(internal, dtype=torch.int64),
        "gauss_next": gauss_next,
    }


def _restore_python(state: dict[str, Any]) -> None:
    random.setstate((state["version"], tuple(state["internal"].tolist()), state["gauss_next"]))


def capture_numpy(generator: Any = np.random) -> dict[str, Any]:
    """Return the state of numpy's generator, or of another `RandomState`."""
    name, keys, position, has_gauss, cached_gaussian = generator.get_state(legacy=True)
    return {
        "name": str(name),
        "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "cached_gaussian": float(cached_gaussian),
    }


def restore_numpy(state: dict[str, Any], generator: Any = np.random) -> None:
    """Restore numpy's generator, or another `RandomState`."""
    keys = state["keys"].numpy().astype(np.uint32)
    generator.set_state(
        (state["name"], keys, state["position"], state["has_gauss"], state["cached_gaussian"])
    )


_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed `random`, numpy and torch (every device) from one non-negative integer.

    Rank 0 uses `seed` itself. Other ranks use a derived seed, or all would draw the same dropout
    masks.
    """
    value = seed if rank == 0 else derived(seed, rank)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.manual_seed(value)


def set_switches(*, deterministic: bool, cudnn_benchmark: bool, tf32: bool) -> dict[str, bool]:
    """Set torch's global flags for this process; return their values, for the manifest.

    `deterministic` raises for nondeterministic operations and disables cuDNN's benchmark, whose
    choice depends on timing. Call this before CUDA is used: cuBLAS reads its environment variable
    once.
    """
    if deterministic:
        os.environ.setdefault(_CUBLAS, ":4096:8")
    benchmark = cudnn_benchmark and not deterministic
    if deterministic or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)  # imports torch's compiler: seconds
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = benchmark
    _set_tf32(tf32)
    return {"deterministic": deterministic, "cudnn_benchmark": benchmark, "tf32": tf32}


def _set_tf32(enabled: bool) -> None:
    # The older flags set the newer ones (`fp32_precision`) as well. After setting the newer ones
    # torch raises where the older are read, as `torch.backends.cudnn.flags()` does. Only CUDA's
    # flags are set: the global one would change matrix products on some CPUs as well.
    torch.backends.cuda.matmul.allow_tf32 = enabled
    torch.backends.cudnn.allow_tf32 = enabled


def tf32_remark(precision: str, tf32: bool, device: torch.device) -> str | None:
    """Return a remark if a run in full precision differs from torch's default; else None."""
    if device.type != "cuda" or precision != "fp32" or tf32:
        return None
    return (
        "trainer.precision=fp32 computes convolutions in IEEE single precision, where torch's "
        "default is TF32: trainer.tf32=true is faster and keeps 10 bits of the mantissa"
    )


def derived(seed: int, *parts: object) -> int:
    """Return a seed derived from `seed` and `parts`, independent of those of other parts."""
    text = "/".join(map(str, (seed, *parts)))
    content = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(content, "little") >> 1  # some functions of torch accept 63 bits only
