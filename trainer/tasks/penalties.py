"""Gradient penalties: loss terms that need second derivatives."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from regimen.trainer.errors import ModelError


class GradientPenalty(nn.Module):
    """Penalize the norm of a gradient: `(norm - target)**2`.

    `wrt="inputs"` gives one value for each sample: the penalty on the gradient of the sample's
    score with respect to its input. The score is the sum of the sample's outputs (Gulrajani et al.
    2017, Mescheder et al. 2018), or `loss`, which then needs `reduction="sum"` (Drucker and LeCun
    1992). `wrt="parameters"` gives one value for each micro-batch: the penalty on the gradient of
    `loss`. It is not a mean over samples, so it depends on how a batch is split, as BatchNorm does.

    There are no penalties in evaluation, which computes no gradients.
    """

    reduction = "none"

    def __init__(
        self,
        wrt: Literal["inputs", "parameters"] = "inputs",
        loss: nn.Module | None = None,
        target: float = 0.0,
    ) -> None:
        super().__init__()
        reduction = getattr(loss, "reduction", "mean")
        if wrt == "inputs" and loss is not None and reduction != "sum":
            raise ModelError(
                f"a gradient penalty on inputs needs reduction: sum in its loss, not {reduction}"
            )
        if wrt == "parameters" and loss is None:
            raise ModelError("a gradient penalty on parameters needs a loss")
        self.wrt = wrt
        self.loss = loss
        self.target = target

    def forward(self, output: Tensor, label: Tensor, sources: Iterable[Tensor]) -> Tensor:
        """Return the penalty on the gradient with respect to `sources`, differentiable."""
        score = output.sum() if self.loss is None else self.loss(output, label)
        gradients = torch.autograd.grad(
            score, list(sources), create_graph=True, allow_unused=self.wrt == "parameters"
        )
        if self.wrt == "inputs":
            squared_norm = gradients[0].flatten(1).square().sum(1)  # one for each sample
        else:
            squares = [g.square().sum() for g in gradients if g is not None]
            squared_norm = torch.stack(squares).sum()
        if not self.target:
            return squared_norm
        # The square root is not differentiable at 0.
        norm = (squared_norm + 1e-12).sqrt()
        return (norm - self.target).square()
