"""DLinear: a linear layer for the trend of each series, and one for what is left."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d


class DLinear(nn.Module):
    """Map the past (n, history, series) to the future (n, horizon, series), in their own units.

    The trend is a moving average over `window` values, the ends of the past repeated outwards.

    mean, std: of each series, by which it is scaled within the network.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        history: int,
        horizon: int,
        mean: Sequence[float],
        std: Sequence[float],
        window: int = 25,
    ) -> None:
        super().__init__()
        self.window = window
        self.trend = nn.Linear(history, horizon)
        self.rest = nn.Linear(history, horizon)
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, past: Tensor) -> Tensor:
        """Return the forecast."""
        scaled = ((past - self.mean) / self.std).transpose(1, 2)
        first = scaled[..., :1].expand(-1, -1, (self.window - 1) // 2)
        last = scaled[..., -1:].expand(-1, -1, self.window // 2)
        trend = avg_pool1d(torch.cat([first, scaled, last], -1), self.window, stride=1)
        forecast = self.trend(trend) + self.rest(scaled - trend)
        return forecast.transpose(1, 2) * self.std + self.mean  # type: ignore[no-any-return]
