"""The random number generators of this process: seeding, and a state that can be saved."""

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
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
    return _savable(_states(devices))


def restore(state: dict[str, Any], devices: Sequence[torch.device] | None = None) -> list[str]:
    """Restore the generators; return a description of what could not be restored.

    `devices` are those of this process, in the order in which `capture` was given its own; they may
    be other devices than those.
    """
    python, numpy, here, saved = state["python"], state["numpy"], _cuda(devices), state["cuda"]
    rest = (numpy[part] for part in ("position", "has_gauss", "cached_gaussian"))
    states = (
        state["torch"].cpu(),
        (python["version"], tuple(python["internal"].tolist()), python["gauss_next"]),
        (numpy["name"], numpy["keys"].numpy().astype(np.uint32), *rest),
        [own.cpu() for own in saved],
    )
    _put_back(states, here)
    lost = len(saved) - len(here)
    return [f"the random state of {lost} GPUs (this process has {len(here)})"] if lost > 0 else []


class RandomStates:
    """The random states that a run trains with, whatever is imported or drawn beside the training.

    `seed` returns that of what is drawn beside it: so a callback draws the same numbers after a
    resume, and others at another time.
    """

    def __init__(self, devices: Sequence[torch.device], seed: Callable[[], int]) -> None:
        self._devices, self._seed = devices, seed
        self._kept: _States | None = None  # of the training, while something else may draw
        self._aside = False

    def keep(self) -> None:
        """Take the present states for those of the training, until the next `aside` ends."""
        self._kept = _states(self._devices)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let something else than the training import, draw and save; nested ones do nothing."""
        if self._aside:
            yield
            return
        if self._kept is None:
            self.keep()
        self._aside = True
        try:
            _seed_all(self._devices, self._seed())
            yield
        finally:
            kept, self._kept, self._aside = self._kept, None, False
            if kept is not None:
                _put_back(kept, self._devices)

    def state_dict(self) -> dict[str, Any]:
        """Return what `capture` would return if only the training went on."""
        return _savable(self._kept or _states(self._devices))

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Let the training go on from a state; return what could not be restored, in words."""
        lost = restore(state, self._devices)
        if self._kept is not None:
            self.keep()
        return lost


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Restore the generators afterwards: torch's (CPU and `device`), `random` and numpy's."""
    before = _states([device])
    try:
        yield
    finally:
        _put_back(before, [device])


@contextmanager
def keyed(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators within the context, and restore those of the run afterwards."""
    with preserved(device):
        _seed_all([device], seed)
        yield


# Of torch, `random` and numpy, and of the CUDA devices: as their libraries return them.
_States = tuple[torch.Tensor, Any, Any, list[torch.Tensor]]


def _states(devices: Sequence[torch.device] | None) -> _States:
    cuda = [torch.cuda.get_rng_state(device) for device in _cuda(devices)]
    return torch.get_rng_state(), random.getstate(), np.random.get_state(), cuda


def _put_back(states: _States, devices: Sequence[torch.device]) -> None:
    ours, python, numpy, cuda = states
    torch.set_rng_state(ours)
    random.setstate(python)
    np.random.set_state(numpy)
    for device, state in zip(_cuda(devices), cuda, strict=False):
        torch.cuda.set_rng_state(state, device)


def _seed_all(devices: Sequence[torch.device], seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds every device
    for device in _cuda(devices):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _savable(states: _States) -> dict[str, Any]:
    ours, (version, internal, gauss_next), (name, keys, position, has_gauss, gauss), cuda = states
    return {
        "torch": ours,
        "cuda": cuda,
        "python": {
            "version": version,
            "internal": torch.tensor(internal, dtype=torch.int64),
            "gauss_next": gauss_next,
        },
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(gauss),
        },
    }


def _cuda(devices: Sequence[torch.device] | None) -> list[torch.device]:
    if devices is not None:
        return [device for device in devices if device.type == "cuda"]
    # Reading the state would initialize CUDA, which a run on the CPU does not use.
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.device("cuda", torch.cuda.current_device())] if used else []


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
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    benchmark = cudnn_benchmark and not deterministic
    if deterministic or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)  # imports torch's compiler: seconds
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = benchmark
    # The older flags set the newer ones (`fp32_precision`) as well. After setting the newer ones
    # torch raises where the older are read, as `torch.backends.cudnn.flags()` does. Only CUDA's
    # flags are set: the global one would change matrix products on some CPUs as well.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    return {"deterministic": deterministic, "cudnn_benchmark": benchmark, "tf32": tf32}


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
