"""The random number generators of this process: seeding, and a state that can be saved."""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from regimen.trainer.device import rng_state, seed_device, set_rng_state

_Devices = Sequence[torch.device]
# Of torch, `random` and numpy, and of accelerators: as their libraries return them.
_States = tuple[torch.Tensor, Any, Any, list[torch.Tensor]]
# How their parts are saved.
_PYTHON = ("version", "internal", "gauss_next")
_NUMPY = ("name", "keys", "position", "has_gauss", "cached_gaussian")


class RandomStates:
    """The random states that a run trains with, whatever is imported or drawn beside the training.

    `devices`: those that this process computes on. `isolated_seed` returns the seed of what is
    drawn beside the training: so a callback draws the same numbers after a resume, and others at
    another time.
    """

    def __init__(self, devices: _Devices, isolated_seed: Callable[[], int]) -> None:
        self._devices = _accelerators(devices)
        self._isolated_seed = isolated_seed
        self._device_type = self._devices[0].type if self._devices else "cpu"
        self._saved: _States | None = None  # of the training, while something else may draw
        self._is_isolated = False

    def keep(self) -> None:
        """Take the present states for those of the training, until the next `isolated` ends."""
        self._saved = _states(self._devices)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Let something else than the training import, draw and save; nested ones do nothing."""
        if self._is_isolated:
            yield
            return
        if self._saved is None:
            self._saved = _states(self._devices)
        self._is_isolated = True
        _seed_all(self._devices, self._isolated_seed())
        try:
            yield
        finally:
            _put_back(self._saved, self._devices)
            self._saved = None
            self._is_isolated = False

    def state_dict(self) -> dict[str, Any]:
        """Return the states that the training goes on with; loads with `weights_only` accept them.

        States of Python and numpy become plain values and tensors.
        """
        cpu, python, numpy, devices = self._saved or _states(self._devices)
        python = dict(zip(_PYTHON, python, strict=True))
        python["internal"] = torch.tensor(python["internal"], dtype=torch.int64)
        numpy = dict(zip(_NUMPY, numpy, strict=True))
        numpy["keys"] = torch.from_numpy(numpy["keys"].astype(np.int64))
        device = {"kind": self._device_type, "states": devices}
        return {"torch": cpu, "device": device, "python": python, "numpy": numpy}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Let the training go on from a state; return what could not be restored, in words.

        The devices may be others than those that it was saved on.
        """
        python = dict(state["python"])
        python["internal"] = tuple(python["internal"].tolist())  # on the host: nobody waits
        numpy = dict(state["numpy"])
        numpy["keys"] = numpy["keys"].numpy()
        saved_type = state["device"]["kind"]
        is_same_type = saved_type == self._device_type
        devices = [s.cpu() for s in state["device"]["states"]] if is_same_type else []
        states = state["torch"].cpu(), tuple(python.values()), tuple(numpy.values()), devices
        _put_back(states, self._devices)
        if self._saved is not None:
            self.keep()
        if not is_same_type:
            return [
                f"the random state of {saved_type} on {self._device_type}: dropout differs from "
                "here on"
            ]
        present = len(self._devices)
        lost = len(devices) - present
        if lost > 0:
            return [f"the random state of {lost} devices (this process has {present})"]
        return []


@contextmanager
def seeded(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Seed the generators, and restore them afterwards: torch's (CPU, `device`), random, numpy."""
    devices = _accelerators([device])
    before = _states(devices)
    _seed_all(devices, seed)
    try:
        yield
    finally:
        _put_back(before, devices)


def _accelerators(devices: _Devices) -> list[torch.device]:
    return [device for device in devices if device.type not in ("cpu", "meta")]


def _states(devices: _Devices) -> _States:
    accelerators = [rng_state(device) for device in devices]
    return torch.get_rng_state(), random.getstate(), np.random.get_state(), accelerators


def _put_back(states: _States, devices: _Devices) -> None:
    cpu, python, numpy, accelerators = states
    torch.set_rng_state(cpu)
    random.setstate(python)
    np.random.set_state(numpy)
    for device, state in zip(devices, accelerators, strict=False):
        set_rng_state(state, device)


def _seed_all(devices: _Devices, seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds every device
    for device in devices:
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


def derived_seed(seed: int, *parts: object) -> int:
    """Return a seed derived from `seed` and `parts`, independent of those of other parts."""
    content = hashlib.blake2b("/".join(map(str, (seed, *parts))).encode(), digest_size=8).digest()
    return int.from_bytes(content, "little") >> 1  # some functions of torch accept 63 bits only
