"""The random number generators of this process: seeding, and a state that can be saved."""

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from regimen.conf.schema_trainer import TrainerConfig
from regimen.trainer.device import rng_state, seed_device, set_rng_state

_Devices = Sequence[torch.device]
# Of torch, `random` and numpy, and of accelerators: as their libraries return them.
_States = tuple[torch.Tensor, Any, Any, list[torch.Tensor]]
# How their parts are saved.
_PYTHON = ("version", "internal", "gauss_next")
_NUMPY = ("name", "keys", "position", "has_gauss", "cached_gaussian")


class RandomStates:
    """The random states that a run trains with, whatever is imported or drawn beside the training.

    `devices`: those that this process computes on. `seed` returns that of what is drawn beside it:
    so a callback draws the same numbers after a resume, and others at another time.
    """

    def __init__(self, devices: _Devices, seed: Callable[[], int]) -> None:
        self._devices, self._seed = _accelerators(devices), seed
        self._kind = self._devices[0].type if self._devices else "cpu"
        self._kept: _States | None = None  # of the training, while something else may draw
        self._aside = False

    def keep(self) -> None:
        """Take the present states for those of the training, until the next `aside` ends."""
        self._kept = _states(self._devices)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Let something else than the training import, draw and save; nested ones do nothing."""
        if self._aside:
            yield
            return
        self._kept = self._kept or _states(self._devices)
        self._aside = True
        _seed_all(self._devices, self._seed())
        try:
            yield
        finally:
            _put_back(self._kept, self._devices)
            self._kept, self._aside = None, False

    def state_dict(self) -> dict[str, Any]:
        """Return the states if only the training went on; loads with `weights_only` accept them."""
        ours, python, numpy, devices = self._kept or _states(self._devices)
        python = dict(zip(_PYTHON, python, strict=True))
        python["internal"] = torch.tensor(python["internal"], dtype=torch.int64)
        numpy = dict(zip(_NUMPY, numpy, strict=True))
        numpy["keys"] = torch.from_numpy(numpy["keys"].astype(np.int64))
        own = {"kind": self._kind, "states": devices}
        return {"torch": ours, "device": own, "python": python, "numpy": numpy}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Let the training go on from a state; return what could not be restored, in words.

        The devices may be others than those that it was saved on.
        """
        python, numpy, own = dict(state["python"]), dict(state["numpy"]), state["device"]
        python["internal"] = tuple(python["internal"].tolist())
        numpy["keys"] = numpy["keys"].numpy()
        parts = tuple(python.values()), tuple(numpy.values())
        known = own["kind"] == self._kind
        saved = [one.cpu() for one in own["states"]] if known else []
        _put_back((state["torch"].cpu(), *parts, saved), self._devices)
        if self._kept is not None:
            self.keep()
        if not known:
            moved = f"{own['kind']} on {self._kind}"
            return [f"the random state of {moved}: dropout differs from here on"]
        here = len(self._devices)
        lost = len(saved) - here
        return [f"the random state of {lost} devices (this process has {here})"] * (lost > 0)


@contextmanager
def seeded(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Seed the generators, and restore them afterwards: torch's (CPU, `device`), random, numpy."""
    before = _states([device])
    _seed_all([device], seed)
    try:
        yield
    finally:
        _put_back(before, [device])


def _accelerators(devices: _Devices) -> list[torch.device]:
    return [device for device in devices if device.type not in ("cpu", "meta")]


def _states(devices: _Devices) -> _States:
    own = [rng_state(device) for device in _accelerators(devices)]
    return torch.get_rng_state(), random.getstate(), np.random.get_state(), own


def _put_back(states: _States, devices: _Devices) -> None:
    ours, python, numpy, own = states
    torch.set_rng_state(ours)
    random.setstate(python)
    np.random.set_state(numpy)
    for device, state in zip(_accelerators(devices), own, strict=False):
        set_rng_state(state, device)


def _seed_all(devices: _Devices, seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds every device
    for device in _accelerators(devices):
        seed_device(seed, device)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed `random`, numpy and torch (every device) from one non-negative integer.

    Rank 0 uses `seed` itself. Other ranks use a derived seed, or all would draw the same dropout
    masks.
    """
    value = seed if rank == 0 else derived_seed(seed, rank)
    _seed_all([], value)
    torch.manual_seed(value)


def set_switches(options: TrainerConfig) -> dict[str, bool]:
    """Set torch's global flags for this process; return their values, for the manifest.

    `deterministic` raises for nondeterministic operations and disables cuDNN's benchmark, whose
    choice depends on timing. Call this before CUDA is used: cuBLAS reads its environment variable
    once.
    """
    if deterministic := options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    benchmark = options.cudnn_benchmark and not deterministic
    tf32 = options.tf32 or options.precision == "tf32"
    if deterministic or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)  # imports torch's compiler: seconds
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = benchmark
    # The older flags set the newer ones (`fp32_precision`) as well. After setting the newer ones
    # torch raises where the older are read, as `torch.backends.cudnn.flags()` does. Only CUDA's
    # flags are set: the global one would change matrix products on some CPUs as well.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    return {"deterministic": deterministic, "cudnn_benchmark": benchmark, "tf32": tf32}


def derived_seed(seed: int, *parts: object) -> int:
    """Return a seed derived from `seed` and `parts`, independent of those of other parts."""
    content = hashlib.blake2b("/".join(map(str, (seed, *parts))).encode(), digest_size=8).digest()
    return int.from_bytes(content, "little") >> 1  # some functions of torch accept 63 bits only
