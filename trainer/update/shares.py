"""The weight of a micro-batch's loss in its update: the exact mean over all samples (I3)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from data.batch import MicroBatch, Piece
from trainer.strategies.strategy import Strategy
from trainer.task import StepOutput, Task
from trainer.update.sums import mean_of


class Shares:
    """Weigh each micro-batch's loss by its part of the update, over all processes.

    `dtype` is the format in which counts are summed and divided.
    """

    def __init__(self, task: Task, strategy: Strategy, dtype: torch.dtype) -> None:
        self._task, self._strategy, self._dtype = task, strategy, dtype

    def totals(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor | float]:
        """Return the update's denominators that depend on the data, over all devices."""
        if not self._task.count_names:
            return {}
        found = [self._task.counts(m.batch) for m in micro_batches if m.piece.count]
        return {
            name: self._over_all([counts[name] for counts in found])
            for name in self._task.count_names
        }

    def _over_all(self, counts: Sequence[Tensor | float]) -> Tensor | float:
        # If no label of the whole update counts, all parts are 0, and so is their sum.
        total = sum(counts)
        if self._strategy.group.world_size == 1 and not isinstance(total, Tensor):
            return total or 1.0
        dtype, device = self._dtype, self._strategy.device
        whole = self._strategy.group.reduce(torch.as_tensor(total, dtype=dtype, device=device))
        return torch.where(whole > 0, whole, 1.0)

    def of(self, output: StepOutput, piece: Piece, totals: Mapping[str, Tensor | float]) -> Tensor:
        """Return the part of a micro-batch in its update's loss; `totals` are the denominators."""
        scale = self._strategy.gradient_scale
        share = piece.count * scale / piece.total
        if isinstance(output.loss, Tensor):
            return _times(_mean(output.loss), share)
        terms = []
        for name, term in output.loss.items():
            count = output.counts.get(name)
            if not piece.count:  # a borrowed sample: it takes part with weight zero
                terms.append(term.sum() * 0)
            elif count is None:
                terms.append(_times(_mean(term), share))
            elif isinstance(count, Tensor | int | float):
                terms.append(self._part(term, count, totals[name], scale))
            else:  # SUM
                terms.append(term.sum() * scale)
        return add_up(terms)

    def _part(
        self, term: Tensor, count: Tensor | float, total: Tensor | float, scale: float
    ) -> Tensor:
        """Return the part of a mean over `count` elements in the mean over `total` elements."""
        if not isinstance(count, Tensor) and not isinstance(total, Tensor) and count:
            return _times(_mean(term), count * scale / total)
        count = torch.as_tensor(count, dtype=self._dtype, device=term.device)
        return mean_of(term, count) * (count * scale / total).to(term.dtype)


def _mean(term: Tensor) -> Tensor:
    return term.mean() if term.ndim else term


def _times(term: Tensor, share: float) -> Tensor:
    return term if share == 1 else term * share


def add_up(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of losses."""
    return functools.reduce(torch.add, terms)
