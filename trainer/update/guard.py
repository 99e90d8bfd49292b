"""Guards against non-finite updates: the decision on the host, or on the device (I6)."""

from __future__ import annotations

import sys
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.optimizers.steps import can_leave_out, take_step
from trainer.update.copies import Backup
from trainer.update.gradients import is_finite
from trainer.update.parts import Parts
from trainer.update.pending import Series, waits_for


class Guard(Protocol):
    """The interface: no part of a non-finite update is applied."""

    def remember(self) -> None:
        """Begin an update: copy what it changes before it is known to be finite."""

    def refuses(self, norm: Tensor) -> bool:
        """Check the norm of the gradients; if True, the caller ends the update by `restore`."""

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step."""

    def restore(self) -> None:
        """Put back what was remembered."""

    def confirm(self) -> int:
        """Return how many of the last updates, in a row, the device has skipped."""


class HostGuard:
    """Read each norm on the host, which waits for a GPU."""

    def __init__(self, backup: Backup) -> None:
        self._backup = backup

    def remember(self) -> None:
        """Copy what an update changes before its norm is known."""
        self._backup.take()

    def refuses(self, norm: Tensor) -> bool:
        """Return whether a norm is not finite; waits for the device."""
        return not is_finite(norm)

    step = staticmethod(take_step)  # the norm was finite

    def restore(self) -> None:
        """Put back what was remembered."""
        self._backup.restore()

    def confirm(self) -> int:
        """Return 0: the host knows of each skipped update."""
        return 0


class DeviceGuard:
    """Decide on the device; the host asks only where it waits anyway.

    After the first non-finite update all further ones are skipped: when the host learns of it,
    everything is as it was before that update. So this is for runs that end then.
    """

    def __init__(self, backup: Backup, device: torch.device, turns: int = 1) -> None:
        self._backup = backup
        self._turns = turns  # norms of an update
        self._one = torch.ones((), dtype=torch.float32, device=device)
        number = torch.zeros(1, dtype=torch.float32, device=device)
        self._bad = number[0]  # 1 after the first non-finite update
        self._is_bad = _as_bool(number)
        self._norms = Series()  # since the last `confirm`

    def remember(self) -> None:
        """Copy what an update changes, unless one was skipped: then the earlier copy is kept."""
        self._backup.take(unless=self._is_bad)

    def refuses(self, norm: Tensor) -> bool:
        """Record on the device whether a norm is not finite; the host does not wait."""
        wide = norm if norm.dtype in (torch.float32, torch.float64) else norm.float()
        wide = wide.to(self._bad.device, non_blocking=True)  # without gradients it is on the host
        # The kernel of torch's GradScaler: it sets `bad` to 1, and multiplies the norm by 1. The
        # same by isfinite, logical_not and maximum would be seven kernels.
        torch._amp_foreach_non_finite_check_and_unscale_([wide], self._bad, self._one)
        self._norms.append(wide.view(1))
        return False

    def step(self, optimizer: Optimizer) -> None:
        """Step, unless an update was not finite: the kernel decides, as for torch's GradScaler."""
        optimizer.grad_scale, optimizer.found_inf = None, self._bad  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def restore(self) -> None:
        """Put back what was remembered."""
        self._backup.restore()

    def confirm(self) -> int:
        """Return how many updates were skipped, and undo the first one; waits for the device."""
        if not self._bad.item():
            self._norms.clear()
            return 0
        finite = self._norms.take().float().isfinite().tolist()  # the kernel looks at a float32
        self._backup.restore()
        self._bad.zero_()
        return len(finite) // self._turns - finite.index(False) // self._turns


def _as_bool(number: Tensor) -> Tensor:
    """Return a view of a float32 that is 0 or 1 as a boolean.

    torch's kernels read any byte but 0 as true; the highest of 1.0 is 0x3f.
    """
    return number.view(torch.bool)[3 if sys.byteorder == "little" else 0]


def guard_of(parts: Parts, backup: Backup) -> Guard:
    """Choose the guard; `backup` copies what an update changes before the decision.

    The device decides if such an update ends the run at the next log line, and the kernels of the
    optimizers can skip a step. Otherwise the host decides: once for each update, or for each turn
    of a task that has turns.
    """
    device, turns = parts.strategy.device, len(parts.task.turns) or 1
    by_device = (
        waits_for(device)
        and parts.options.on_nonfinite == "stop"
        and not parts.precision.scales
        and not parts.strategy.updates_on_host
        and all(can_leave_out(o) for o in parts.optimizers.optimizers.values())
    )
    return DeviceGuard(backup, device, turns) if by_device else HostGuard(backup)
