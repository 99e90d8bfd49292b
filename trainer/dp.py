"""Several GPUs under one process: nn.DataParallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainer.errors import ResourceError
from trainer.strategy import Strategy


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
