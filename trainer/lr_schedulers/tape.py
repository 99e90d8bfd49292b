"""A recording of a scheduler: the groups' hyper-parameters as a function of its steps."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    OneCycleLR,
    SequentialLR,
)

BLOCK = 256  # steps recorded at a time, which takes a few milliseconds
KEPT = 8  # blocks in memory, of 2 kB for each hyper-parameter that changes
_BY_FORMULA = (LambdaLR, OneCycleLR, CyclicLR)  # functions of `last_epoch`

Change = tuple[int, str, Any]  # index of a group, hyper-parameter, new value


class StandIn(Optimizer):
    """An optimizer over one empty parameter for each group, to step a scheduler on."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
        # Tensors stay tensors, so that the scheduler rounds as it does on the device.
        params = [
            {
                **{k: v.cpu().clone() if isinstance(v, Tensor) else v for k, v in group.items()},
                "params": [nn.Parameter(torch.empty(0))],
            }
            for group in groups
        ]
        super().__init__(params, dict(defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing; torch warns if schedulers step before it."""


class _Block(NamedTuple):
    """The values after steps `begin` to `begin + steps - 1`."""

    begin: int
    steps: int
    first: list[Any]
    changing: Sequence[tuple[int, str, Sequence[Any]]]  # the value after each step


class Tape:
    """Record the hyper-parameters that a scheduler sets, lazily and in blocks of steps.

    `make` builds the scheduler over an optimizer whose groups are like `groups`. An exception of
    the scheduler at a step is raised when that step, or a later one, is requested.
    """

    def __init__(
        self,
        make: Callable[[Optimizer], Any],
        groups: Sequence[Mapping[str, Any]],
        defaults: Mapping[str, Any],
    ) -> None:
        self._make = make
        self._groups = groups
        self._defaults = defaults
        self._blocks: dict[int, _Block] = {}
        self._columns = [
            (index, key)
            for index, group in enumerate(groups)
            for key, value in group.items()
            if isinstance(value, float | int | tuple | list | Tensor)
            and not isinstance(value, bool)
        ]
        self._has_tensors = any(isinstance(v, Tensor) for group in groups for v in group.values())
        self._jumper: Any = None
        self._rewind()
        self._current = self._block_of(0)

    def at(self, step: int) -> list[Change]:
        """Return each group's hyper-parameters after `step` steps of the scheduler."""
        block = self._block_of(step)
        later = {(group, key): values[step - block.begin] for group, key, values in block.changing}
        pairs = zip(self._columns, block.first, strict=True)
        return [(*column, later.get(column, value)) for column, value in pairs]

    def scheduled(self, step: int) -> list[Change]:
        """Return the learning rates, and other hyper-parameters that differ from the configured."""
        return [
            (group, key, value)
            for group, key, value in self.at(step)
            if key == "lr" or value != self._groups[group][key]
        ]

    def changes(self, step: int) -> list[Change]:
        """Return the hyper-parameters that change at `step`, which is 1 or more."""
        block = self._current
        index = step - block.begin
        if not 0 < index < block.steps:
            block = self._current = self._block_of(step)
            index = step - block.begin
        return [
            (group, key, values[index])
            for group, key, values in block.changing
            if values[index] != values[index - 1]
        ]

    def preview(self, step: int) -> list[float]:
        """Return each group's learning rate after `step` steps, for a preview.

        Steps beyond the blocks in memory are computed by torch's closed form, to about 12 digits,
        if the scheduler has one; others are stepped, at some microseconds for each step.
        """
        if step > BLOCK * KEPT:
            self._jumper = self._jumper or self._made()
            if jump(self._jumper, step):
                return [float(group["lr"]) for group in self._jumper.optimizer.param_groups]
        return [float(value) for _, key, value in self.at(step) if key == "lr"]

    def _made(self) -> Any:
        optimizer = StandIn(self._groups, self._defaults)
        scheduler = self._make(optimizer)
        optimizer.step()
        return scheduler

    def _rewind(self) -> None:
        self.scheduler = self._made()
        groups = self.scheduler.optimizer.param_groups
        self._places = [(groups[group], key) for group, key in self._columns]
        self._recorded = 0  # blocks
        self._error: Exception | None = None

    def _block_of(self, step: int) -> _Block:
        number = max(0, step - 1) // BLOCK
        if number not in self._blocks:
            if number < self._recorded:
                self._rewind()
            while self._recorded <= number and self._error is None:
                self._record()
        block = self._blocks.get(number)
        if block is None or step >= block.begin + block.steps:
            assert self._error is not None
            raise self._error
        return block

    def _record(self) -> None:
        rows = [self._read()]
        try:
            for _ in range(BLOCK):
                self.scheduler.step()
                rows.append(self._read())
        except Exception as error:
            self._error = error
        changing = [
            (*column, array("d", values) if {*map(type, values)} == {float} else values)
            for column, values in zip(self._columns, zip(*rows, strict=True), strict=True)
            if any(value != values[0] for value in values)
        ]
        begin = self._recorded * BLOCK
        self._blocks[self._recorded] = _Block(begin, len(rows), rows[0], changing)
        self._recorded += 1
        if len(self._blocks) > KEPT:
            del self._blocks[next(iter(self._blocks))]

    def _read(self) -> list[Any]:
        if not self._has_tensors:
            return [group[key] for group, key in self._places]
        values = [group[key] for group, key in self._places]
        return [float(v) if isinstance(v, Tensor) else v for v in values]


def jump(scheduler: Any, step: int) -> bool:
    """Set the learning rates after `step` steps by torch's closed form; False if it has none."""
    if type(scheduler) is SequentialLR:
        part = bisect_right(scheduler._milestones, step)
        begin = scheduler._milestones[part - 1] if part else 0
        return jump(scheduler._schedulers[part], step - begin)
    if type(scheduler) is CosineAnnealingWarmRestarts:
        scheduler.step(step)
        return True
    if type(scheduler) in _BY_FORMULA:
        scheduler.last_epoch = step - 1
        scheduler.step()
        return True
    formula = getattr(scheduler, "_get_closed_form_lr", None)
    if formula is None or type(scheduler).__module__ != "torch.optim.lr_scheduler":
        return False
    scheduler.last_epoch = step
    for group, lr in zip(scheduler.optimizer.param_groups, formula(), strict=True):
        put(group, "lr", float(lr))
    return True


def put(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a group's hyper-parameter; a tensor is changed in place."""
    if isinstance(group[key], Tensor):
        group[key].fill_(value)
    else:
        group[key] = value
