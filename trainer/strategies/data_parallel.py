"""Several GPUs under one process: nn.DataParallel."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from regimen.conf.errors import Problem, collect_problems
from regimen.data.batch import map_tensors
from regimen.trainer.device import device_count
from regimen.trainer.errors import ResourceError
from regimen.trainer.strategies.strategy import Devices, Strategy, first_device

_KIND = "cuda"  # what nn.DataParallel scatters to and gathers from, whose kernels are CUDA's


class DataParallel(Strategy):
    """Train in one process on several GPUs; the loss is taken over the gathered outputs.

    The loss is therefore exact for shards of uneven size, too. `device_ids`, `output_device` and
    `dim` are the arguments of nn.DataParallel; `devices`, a number or a list, is used without
    `device_ids`.
    """

    name = "dp"
    copies_model = True

    def __init__(
        self,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        dim: int = 0,
        devices: Devices = "auto",
        accelerator: str = "auto",
    ) -> None:
        first_device(devices, accelerator)  # raises if this machine has no such kind
        uses_gpus = accelerator in ("auto", _KIND)
        super().__init__(None if uses_gpus else accelerator)
        self.device_ids: list[int] = []
        if uses_gpus:
            self.device_ids = _selected(devices if device_ids is None else device_ids)
        self._output_device = output_device
        self._dim = dim
        self.devices = max(1, len(self.device_ids))
        if self.device_ids:
            self.local_devices = [torch.device(_KIND, number) for number in self.device_ids]
            self.device = self.local_devices[0]

    @classmethod
    def problems(
        cls, *, devices: Devices = "auto", accelerator: str = "auto", **others: Any
    ) -> Iterable[Problem]:
        """Return whether this machine has such a kind of device."""
        found: list[Problem] = []
        with collect_problems(found):
            first_device(devices, accelerator)
        return found

    def explain(self) -> str | None:
        """Return what happens on a machine without two GPUs; None if there are two."""
        if len(self.device_ids) > 1:
            return None
        return (
            f"strategy=dp: there is no second GPU to split a batch with, so {self.device} trains "
            "alone, with the same result; strategy=ddp uses several processes, on CPUs as well"
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        """Split each forward pass over the GPUs, if there are two or more."""
        if len(self.device_ids) < 2:
            return model
        inner = _WithAutocast(model, self.autocast)
        parallel = nn.DataParallel(inner, self.device_ids, self._output_device, self._dim)

        # Outputs are gathered on `output_device`; the targets of the loss are on `self.device`.
        parallel.register_forward_hook(
            lambda _, inputs, outputs: map_tensors(lambda t: t.to(self.device), outputs)
        )
        return parallel


class _WithAutocast(nn.Module):
    """Enter the run's autocast in each thread.

    Autocast is a state of the thread. nn.DataParallel tells the threads of its replicas whether it
    is enabled, but not its dtype.
    """

    def __init__(
        self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self.model = model
        self._autocast = autocast

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._autocast():
            return self.model(*args, **kwargs)


def _selected(devices: Devices) -> list[int]:
    """Return the numbers of the GPUs that are asked for. Raises ResourceError for one too many."""
    available = range(device_count(_KIND))
    if isinstance(devices, str):
        return [*available]
    if isinstance(devices, int):
        return [*available[:devices]]
    missing = [number for number in devices if number not in available]
    if missing:
        raise ResourceError(
            f"strategy.device_ids={[*devices]}: this machine has {len(available)} GPUs and no "
            f"{missing[0]}"
        )
    return [*devices]
