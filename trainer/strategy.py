"""Where a run computes: one device, or several under one process (DataParallel).

A strategy has few verbs and the single device is its null object, so that neither the loop nor a
callback asks how many there are. Processes that train together: `trainer/distributed.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ResourceError
from trainer.state import TrainState


def default_device(index: int = 0) -> torch.device:
    """Return the accelerator of that index, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", index)
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


class Strategy:
    """Train in one process on one device."""

    name = "single"
    rank = 0
    world_size = 1
    devices = 1
    evaluates_wrapped = True  # whether evaluation, too, calls the wrapped module
    evaluates_in_step = False  # whether a process must call the model whenever the others do

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = default_device() if device is None else torch.device(device)

    @property
    def is_main(self) -> bool:
        """Whether this process decides, writes and prints."""
        return self.rank == 0

    @property
    def gradient_scale(self) -> float:
        """By what the gradients are divided on their way: a loss is multiplied by it."""
        return 1.0

    def setup(self) -> None:
        """Join the other processes."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that training calls; its parameters are `model`'s own."""
        return model

    def prepare(self, model: nn.Module) -> nn.Module:
        """Change `model` before its optimizer is built (sharding); the single device does not."""
        return model.to(self.device)

    def accumulate(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch: gradients are exchanged in an update's last."""
        return nullcontext()

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return tensor

    def agree(self, state: TrainState) -> None:
        """Make the wish of any process to stop the wish of all."""

    def broadcast(self, value: Any) -> Any:
        """Return the main process's value."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, by rank."""
        return [value]

    def barrier(self) -> None:
        """Wait for all processes."""

    def teardown(self) -> None:
        """Leave the other processes."""

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the whole state of `model`, on every process."""
        return dict(model.state_dict())

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load a whole state into `model`."""
        model.load_state_dict(state)


class DataParallel(Strategy):
    """Train in one process on several GPUs; the loss is taken over the gathered outputs.

    Shards of uneven size are exact by that: a mean over the gathered batch knows no shards.
    """

    name = "dp"

    def __init__(
        self,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        count = torch.cuda.device_count()
        self.device_ids = list(range(count)) if device_ids is None else list(device_ids)
        if any(i >= count for i in self.device_ids):
            raise ResourceError(
                f"strategy.device_ids={self.device_ids}: this machine has {count} GPUs"
            )
        self._output_device = output_device
        self._dim = dim
        self.devices = max(1, len(self.device_ids))
        if self.device_ids:
            self.device = torch.device("cuda", self.device_ids[0])

    def explain(self) -> str | None:
        """Say what happens on a machine without two GPUs; None where all is as asked."""
        if len(self.device_ids) > 1:
            return None
        return (
            f"strategy=dp: {len(self.device_ids)} GPU(s) here, so nn.DataParallel has nothing to "
            f"split: training runs on {self.device} alone, with the same result"
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        """Split each forward pass over the GPUs, if there are two."""
        if len(self.device_ids) < 2:
            return model
        return nn.DataParallel(
            model, device_ids=self.device_ids, output_device=self._output_device, dim=self._dim
        )
