"""Learn from scaled values, and report errors in the units of the measurements."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regimen.trainer.tasks.metrics import R2
from regimen.trainer.tasks.supervised import Scores, Shape, Supervised


class Forecast(Supervised):
    """Forecast several series; batches are `(past, future)`, future (n, horizon, series).

    Loss and `r2` are those of values scaled by `mean` and `std`, so that each series counts
    alike. Reports also `mae_<name>`, the mean absolute error of each series in its own unit.
    """

    output_kind = "values"

    def __init__(self, names: Sequence[str], mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(nn.MSELoss(), r2=R2())
        self.score_names = [f"mae_{name}" for name in names]
        self.mean = torch.tensor(mean)
        self.std = torch.tensor(std)

    def answer(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return the scaled forecast."""
        forecast: Tensor = (model(inputs) - self.mean) / self.std
        return forecast

    def target_of(self, target: Tensor) -> Tensor:
        """Return the scaled future."""
        return (target - self.mean) / self.std

    def shape(self, target: Tensor) -> Shape:
        """Return the shape of the future."""
        return target.shape

    def scores(self, output: Tensor, target: Tensor) -> Scores:
        """Return the sum of the absolute errors of each series."""
        errors = (output.detach() - target).abs() * self.std
        sums = errors.sum((0, 1))
        return {name: (sums[i], errors[..., i].numel()) for i, name in enumerate(self.score_names)}

    def prediction_step(self, model: nn.Module, batch: Any) -> Any:
        """Return forecasts in the units of the measurements."""
        return super().prediction_step(model, batch) * self.std + self.mean
