"""Penalties on gradients: loss terms that are differentiated twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from trainer.errors import ModelError


class GradientPenalty(nn.Module):
    """Penalise the size of a gradient: `(norm - target)**2`, the square itself for target 0.

    wrt: "inputs" gives one value for each sample, of the gradient of its own score with respect
    to its own input: the score is the sum of the sample's outputs (Gulrajani et al. 2017,
    Mescheder et al. 2018), or its `loss`, whose reduction then is `sum` (Drucker and LeCun 1992).
    "parameters" gives one value for each micro-batch, of the gradient of `loss`: that is no mean
    over samples, so it follows how a batch is split, as BatchNorm does.

    In evaluation there are no gradients, and no penalties.
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
                f"a gradient penalty on inputs asks for reduction: sum in its loss, not {reduction}"
            )
        if wrt == "parameters" and loss is None:
            raise ModelError("a gradient penalty on parameters asks for a loss")
        self.wrt = wrt
        self.loss = loss
        self.target = target

    def forward(self, output: Tensor, label: Tensor, sources: Iterable[Tensor]) -> Tensor:
        """Return the penalty on the gradient with respect to `sources`, differentiable."""
        score = output.sum() if self.loss is None else self.loss(output, label)
        gradients = torch.autograd.grad(
            score, list(sources), create_graph=True, allow_unused=self.wrt == "parameters"
        )
        found = [g for g in gradients if g is not None]
        if self.wrt == "inputs":
            squares = torch.stack([g.flatten(1).square().sum(1) for g in found]).sum(0)
        else:
            squares = torch.stack([g.square().sum() for g in found]).sum()
        return penalty(squares, self.target)


def penalty(squares: Tensor, target: float = 0.0) -> Tensor:
    """Return `(norm - target)**2` for squared norms."""
    if not target:
        return squares
    return ((squares + 1e-12).sqrt() - target).square()  # the root has no slope at 0
