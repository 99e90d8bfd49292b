"""Exact means over the samples of an update, an epoch or a data set: sums and counts (I3, I4)."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from regimen.trainer.device import accumulate_dtype, is_async
from regimen.trainer.distributed import Group
from regimen.trainer.errors import UserCodeError
from regimen.trainer.task import SUM, StepOutput


class MeanKey(NamedTuple):
    """What a mean is of: a metric, or a term of a loss, whose name may be empty.

    A metric may have any name, also one that reads like that of a loss.
    """

    loss: str  # the name of the loss; empty for a metric
    term: str  # the name of the term, or of the metric


# Each key is made once: new ones for each update would take 1 us of it.
@functools.cache
def loss_key(name: str, term: str) -> MeanKey:
    """Return the key of the mean of a term of a loss."""
    return MeanKey(name, term)


@functools.cache
def metric_key(name: str) -> MeanKey:
    """Return the key of a metric's mean."""
    return MeanKey("", name)


class _OnDevice(NamedTuple):
    # Stands for a number that is on a device: the next one of the stacked numbers of this kind.
    device: torch.device
    dtype: torch.dtype


_Number = float | _OnDevice


# The arguments of an `add`: key, total, count, mean.
_Addition = tuple[MeanKey, _Number, _Number, bool]


def _zero_sums() -> defaultdict[MeanKey, list[float]]:
    return defaultdict(lambda: [0.0, 0])  # of each key the sum and the count


class MeanAccumulator:
    """Add up sums and counts by name; the mean is taken once, over all devices (I4).

    Sums are Python numbers. On a CPU reading a number costs less than adding tensors; the numbers
    of another device stay there until the host waits for it anyway (I6), and are added then by the
    host, in the same order.
    `parent`: the sums over a longer time, to which everything is added as well.
    """

    def __init__(self, device: torch.device, parent: Self | None = None) -> None:
        self._device = device
        self._is_deferred = is_async(device)
        self._receivers = [self] if parent is None else [self, parent]
        self._sums = _zero_sums()
        self.has_no_labels = False  # whether no label counted in what `means` returned last
        # Of a device that the host waits for:
        self._pending: list[_Addition] = []
        self._numbers: dict[_OnDevice, list[Tensor]] = {}  # scalars since `stack_pending`
        self._stacked: dict[_OnDevice, list[Tensor]] = {}  # vectors of the updates before

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(
        self, key: MeanKey, total: Tensor | float, count: Tensor | float, mean: bool = False
    ) -> None:
        """Add `total` and `count` to those of `key`, without waiting for the device.

        With `mean`, `total` is a mean over `count` items and is multiplied by it; 0 if `count` is
        0. On a device other than a CPU `stack_pending` has to follow before any tensor changes.
        """
        if self._is_deferred:
            self._pending.append((key, self._defer(total), self._defer(count), mean))
            return
        # The tensors are on a CPU, where reading one waits for nothing.
        if isinstance(total, Tensor):
            total = total.item()
        if isinstance(count, Tensor):
            count = count.item()
        self._add_numbers(key, total, count, mean)

    def _defer(self, value: Tensor | float) -> _Number:
        if not isinstance(value, Tensor):
            return value
        kind = _OnDevice(value.device, value.dtype)
        self._numbers.setdefault(kind, []).append(value.detach().reshape(()))
        return kind

    def _add_numbers(self, key: MeanKey, total: float, count: float, mean: bool) -> None:
        if mean:
            total = total * count if count > 0 else 0.0
        for receiver in self._receivers:
            entry = receiver._sums[key]
            entry[0] += total
            entry[1] += count

    def stack_pending(self) -> None:
        """End the additions of an update or a batch: from here on their tensors may change."""
        for kind, numbers in self._numbers.items():
            self._stacked.setdefault(kind, []).append(torch.stack(numbers))
        self._numbers = {}

    def flush(self) -> None:
        """Add what is on the device; waits for it."""
        self.stack_pending()
        values: dict[_OnDevice, Iterator[float]] = {}
        for kind, vectors in self._stacked.items():
            # The host waits once for all numbers of a kind.
            values[kind] = iter(torch.cat(vectors).tolist())
        for key, total, count, mean in self._pending:
            # In the order of the additions, in which the numbers were stacked.
            if isinstance(total, _OnDevice):
                total = next(values[total])
            if isinstance(count, _OnDevice):
                count = next(values[count])
            self._add_numbers(key, total, count, mean)
        self._pending = []
        self._stacked = {}

    def add_output(self, output: StepOutput, samples: int, loss_name: str = "loss") -> None:
        """Add a step's loss terms and metrics; `samples` of its batch count, maybe none."""
        for term_name, term in output.terms.items():
            key = loss_key(loss_name, term_name)
            count = output.counts.get(term_name)
            if not samples:
                self.add(key, 0.0, 0)
            elif count is SUM:  # logged as the mean of what each sample adds
                self.add(key, term.sum() if term.ndim else term, samples)
            else:
                mean = term.mean() if term.ndim else term
                self.add(key, mean, samples if count is None else count, mean=True)
        for metric_name, (total, count) in output.sums.items():
            if samples:
                self.add(metric_key(metric_name), total, count)
            else:
                self.add(metric_key(metric_name), 0.0, 0)

    def add_missing_keys(self, group: Group) -> None:
        """Begin the means of other processes at zero: one without samples may have fewer."""
        self.flush()
        # A collective: `means` adds up one number for each key, on all processes alike.
        for keys in group.gather(list(self._sums)):
            for key in keys:
                self._sums.setdefault(key, [0.0, 0])

    def means(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return each mean over all devices; a sum where count is 0. Waits; a collective.

        A term of a loss is returned as `<loss>_<term>`, and the sum of the terms as `<loss>`.
        `reduce`: returns the sum of a tensor over all processes. Raises UserCodeError for a metric
        that has the name of one of these.
        """
        self.flush()
        keys = sorted(self._sums)
        if not keys:
            return {}
        local = torch.tensor([self._sums[key] for key in keys], dtype=torch.float64)
        # A device without float64 would round counts above 16 million: then hosts exchange them.
        if accumulate_dtype(self._device) == local.dtype:
            local = local.to(self._device)
        rows = dict(zip(keys, reduce(local).tolist(), strict=True))

        counts = [count for key, (_, count) in rows.items() if key.loss]
        self.has_no_labels = bool(counts) and not any(counts)
        losses: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for key, (total, count) in rows.items():
            value = total / count if count else total
            if not key.loss:
                metrics[key.term] = value
                continue
            if key.term:  # a single loss has no name
                losses[f"{key.loss}_{key.term}"] = value
            losses[key.loss] = losses.get(key.loss, 0.0) + value
        for name in sorted(losses.keys() & metrics.keys()):
            raise UserCodeError(
                f"sums[{name!r}] of a StepOutput has the name of its loss, which is logged as "
                "that: give the metric another name"
            )
        return dict(sorted({**losses, **metrics}.items()))

    def reset(self) -> None:
        """Reset all sums; what is pending is added to the parent first."""
        self.flush()
        self._sums = _zero_sums()

    def state_dict(self) -> dict[str, Any]:
        """Return the partial sums; waits for the device."""
        self.flush()
        state: dict[str, Any] = {"sums": {}, "counts": {}, "losses": {}}
        for key, (total, count) in self._sums.items():
            if key.loss:
                state["losses"].setdefault(key.loss, {})[key.term] = [total, count]
            else:
                state["sums"][key.term] = total
                state["counts"][key.term] = count
        return state

    def load_state_dict(
        self, states: Sequence[Mapping[str, Any]], include_values: bool = True
    ) -> None:
        """Load the partial sums of several processes together; without their values zeros.

        All processes need the same keys, also those that load no values.
        """
        self.reset()
        for state in states:
            for key, (total, count) in _saved_sums(state):
                entry = self._sums[key]
                if include_values:
                    entry[0] += total
                    entry[1] += count


def _saved_sums(state: Mapping[str, Any]) -> Iterator[tuple[MeanKey, Sequence[float]]]:
    for text, total in state["sums"].items():
        loss, colon, term = text.partition(":")
        # Earlier checkpoints hold the terms of a loss among the metrics, as `loss:<term>`.
        is_loss = colon and "losses" not in state
        key = MeanKey(loss, term) if is_loss else metric_key(text)
        yield key, (total, state["counts"][text])
    for loss, terms in state.get("losses", {}).items():
        for term, sums in terms.items():
            yield MeanKey(loss, term), sums
