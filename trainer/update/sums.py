"""Means as sums and counts, kept on the device until the next log line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.task import StepOutput


class Sums:
    """Add up sums and counts by name; the mean is taken once, over all devices (I4).

    Sums are float64 if the device has it, so that the result does not depend on their order. On a
    CPU, where reading a number costs less than adding tensors, they are Python numbers.
    `over`: further sums, over a longer time, to which everything is added as well.
    """

    def __init__(self, device: torch.device, over: Sums | None = None) -> None:
        self._device = device
        self._over = over
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self._on_host = device.type == "cpu"
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, Tensor | float] = {}
        self.without_labels = False  # whether no label counted in what `means` returned last

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(
        self, name: str, total: Tensor | float, count: Tensor | float, scale: float = 1
    ) -> None:
        """Add `scale * total` and `count` to those of `name`, without waiting for the device."""
        if self._on_host:
            total = total.item() if isinstance(total, Tensor) else total
            count = count.item() if isinstance(count, Tensor) else count
            self._add_numbers(name, total * scale, count)
            return
        known = self._sums.get(name)
        total = total.detach() if isinstance(total, Tensor) else total
        if isinstance(known, Tensor):
            known.add_(total, alpha=scale)
        else:
            # With CPU offload the norm is in host memory.
            first = torch.as_tensor(total).to(self._device, self.dtype, copy=True)
            self._sums[name] = first.mul_(scale)
        self._counts[name] = count if known is None else self._counts[name] + count
        if self._over is not None:
            self._over.add(name, total, count, scale)

    def _add_numbers(self, name: str, total: float, count: float) -> None:
        sums: Sums | None = self
        while sums is not None:
            sums._sums[name] = total + sums._sums.get(name, 0.0)
            sums._counts[name] = count + sums._counts.get(name, 0)
            sums = sums._over

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
            self.add(name, total, count * real, real)

    def _add_term(self, name: str, term: Tensor, count: Any, samples: int) -> None:
        real = 1 if samples else 0
        if count is None or (isinstance(count, int | float) and count):
            weight = samples if count is None else count * real
            self.add(name, term.mean() if term.ndim else term, weight, weight)
        elif isinstance(count, Tensor | int | float):
            count = torch.as_tensor(count, device=term.device)
            total = mean_of(term, count).to(self.dtype) * count
            self.add(name, total, count * real, real)
        else:  # a sum over the samples: logged as the mean of what each of them adds
            self.add(name, term.sum(), samples, real)

    @property
    def names(self) -> set[str]:
        """The names of all sums; a process without samples may have fewer than others."""
        return set(self._sums)

    def take_part(self, names: Iterable[str]) -> None:
        """Start missing sums at zero: `means` needs the same names on all processes."""
        for name in set(names) - set(self._sums):
            self.add(name, torch.zeros((), dtype=self.dtype, device=self._device), 0)

    def means(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return each mean over all devices: one transfer to the host; a sum where count is 0."""
        if not self._sums:
            return {}
        names = sorted(self._sums)
        values = [*(self._sums[n] for n in names), *(self._counts[n] for n in names)]
        table = reduce(self._stacked(values)).tolist()
        counts = dict(zip(names, table[len(names) :], strict=True))
        self.without_labels = _counts_no_label(counts)
        pairs = zip(names, table[: len(names)], counts.values(), strict=True)
        return add_up_terms(
            {name: total / count if count else total for name, total, count in pairs}
        )

    def _stacked(self, values: Sequence[Tensor | float]) -> Tensor:
        if self._on_host:
            return torch.tensor(values, dtype=self.dtype)
        dtype, device = self.dtype, self._device
        return torch.stack([torch.as_tensor(v, dtype=dtype, device=device) for v in values])

    def reset(self) -> None:
        """Reset all sums."""
        self._sums, self._counts = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return the partial sums."""
        return {
            "sums": {k: torch.as_tensor(v, dtype=self.dtype) for k, v in self._sums.items()},
            "counts": {k: torch.as_tensor(v) for k, v in self._counts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over partial sums."""
        taken = {k: v.to(self._device) for k, v in state["sums"].items()}
        self._sums = {k: v.item() if self._on_host else v for k, v in taken.items()}
        self._counts = {k: v if v.ndim else v.item() for k, v in state["counts"].items()}


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
