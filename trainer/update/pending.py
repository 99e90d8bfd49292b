"""Numbers that stay on their device until the host waits for it anyway (I6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

# So many vectors are joined to one: a GPU allots at least 512 bytes to each tensor.
_JOINED = 256


def waits_for(device: torch.device) -> bool:
    """Return whether the host must wait to read a number of the device."""
    return device.type != "cpu"


class Series:
    """Vectors in the order in which they came, copied to the host at once."""

    def __init__(self) -> None:
        self._recent: list[Tensor] = []
        self._joined: list[Tensor] = []

    def append(self, vector: Tensor) -> None:
        """Keep a vector, which must not change any more."""
        self._recent.append(vector)
        if len(self._recent) == _JOINED:
            self._joined.append(torch.cat(self._recent))
            self._recent = []

    def take(self) -> Tensor:
        """Return all numbers as one vector of the host, and forget them; waits for the device."""
        parts = [*self._joined, *self._recent]
        self.clear()
        return torch.cat(parts).cpu() if parts else torch.zeros(0)

    def clear(self) -> None:
        """Forget all numbers."""
        self._recent, self._joined = [], []


class Receiver(Protocol):
    """What numbers are added to; `trainer.update.sums.Sums`."""

    def add_numbers(
        self, name: str, total: float, count: float, scale: float, mean: bool
    ) -> None: ...


_Kind = tuple[torch.device, torch.dtype]
# One addition: of numbers, or of the next value of a kind.
_Addend = tuple[Receiver, str, _Kind | float, _Kind | float, float, bool]


class Pending:
    """What updates add to sums, until the host adds it in the same order.

    `pack` copies the values of an update, by one kernel for each dtype: what becomes of the tensors
    themselves does not matter after that.
    """

    def __init__(self) -> None:
        self._open: dict[_Kind, list[Tensor]] = {}
        self._addends: list[_Addend] = []
        self._packed: dict[_Kind, Series] = {}
        # The additions of each update, and how many updates in a row have the same ones.
        self._updates: list[tuple[list[_Addend], int]] = []

    def __bool__(self) -> bool:
        return bool(self._addends or self._updates)

    def add(
        self,
        receiver: Receiver,
        name: str,
        total: Tensor | float,
        count: Tensor | float,
        scale: float,
        mean: bool,
    ) -> None:
        """Note an addition; its tensors are scalars."""
        kept = self._keep(total), self._keep(count)
        self._addends.append((receiver, name, *kept, scale, mean))

    def _keep(self, value: Tensor | float) -> _Kind | float:
        if not isinstance(value, Tensor):
            return value
        kind = value.device, value.dtype
        self._open.setdefault(kind, []).append(value.detach().reshape(()))
        return kind

    def pack(self) -> None:
        """End an update's additions: copy their values, without waiting for the device."""
        if not self._addends:
            return
        for kind, values in self._open.items():
            series = self._packed.setdefault(kind, Series())
            series.append(torch.stack(values))
        same = bool(self._updates) and self._updates[-1][0] == self._addends
        times = self._updates.pop()[1] if same else 0
        self._updates.append((self._addends, times + 1))
        self._open, self._addends = {}, []

    def settle(self) -> None:
        """Let the receivers add everything, in order; waits for the device."""
        self.pack()
        updates, self._updates = self._updates, []
        numbers = {kind: iter(series.take().tolist()) for kind, series in self._packed.items()}
        for receiver, name, total, count, scale, mean in _in_order(updates):
            total = next(numbers[total]) if isinstance(total, tuple) else total
            count = next(numbers[count]) if isinstance(count, tuple) else count
            receiver.add_numbers(name, total, count, scale, mean)


def _in_order(updates: Iterable[tuple[list[_Addend], int]]) -> Iterator[_Addend]:
    for addends, times in updates:
        for _ in range(times):
            yield from addends
