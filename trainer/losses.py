"""Losses: one module of torch's kind, or a named, weighted sum of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.task import SUM


class Term(nn.Module):
    """Weight one loss in a sum of several: `weight * loss(output, target)`."""

    def __init__(self, loss: nn.Module, weight: float = 1.0) -> None:
        super().__init__()
        self.loss = loss
        self.weight = weight


@dataclass(frozen=True, slots=True)
class Losses:
    """Compute a loss, or several by name, with the denominators their means are taken by.

    A term's own `reduction` says what it is: a mean over the samples, a sum over them, or one
    value for each. Class weights make a mean's denominator depend on the labels; with
    `ignore_index` it is the number of labels that count.
    """

    terms: Mapping[str, Term]
    single: nn.Module | None  # a mean over the samples: the path without detours

    @classmethod
    def of(cls, loss: nn.Module | Mapping[str, nn.Module]) -> Losses:
        """Take one loss module, or several by name, each perhaps in a `Term`."""
        named = dict(loss) if isinstance(loss, Mapping) else {"loss": loss}
        terms = {n: m if isinstance(m, Term) else Term(m) for n, m in named.items()}
        plain = isinstance(loss, nn.Module) and not isinstance(loss, Term)
        simple = (
            plain and _reduction(terms["loss"].loss) != "sum" and not _counted(terms["loss"].loss)
        )
        return cls(terms, loss if simple and isinstance(loss, nn.Module) else None)

    @property
    def count_names(self) -> list[str]:
        """Name the terms whose denominators depend on the labels."""
        return [name for name, term in self.terms.items() if _counted(term.loss)]

    def to(self, device: torch.device) -> None:
        """Move class weights to where the labels are."""
        for term in self.terms.values():
            term.to(device)

    def counts(self, target: Tensor) -> dict[str, Tensor]:
        """Return these denominators' parts for a batch of labels."""
        return {name: _count(self.terms[name].loss, target) for name in self.count_names}

    def __call__(
        self, output: Any, target: Any
    ) -> tuple[Tensor | dict[str, Tensor], dict[str, Any]]:
        """Return the loss, or its weighted terms by name, and the denominators."""
        if self.single is not None:
            return self.single(output, target), {}
        values = {n: t.loss(output, target) * t.weight for n, t in self.terms.items()}
        counts: dict[str, Any] = self.counts(target) if self.count_names else {}
        for name, term in self.terms.items():
            if _reduction(term.loss) == "sum":
                counts[name] = SUM
        return values, counts


def _reduction(loss: nn.Module) -> str:
    return str(getattr(loss, "reduction", "mean"))


def _counted(loss: nn.Module) -> bool:
    """Tell whether torch divides this loss by something else than the number of samples."""
    if not isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or loss.reduction != "mean":
        return False
    return loss.weight is not None or loss.ignore_index >= 0


def _count(loss: nn.Module, target: Tensor) -> Tensor:
    assert isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss))
    if target.is_floating_point():  # class probabilities: torch divides by the number of samples
        return torch.tensor(target.numel() // target.shape[1], device=target.device)
    valid = target != loss.ignore_index
    if loss.weight is None:
        return valid.sum()
    weights: Tensor = loss.weight.to(target.device)[target.clamp(min=0, max=len(loss.weight) - 1)]
    return (weights * valid).sum()
