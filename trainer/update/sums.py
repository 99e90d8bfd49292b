"""Exact means over the samples of an update, an epoch or a data set: sums and counts (I3, I4)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from data.batch import MicroBatch, Piece
from trainer.errors import SampleError
from trainer.strategies.strategy import Strategy
from trainer.task import SUM, StepOutput, Task

_log = logging.getLogger(__name__)
Total = Tensor | float  # a denominator over the whole update


def waits_for(device: torch.device) -> bool:
    """Return whether the host must wait to read a number of the device."""
    return device.type != "cpu"


class Shares:
    """Weigh each micro-batch's loss by its part of the update, over all processes."""

    def __init__(self, task: Task, strategy: Strategy) -> None:
        self._task, self._strategy = task, strategy
        self._dtype = widest(strategy.device)  # in which counts are summed and divided

    def totals(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Total]:
        """Return the update's denominators that depend on the data, over all devices."""
        if not self._task.count_names:
            return {}
        group, device = self._strategy.group, self._strategy.device
        found = [self._task.counts(m.batch) for m in micro_batches if m.piece.count]
        totals: dict[str, Total] = {}
        for name in self._task.count_names:
            # If no label of the whole update counts, all parts are 0, and so is their sum.
            total = sum(counts[name] for counts in found)
            if group.world_size == 1 and not isinstance(total, Tensor):
                totals[name] = total or 1.0
            else:
                whole = group.reduce(self._there(total, device))
                totals[name] = torch.where(whole > 0, whole, 1.0)
        return totals

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
            elif count is SUM:
                terms.append(term.sum() * scale)
            elif not isinstance(count, Tensor) and not isinstance(totals[name], Tensor) and count:
                terms.append(_times(_mean(term), count * scale / totals[name]))
            else:  # the mean over `count` elements in the mean over all; torch's is NaN over none
                count = self._there(count, term.device)
                part = (count * scale / totals[name]).to(term.dtype)
                terms.append(torch.where(count > 0, term.mean(), 0.0) * part)
        return add_up(terms)

    def _there(self, count: Tensor | float, device: torch.device) -> Tensor:
        if isinstance(count, Tensor):
            return count.to(device, self._dtype)
        return torch.full((), count, dtype=self._dtype, device=device)  # a copy would wait


def _mean(term: Tensor) -> Tensor:
    return term.mean() if term.ndim else term


def _times(term: Tensor, share: Any) -> Tensor:
    return term if share == 1 else term * share


def add_up(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of losses."""
    return functools.reduce(torch.add, terms)


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating-point format of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


class Sums:
    """Add up sums and counts by name; the mean is taken once, over all devices (I4).

    Sums are Python numbers. On a CPU reading a number costs less than adding tensors; the numbers
    of another device are added when someone asks for the sums, by the host and in the same order.
    `over`: further sums, over a longer time, to which everything is added as well.
    """

    def __init__(self, device: torch.device, over: Sums | None = None) -> None:
        self._device, self._over = device, over
        self._pending: _Pending | None = None
        if waits_for(device):
            self._pending = over._pending if over is not None else _Pending()
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self.without_labels = False  # whether no label counted in what `means` returned last

    def __bool__(self) -> bool:
        return bool(self._counts) or bool(self._pending and self._pending.additions)

    def add(
        self,
        name: str,
        total: Tensor | float,
        count: Tensor | float,
        scale: float = 1,
        mean: bool = False,
    ) -> None:
        """Add `scale * total` and `count` to those of `name`, without waiting for the device.

        Of a `mean` over `count` the total is their product, and 0 where nothing counts. On a device
        other than a CPU `pack` has to follow before any tensor changes.
        """
        if self._pending is not None:
            self._pending.add(self, name, total, count, scale, mean)
            return
        total = total.item() if isinstance(total, Tensor) else total
        count = count.item() if isinstance(count, Tensor) else count
        self._add_numbers(name, total, count, scale, mean)

    def _add_numbers(self, name: str, total: float, count: float, scale: float, mean: bool) -> None:
        if mean:
            total = total * count if count > 0 else 0.0
        total = total * scale
        sums: Sums | None = self
        while sums is not None:
            sums._sums[name] = total + sums._sums.get(name, 0.0)
            sums._counts[name] = count + sums._counts.get(name, 0)
            sums = sums._over

    def pack(self) -> None:
        """End the additions of an update or a batch: from here on their tensors may change."""
        if self._pending is not None:
            self._pending.pack()

    def _settle(self) -> None:
        if self._pending is not None:
            for sums, *addition in self._pending.take():
                sums._add_numbers(*addition)

    def add_output(self, output: StepOutput, samples: int, loss_name: str = "loss") -> None:
        """Add a step's loss terms and metrics; `samples` of its batch count, maybe none."""
        real = 1 if samples else 0
        if isinstance(output.loss, Tensor):
            self.add(loss_name, _mean(output.loss), samples, samples)
        else:
            for term_name, term in output.loss.items():
                name, count = f"{loss_name}:{term_name}", output.counts.get(term_name)
                if count is SUM:  # logged as the mean of what each sample adds
                    self.add(name, term.sum() if term.ndim else term, samples, real)
                elif count is None or (not isinstance(count, Tensor) and count):
                    weight = samples if count is None else count * real
                    self.add(name, _mean(term), weight, weight)
                else:
                    self.add(name, _mean(term), count if samples else 0, real, mean=True)
        for name, (total, count) in output.sums.items():
            self.add(name, total, count if samples else 0, real)

    @property
    def names(self) -> set[str]:
        """The names of all sums; a process without samples may have fewer than others."""
        self._settle()
        return set(self._sums)

    def take_part(self, names: Iterable[str]) -> None:
        """Start missing sums at zero: `means` needs the same names on all processes."""
        for name in set(names) - self.names:
            self._add_numbers(name, 0.0, 0, 1, mean=False)

    def means(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return each mean over all devices; a sum where count is 0. Waits for the device.

        `loss:<term>` is returned as `loss_<term>`, and the sum of these as `loss`.
        """
        names = sorted(self.names)
        if not names:
            return {}
        values = [*(self._sums[n] for n in names), *(self._counts[n] for n in names)]
        table = torch.tensor(values, dtype=widest(self._device), device=self._device)
        totals = reduce(table).tolist()
        counts = dict(zip(names, totals[len(names) :], strict=True))
        losses = [count for name, count in counts.items() if name.startswith("loss")]
        self.without_labels = bool(losses) and not any(losses)
        result: dict[str, float] = {}
        for (name, count), total in zip(counts.items(), totals[: len(names)], strict=True):
            value = total / count if count else total
            whole, colon, term = name.partition(":")
            if term or not colon:  # a term may lack a name
                result[name.replace(":", "_")] = value
            if colon:
                result[whole] = result.get(whole, 0.0) + value
        return result

    def reset(self) -> None:
        """Reset all sums."""
        self._settle()  # what is pending is part of other sums, too
        self._sums, self._counts = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return the partial sums; waits for the device."""
        self._settle()
        return {"sums": _scalars(self._sums), "counts": _scalars(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over partial sums."""
        self.reset()
        self._sums = {name: total.item() for name, total in state["sums"].items()}
        self._counts = {name: count.item() for name, count in state["counts"].items()}


def _scalars(numbers: Mapping[str, float]) -> dict[str, Tensor]:
    # A number that is no integer would become float32.
    return {
        name: torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        for name, value in numbers.items()
    }


class _Pending:
    """Additions whose numbers stay on their device until the host waits for it anyway (I6)."""

    def __init__(self) -> None:
        self.additions: list[tuple[Any, ...]] = []
        # By device and dtype: the numbers since `pack`, and the vectors of the updates before.
        self._open: dict[Any, list[Tensor]] = {}
        self._packed: dict[Any, list[Tensor]] = {}

    def add(self, *addition: Any) -> None:
        self.additions.append(tuple(map(self._placed, addition)))

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        kind = value.device, value.dtype
        self._open.setdefault(kind, []).append(value.detach().reshape(()))
        return kind

    def pack(self) -> None:
        for kind, numbers in self._open.items():
            self._packed.setdefault(kind, []).append(torch.stack(numbers))
        self._open = {}

    def take(self) -> list[tuple[Any, ...]]:
        self.pack()
        numbers = {kind: iter(torch.cat(v).tolist()) for kind, v in self._packed.items()}
        taken = [
            tuple(next(numbers[v]) if isinstance(v, tuple) else v for v in addition)
            for addition in self.additions
        ]
        self.additions, self._packed = [], {}
        return taken


class Labels:
    """Tell of labels of which none counts: the loss is then 0, and nothing is trained."""

    _CHANGE = (
        "the loss leaves each of them out (its ignore_index, by default -100, or a class weight of "
        "0); does the data set return the right labels?"
    )

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, stage: str, sums: Sums, tells: bool) -> None:
        """Warn once for each stage (train, val, test), after its means were taken."""
        if sums.without_labels and tells and stage not in self._told:
            self._told.add(stage)
            _log.warning("no label counts in %s/loss, which is 0: %s", stage, self._CHANGE)

    def refuse_none(self, sums: Sums, epoch: int) -> None:
        """Raise SampleError where no label of a whole epoch counted: it has trained nothing."""
        if sums.without_labels:
            raise SampleError(
                f"no label of epoch {epoch} counts: nothing is trained; {self._CHANGE}"
            )
