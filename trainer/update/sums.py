"""Exact means over the samples of an update, an epoch or a data set: sums and counts (I3, I4)."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from regimen.data.batch import BatchSlice, MicroBatch
from regimen.trainer.device import accumulate_dtype, is_async
from regimen.trainer.distributed import Group
from regimen.trainer.errors import UserCodeError
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.task import SUM, StepOutput, Task

MicroBatches = Sequence[MicroBatch]  # of one update
# A denominator over the whole update; None: that of its only micro-batch.
Total = Tensor | float | None


class Name(NamedTuple):
    """What a sum is of: a metric by its name, or a term of a loss, whose name may be empty.

    A metric may have any name, also one that reads like that of a loss.
    """

    loss: str  # its name; empty for a metric
    term: str  # or the metric


def metric(name: str) -> Name:
    """Return the name of a metric's sum."""
    return Name("", name)


def totals_of(task: Task, strategy: Strategy, micro_batches: MicroBatches) -> dict[str, Total]:
    """Return an update's denominators that depend on the data, over all devices."""
    if not task.count_names:
        return {}
    if strategy.group.world_size == 1 and len(micro_batches) == 1:
        # Its own counts, which its step returns, are the totals: nothing has to be computed first.
        return dict.fromkeys(task.count_names)
    found = [task.counts(m.batch) for m in micro_batches if m.batch_slice.count]
    totals: dict[str, Total] = {}
    for name in task.count_names:
        # If no label of the whole update counts, all parts are 0, and so is their sum.
        total = sum(counts[name] for counts in found)
        if strategy.group.world_size == 1 and not isinstance(total, Tensor):
            totals[name] = total or 1.0
        else:
            whole = strategy.group.reduce(_there(total, strategy.device))
            totals[name] = torch.where(whole > 0, whole, 1.0)
    return totals


def share_of(
    strategy: Strategy, output: StepOutput, batch_slice: BatchSlice, totals: Mapping[str, Total]
) -> Tensor:
    """Return a micro-batch's part in its update's loss; `totals` are the denominators."""
    scale, terms = strategy.gradient_scale, []
    for name, term in output.terms.items():
        count = output.counts.get(name)
        if count is SUM or not batch_slice.count:  # a borrowed sample takes part with weight zero
            terms.append(term.sum() * (scale if batch_slice.count else 0))
            continue
        total = batch_slice.total if count is None else totals[name]
        count = batch_slice.count if count is None else count
        mean = term.mean() if term.ndim else term
        if total is None:
            # The mean over all: count / total is exactly 1, and left out with its kernels.
            if isinstance(count, Tensor):
                none_counts = count.to(term.device) <= 0  # torch's mean is NaN then
                mean = torch.where(none_counts, _zero(term.device, mean.dtype), mean)
            elif count <= 0:
                none_counts = torch.ones((), dtype=torch.bool, device=term.device)
                mean = torch.where(none_counts, _zero(term.device, mean.dtype), mean)
            if scale != 1:
                mean = mean * scale
        elif isinstance(count, Tensor) or isinstance(total, Tensor) or not count:
            # The mean over `count` elements in the mean over all; torch's is NaN over none.
            count = _there(count, term.device)
            mean = torch.where(count > 0, mean, 0.0) * (count * scale / total).to(term.dtype)
        elif (part := count * scale / total) != 1:
            mean = mean * part
        terms.append(mean)
    return add_up(terms)


@functools.cache
def _zero(device: torch.device, dtype: torch.dtype) -> Tensor:
    # A number in Python would be copied to the device by a kernel each time.
    return torch.zeros((), dtype=dtype, device=device)


def _there(count: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(count, Tensor):
        return count.to(device, accumulate_dtype(device))
    return torch.full((), count, dtype=accumulate_dtype(device), device=device)  # a copy would wait


def add_up(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of losses."""
    return functools.reduce(torch.add, terms)


class Sums:
    """Add up sums and counts by name; the mean is taken once, over all devices (I4).

    Sums are Python numbers. On a CPU reading a number costs less than adding tensors; the numbers
    of another device stay there until the host waits for it anyway (I6), and are added then by the
    host and in the same order.
    `over`: further sums, over a longer time, to which everything is added as well.
    """

    def __init__(self, device: torch.device, over: Self | None = None) -> None:
        self._device, self._waits = device, is_async(device)
        self._added = [self] if over is None else [self, over]
        self._sums: dict[Name, list[float]] = {}  # sum and count by name
        self.without_labels = False  # whether no label counted in what `means` returned last
        self._pending: list[tuple[Any, ...]] = []  # what `add` was given
        # By device and dtype: the numbers since `pack`, and the vectors of the updates before.
        self._open: dict[Any, list[Tensor]] = {}
        self._packed: dict[Any, list[Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(
        self, name: Name, total: Tensor | float, count: Tensor | float, mean: bool = False
    ) -> None:
        """Add `total` and `count` to those of `name`, without waiting for the device.

        Of a `mean` over `count` the total is their product, and 0 where nothing counts. On a device
        other than a CPU `pack` has to follow before any tensor changes.
        """
        if self._waits:
            self._pending.append((name, self._placed(total), self._placed(count), mean))
        else:
            total = total.item() if isinstance(total, Tensor) else total
            count = count.item() if isinstance(count, Tensor) else count
            self._add_numbers(name, total, count, mean)

    def _placed(self, value: Any) -> Any:
        """Return a number, or where its tensor will be found among the vectors."""
        if not isinstance(value, Tensor):
            return value
        kind = value.device, value.dtype
        self._open.setdefault(kind, []).append(value.detach().reshape(()))
        return kind

    def _add_numbers(self, name: Name, total: float, count: float, mean: bool) -> None:
        if mean:
            total = total * count if count > 0 else 0.0
        for sums in self._added:
            entry = sums._sums.setdefault(name, [0.0, 0])
            entry[0] += total
            entry[1] += count

    def pack(self) -> None:
        """End the additions of an update or a batch: from here on their tensors may change."""
        for kind, numbers in self._open.items():
            self._packed.setdefault(kind, []).append(torch.stack(numbers))
        self._open = {}

    def flush(self) -> None:
        """Add what is on the device; waits for it."""
        self.pack()
        numbers = {kind: iter(torch.cat(v).tolist()) for kind, v in self._packed.items()}
        for name, total, count, mean in self._pending:
            if isinstance(total, tuple):
                total = next(numbers[total])
            if isinstance(count, tuple):
                count = next(numbers[count])
            self._add_numbers(name, total, count, mean)
        self._pending, self._packed = [], {}

    def add_output(self, output: StepOutput, samples: int, loss_name: str = "loss") -> None:
        """Add a step's loss terms and metrics; `samples` of its batch count, maybe none."""
        for term_name, term in output.terms.items():
            name = Name(loss_name, term_name)
            count = output.counts.get(term_name)
            if not samples:
                self.add(name, 0.0, 0)
            elif count is SUM:  # logged as the mean of what each sample adds
                self.add(name, term.sum() if term.ndim else term, samples)
            else:
                mean = term.mean() if term.ndim else term
                self.add(name, mean, samples if count is None else count, mean=True)
        for metric_name, (total, count) in output.sums.items():
            self.add(metric(metric_name), total if samples else 0.0, count if samples else 0)

    def join(self, group: Group) -> None:
        """Start the sums of other processes at zero: one without samples may have fewer names."""
        self.flush()
        for name in {name for names in group.gather(list(self._sums)) for name in names}:
            self._sums.setdefault(name, [0.0, 0])

    def means(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return each mean over all devices; a sum where count is 0. Waits for the device.

        A term of a loss is returned as `<loss>_<term>`, and the sum of the terms as `<loss>`.
        Raises UserCodeError for a metric that has the name of one of these.
        """
        self.flush()
        names = sorted(self._sums)
        if not names:
            return {}
        own = torch.tensor([self._sums[name] for name in names], dtype=torch.float64)
        # A device without float64 would round counts above 16 million: then hosts exchange them.
        whole = reduce(own.to(self._device) if accumulate_dtype(self._device) == own.dtype else own)
        rows = dict(zip(names, whole.tolist(), strict=True))
        counts = [count for name, (_, count) in rows.items() if name.loss]
        self.without_labels = bool(counts) and not any(counts)
        losses: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for name, (total, count) in rows.items():
            value = total / count if count else total
            if not name.loss:
                metrics[name.term] = value
                continue
            if name.term:  # a single loss has no name
                losses[f"{name.loss}_{name.term}"] = value
            losses[name.loss] = losses.get(name.loss, 0.0) + value
        for taken in sorted(losses.keys() & metrics.keys()):
            raise UserCodeError(
                f"sums[{taken!r}] of a StepOutput has the name of its loss, which is logged as "
                "that: give the metric another name"
            )
        return dict(sorted({**losses, **metrics}.items()))

    def reset(self) -> None:
        """Reset all sums; what is pending is part of further sums, too."""
        self.flush()
        self._sums = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the partial sums; waits for the device."""
        self.flush()
        state: dict[str, Any] = {"sums": {}, "counts": {}, "losses": {}}
        for name, (total, count) in self._sums.items():
            if name.loss:
                state["losses"].setdefault(name.loss, {})[name.term] = [total, count]
            else:
                state["sums"][name.term] = total
                state["counts"][name.term] = count
        return state

    def load_state_dict(self, *states: Mapping[str, Any], takes: int = 1) -> None:
        """Take over partial sums, of several processes together; nothing but names if not `takes`.

        All processes need the same names.
        """
        self.reset()
        for state in states:
            for name, (total, count) in _saved(state):
                entry = self._sums.setdefault(name, [0.0, 0])
                entry[0] += total * takes
                entry[1] += count * takes


def _saved(state: Mapping[str, Any]) -> Iterator[tuple[Name, Sequence[float]]]:
    for text, total in state["sums"].items():
        loss, colon, term = text.partition(":")
        # Earlier checkpoints hold the terms of a loss among the metrics, as `loss:<term>`.
        name = Name(loss, term) if colon and "losses" not in state else metric(text)
        yield name, (total, state["counts"][text])
    for loss, terms in state.get("losses", {}).items():
        for term, sums in terms.items():
            yield Name(loss, term), sums
