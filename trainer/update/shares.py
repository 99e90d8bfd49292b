"""The weight of a micro-batch's loss in its update: the exact mean over all samples (I3)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from data.batch import MicroBatch, Piece
from trainer.strategies.strategy import Strategy
from trainer.task import StepOutput, Task
from trainer.tasks.losses import MOST
from trainer.update.sums import mean_of

# So many counts of `how_many` have a sum that is exact in float32.
_EXACT = 2**24 // MOST


class _Split:
    """The labels that count of an update on a device, split into micro-batches.

    For losses whose gradient is 0 where nothing counts (`Task.masks_uncounted`): their NaN needs no
    kernels. Counts are float32, which is exact here: see `trainer.tasks.losses.how_many`.
    """

    def __init__(self, counts: Sequence[Tensor], places: Sequence[int]) -> None:
        self._counts, self._places = counts, places
        self._factors: Sequence[Tensor] = ()

    @classmethod
    def of(
        cls, counts: Sequence[Tensor | float], micro_batches: Sequence[MicroBatch]
    ) -> _Split | None:
        """Return the split if all counts are on a device; else None."""
        there = [c for c in counts if isinstance(c, Tensor) and c.dtype == torch.float32]
        places = [m.piece.micro_batch for m in micro_batches if m.piece.count]
        return cls(there, places) if len(there) == len(counts) else None

    def part(self, mean: Tensor, place: int) -> Tensor:
        """Return the part of a micro-batch's mean in that of the update."""
        if len(self._counts) == 1:
            return mean
        if not self._factors:
            counts = torch.stack(list(self._counts))
            if mean.dtype == torch.float64 or len(self._counts) > _EXACT:
                counts = counts.double()
            self._factors = (counts / counts.sum()).to(mean.dtype).unbind()
        return mean * self._factors[self._places.index(place)]


Total = Tensor | float | _Split  # a denominator over the whole update


class Shares:
    """Weigh each micro-batch's loss by its part of the update, over all processes.

    `dtype` is the format in which counts are summed and divided.
    """

    def __init__(self, task: Task, strategy: Strategy, dtype: torch.dtype) -> None:
        self._task, self._strategy, self._dtype = task, strategy, dtype

    def totals(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Total]:
        """Return the update's denominators that depend on the data, over all devices."""
        if not self._task.count_names:
            return {}
        found = [self._task.counts(m.batch) for m in micro_batches if m.piece.count]
        return {
            name: self._over_all([counts[name] for counts in found], micro_batches)
            for name in self._task.count_names
        }

    def _over_all(
        self, counts: Sequence[Tensor | float], micro_batches: Sequence[MicroBatch]
    ) -> Total:
        group = self._strategy.group
        if counts and isinstance(counts[0], Tensor) and group.world_size == 1:
            plain = self._task.masks_uncounted and self._strategy.gradient_scale == 1
            if plain and (split := _Split.of(counts, micro_batches)):
                return split
        # If no label of the whole update counts, all parts are 0, and so is their sum.
        total = sum(counts)
        if group.world_size == 1 and not isinstance(total, Tensor):
            return total or 1.0
        whole = group.reduce(self._there(total, self._strategy.device))
        return torch.where(whole > 0, whole, 1.0)

    def _there(self, count: Tensor | float, device: torch.device) -> Tensor:
        if isinstance(count, Tensor):
            return count.to(device, self._dtype)
        return torch.full((), count, dtype=self._dtype, device=device)  # a copy would wait

    def of(self, output: StepOutput, piece: Piece, totals: Mapping[str, Total]) -> Tensor:
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
                terms.append(self._part(term, count, totals[name], piece))
            else:  # SUM
                terms.append(term.sum() * scale)
        return add_up(terms)

    def _part(self, term: Tensor, count: Tensor | float, total: Total, piece: Piece) -> Tensor:
        """Return the part of a mean over `count` elements in the mean over `total` elements."""
        scale = self._strategy.gradient_scale
        if isinstance(total, _Split):
            return total.part(_mean(term), piece.micro_batch)
        if not isinstance(count, Tensor) and not isinstance(total, Tensor) and count:
            return _times(_mean(term), count * scale / total)
        count = self._there(count, term.device)
        return mean_of(term, count) * (count * scale / total).to(term.dtype)


def _mean(term: Tensor) -> Tensor:
    return term.mean() if term.ndim else term


def _times(term: Tensor, share: float) -> Tensor:
    return term if share == 1 else term * share


def add_up(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of losses."""
    return functools.reduce(torch.add, terms)
