"""Where randomness starts, and the switches that decide whether a device repeats itself."""

import hashlib
import os
import random

import numpy as np
import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed `random`, numpy and torch (every device) from one non-negative integer.

    Rank 0 gets `seed` as it is; the others streams of their own, or all would draw the same
    dropout masks.
    """
    value = seed if rank == 0 else derived(seed, rank)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.manual_seed(value)


def set_switches(*, deterministic: bool, cudnn_benchmark: bool, tf32: bool) -> dict[str, bool]:
    """Set torch's switches for this process; return what holds now, for the manifest.

    `deterministic` refuses operations that cannot repeat themselves, and turns cuDNN's benchmark
    off, since its choice depends on timing. Call it before CUDA is used: cuBLAS reads its part of
    the setting once.
    """
    if deterministic:
        os.environ.setdefault(_CUBLAS, ":4096:8")
    benchmark = cudnn_benchmark and not deterministic
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = benchmark
    _set_tf32(tf32)
    return {"deterministic": deterministic, "cudnn_benchmark": benchmark, "tf32": tf32}


def _set_tf32(enabled: bool) -> None:
    # The older switches set the newer ones (`fp32_precision`) as well; the other way round torch
    # raises where the older are read, as `torch.backends.cudnn.flags()` does. CUDA's own: the
    # global one would change matrix products on some CPUs as well.
    torch.backends.cuda.matmul.allow_tf32 = enabled
    torch.backends.cudnn.allow_tf32 = enabled


def tf32_remark(precision: str, tf32: bool, device: torch.device) -> str | None:
    """Say where a run of full precision is not what torch does by itself; None elsewhere."""
    if device.type != "cuda" or precision != "fp32" or tf32:
        return None
    return (
        "trainer.precision=fp32 computes convolutions in IEEE single precision, where torch by "
        "itself takes TF32: trainer.tf32=true is faster and keeps 10 bits of the mantissa"
    )


def derived(seed: int, *parts: object) -> int:
    """Return a seed for what the parts name, unrelated to all others."""
    text = "/".join(map(str, (seed, *parts)))
    content = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(content, "little") >> 1  # torch takes no more than 63 bits everywhere
