"""Means as sums and counts; those of a device are added when the host waits for it anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.task import StepOutput
from trainer.update.pending import Pending, waits_for


class Sums:
    """Add up sums and counts by name; the mean is taken once, over all devices (I4).

    Sums are Python numbers. On a CPU reading a number costs less than adding tensors; the numbers
    of another device are added when someone asks for the sums, by the host and in the same order.
    `over`: further sums, over a longer time, to which everything is added as well.
    """

    def __init__(self, device: torch.device, over: Sums | None = None) -> None:
        self._device = device
        self._over = over
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self._pending: Pending | None = None
        if waits_for(device):
            self._pending = over._pending if over is not None else Pending()
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self.without_labels = False  # whether no label counted in what `means` returned last

    def __bool__(self) -> bool:
        return bool(self._counts) or bool(self._pending)

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
        self.add_numbers(name, total, count, scale, mean)

    def add_numbers(self, name: str, total: float, count: float, scale: float, mean: bool) -> None:
        """Do what was asked of `add`, now that the numbers have reached the host."""
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
        if self._pending:
            self._pending.settle()

    def add_output(self, output: StepOutput, samples: int, loss_name: str = "loss") -> None:
        """Add a step's loss terms and metrics; `samples` of its batch count, maybe none."""
        if isinstance(output.loss, Tensor):
            loss = output.loss
            self.add(loss_name, loss.mean() if loss.ndim else loss, samples, samples)
        else:
            for name, term in output.loss.items():
                self._add_term(f"{loss_name}:{name}", term, output.counts.get(name), samples)
        real = 1 if samples else 0
        for name, (total, count) in output.sums.items():
            self.add(name, total, count if samples else 0, real)

    def _add_term(self, name: str, term: Tensor, count: Any, samples: int) -> None:
        real = 1 if samples else 0
        if count is None or (isinstance(count, int | float) and count):
            weight = samples if count is None else count * real
            self.add(name, term.mean() if term.ndim else term, weight, weight)
        elif isinstance(count, Tensor | int | float):
            mean = term.mean() if term.ndim else term
            self.add(name, mean, count if samples else 0, real, mean=True)
        else:  # a sum over the samples: logged as the mean of what each of them adds
            self.add(name, term.sum() if term.ndim else term, samples, real)

    @property
    def names(self) -> set[str]:
        """The names of all sums; a process without samples may have fewer than others."""
        self._settle()
        return set(self._sums)

    def take_part(self, names: Iterable[str]) -> None:
        """Start missing sums at zero: `means` needs the same names on all processes."""
        for name in set(names) - self.names:
            self.add_numbers(name, 0.0, 0, 1, mean=False)

    def means(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return each mean over all devices; a sum where count is 0. Waits for the device."""
        names = sorted(self.names)
        if not names:
            return {}
        values = [*(self._sums[n] for n in names), *(self._counts[n] for n in names)]
        table = reduce(torch.tensor(values, dtype=self.dtype, device=self._device)).tolist()
        counts = dict(zip(names, table[len(names) :], strict=True))
        self.without_labels = _counts_no_label(counts)
        pairs = zip(names, table[: len(names)], counts.values(), strict=True)
        return add_up_terms(
            {name: total / count if count else total for name, total, count in pairs}
        )

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


def _counts_no_label(counts: Mapping[str, float]) -> bool:
    """Return whether every loss is a mean over nothing: `loss`, `loss:<term>`, `loss_<turn>`..."""
    losses = [count for name, count in counts.items() if name.startswith("loss")]
    return bool(losses) and not any(losses)


def mean_of(term: Tensor, count: Tensor) -> Tensor:
    """Return a term's mean, or 0 if nothing in it counts: torch returns NaN without labels."""
    return torch.where(count > 0, term.mean(), 0.0)


def add_up_terms(means: Mapping[str, float]) -> dict[str, float]:
    """Turn `loss:<term>` into `loss_<term>`, and into `loss` their sum; a term may lack a name."""
    result: dict[str, float] = {}
    for name, value in means.items():
        whole, colon, term = name.partition(":")
        if term or not colon:
            result[name.replace(":", "_")] = value
        if colon:
            result[whole] = result.get(whole, 0.0) + value
    return result
