"""Several GPUs in one process: nn.DataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from data.batch import map_tensors
from trainer.errors import ResourceError
from trainer.strategies.strategy import Strategy


class DataParallel(Strategy):
    """Train in one process on several GPUs; the loss is taken over the gathered outputs.

    The loss is therefore exact for shards of uneven size, too. `device_ids`, `output_device` and
    `dim` are the arguments of nn.DataParallel; `devices`, a number or a list, is used without
    `device_ids`.
    """

    name = "dp"

    def __init__(
        self,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        dim: int = 0,
        devices: int | Sequence[int] | str = "auto",
        accelerator: str = "auto",
    ) -> None:
        super().__init__(None if accelerator in ("auto", "cuda") else accelerator)
        on_gpus = accelerator in ("auto", "cuda")
        self.device_ids = _numbers(device_ids, devices) if on_gpus else []
        self._output_device = output_device
        self._dim = dim
        self.devices = max(1, len(self.device_ids))
        if self.device_ids:
            self.device = torch.device("cuda", self.device_ids[0])

    @property
    def computing(self) -> list[torch.device]:
        """The GPUs of this process."""
        gpus = [torch.device("cuda", number) for number in self.device_ids]
        return gpus or super().computing

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
        return _Gathered(model, self.device_ids, self._output_device, self._dim, self.device)


class _Gathered(nn.Module):
    """Compute on all GPUs, and move the outputs to the device of the targets."""

    def __init__(
        self,
        model: nn.Module,
        device_ids: Sequence[int],
        output_device: int | None,
        dim: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._replicated = _InFormat(model)
        self.parallel = nn.DataParallel(self._replicated, list(device_ids), output_device, dim)
        self._device = device

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self._replicated.take_format()
        return map_tensors(lambda t: t.to(self._device), self.parallel(*inputs, **named))


class _InFormat(nn.Module):
    """Compute in the autocast dtype of the caller. Autocast is a state of each thread, and torch
    passes to the threads of replicas whether it is enabled, but not its dtype."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._formats: dict[str, torch.dtype] = {}

    def take_format(self) -> None:
        """Store the autocast dtypes of this thread."""
        kinds = ("cuda", "cpu")
        enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
        self._formats = {kind: torch.get_autocast_dtype(kind) for kind in enabled}

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with ExitStack() as formats:
            for kind, dtype in self._formats.items():
                formats.enter_context(torch.autocast(kind, dtype=dtype))
            return self.model(*inputs, **named)


def _numbers(device_ids: Sequence[int] | None, devices: int | Sequence[int] | str) -> list[int]:
    count = torch.cuda.device_count()
    if device_ids is None and isinstance(devices, int | str):
        return list(range(min(devices, count) if isinstance(devices, int) else count))
    chosen = devices if device_ids is None else device_ids
    assert not isinstance(chosen, int | str)
    missing = [number for number in chosen if number >= count]
    if missing:
        raise ResourceError(
            f"strategy.device_ids={list(chosen)}: this machine has {count} GPUs and no {missing[0]}"
        )
    return list(chosen)
