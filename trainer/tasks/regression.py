"""Regression: one or several real numbers for each sample."""

from typing import Any

from torch import Tensor, nn

from regimen.trainer.tasks.losses import Loss
from regimen.trainer.tasks.metrics import R2
from regimen.trainer.tasks.supervised import Metrics, Scores, Shape, Supervised, call_model


class Regression(Supervised):
    """Predict values; batches are `(inputs, values)`, values [n] or [n, outputs].

    With one output, the model and the data set may each return [n] or [n, 1].

    Reports `mae`, the mean absolute error, and `r2`, the coefficient of determination.
    """

    output_kind = "values"
    score_names = ("mae",)

    def __init__(self, loss: Loss | None = None, metrics: Metrics | None = None) -> None:
        super().__init__(loss or nn.MSELoss(), metrics, r2=R2())

    def answer(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return the values [n], or [n, outputs]."""
        return _squeeze_single_column(call_model(model, inputs))

    def target_of(self, target: Tensor) -> Tensor:
        """Return the values [n], or [n, outputs]."""
        return _squeeze_single_column(target)

    def shape(self, target: Tensor) -> Shape:
        """Return the shape of the values."""
        return target.shape

    def scores(self, output: Tensor, target: Tensor) -> Scores:
        """Return the sum of the absolute errors."""
        return {"mae": ((output.detach() - target).abs().sum(), target.numel())}


def _squeeze_single_column(values: Tensor) -> Tensor:
    """Return [n, 1] as [n]: compared with each other, the two would be broadcast to [n, n]."""
    if values.ndim == 2 and values.shape[1] == 1:
        return values.squeeze(1)
    return values
