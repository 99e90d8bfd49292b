"""What is done to a model so that it trains where it is to: the verbs of every strategy.

The single device is the null object of all of them, so that neither the loop nor a callback asks
where a run computes. Several devices under one process: `trainer/strategies/dp.py`; processes that
train together: `trainer/strategies/replicas.py`. How processes talk is their `group`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.distributed.group import Group


def default_device(index: int = 0) -> torch.device:
    """Return the accelerator of that index, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", index)
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def describe_device(device: torch.device) -> str:
    """Return what a device is called by those who made it, or else its kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _indexed(device: torch.device) -> torch.device:
    """Return `cuda` as `cuda:0`: torch makes no device without a number its current one."""
    bare = device.type == "cuda" and device.index is None
    return torch.device("cuda", 0) if bare else device


def count_devices(devices: int | Sequence[int] | str, accelerator: str = "auto") -> int:
    """Return how many devices of this machine `strategy.devices` means."""
    if isinstance(devices, int):
        return devices
    if not isinstance(devices, str):
        return len(devices)
    return max(1, torch.cuda.device_count()) if accelerator in ("auto", "cuda") else 1


_ALONE: AbstractContextManager[Any] = nullcontext()


class Strategy:
    """Train in one process on one device."""

    name = "single"
    devices = 1
    evaluates_wrapped = True  # whether evaluation, too, calls the wrapped module
    updates_on_host = False  # whether parameters lie in host memory while a GPU computes
    evaluates_in_step = False  # whether a process must call the model whenever the others do

    def __init__(
        self, device: torch.device | str | None = None, group: Group | None = None
    ) -> None:
        self.device = default_device() if device is None else _indexed(torch.device(device))
        self.group = group or Group()

    def setup(self) -> None:
        """Take the device, and join the other processes; `group.leave` ends it."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.group.join(self.device)

    @property
    def gradient_scale(self) -> float:
        """By what the gradients are divided on their way: a loss is multiplied by it."""
        return 1.0

    @property
    def computing(self) -> list[torch.device]:
        """The devices that this process computes on."""
        return [self.device]

    def explain(self) -> str | None:
        """Say where things are not as asked; None where they are."""
        return None

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that training calls; its parameters are `model`'s own."""
        return model

    def prepare(self, model: nn.Module) -> nn.Module:
        """Change `model` before its optimizer is built (sharding); the single device does not."""
        return model.to(self.device)

    def check(self, others: Mapping[str, nn.Module]) -> None:
        """Refuse modules besides the model (a task's) that cannot be trained here: ModelError."""

    def accumulate(
        self, wrapped: nn.Module, last: bool, counts: bool = True
    ) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch: gradients are exchanged in an update's last.

        Without `counts` the process has no sample in it and takes part with a borrowed one.
        """
        return _ALONE

    def evaluating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of an evaluation: all processes judge what the main one saves."""
        return nullcontext()

    def rehearse(self, wrapped: nn.Module, compute: Callable[[], None]) -> None:
        """Before a resume, let `compute` gradients to be dropped if the wrapper learns by them."""

    def own_state(self, model: nn.Module) -> dict[str, Any]:
        """Return what only this process has of the run, as tensors and plain containers."""
        return {}

    def load_own_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Take over what `own_state` returned."""

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the whole state of `model`, on every process."""
        return dict(self.gather_tensors(model.state_dict()))

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load a whole state into `model`."""
        model.load_state_dict(state)

    def gather_tensors(self, tree: Any) -> Any:
        """Return `tree` with the tensors whole of which each process has a part."""
        return tree

    def to_save(self, tree: Any) -> Any:
        """Return `tree` as checkpoints hold it: whole, unless `write_shards` takes the parts."""
        return self.gather_tensors(tree)

    def write_shards(self, payload: Mapping[str, Any], target: Path) -> Mapping[str, Any]:
        """Write the parts in `payload` beside the checkpoint `target`; return what stays for it."""
        return payload

    def split_like(self, tree: Any, parameters: Mapping[str, Tensor]) -> Any:
        """Return `tree`, the state by parameter name, with tensors split as the parameters are."""
        return tree


class Planned(Strategy):
    """Stand for processes that are not started: a dry run builds what one of them would have."""

    def __init__(self, name: str, devices: int, device: torch.device | None = None) -> None:
        super().__init__(device)
        self.name = name
        self.devices = devices
