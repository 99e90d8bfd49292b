"""Who decides what becomes of an update that is not finite: the host, or the device (I6)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.optimizers.steps import can_leave_out, take_step
from trainer.update.copies import Backup
from trainer.update.gradients import is_finite
from trainer.update.parts import Parts


class Guard(Protocol):
    """See to it that an update that is not finite is not applied: no part of it, to nothing."""

    def remember(self) -> None:
        """Begin an update: keep what it changes before anyone knows whether it is finite."""

    def refuses(self, norm: Tensor) -> bool:
        """Judge by the norm of gradients; true: the update is over and `restore` ends it."""

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer take its step."""

    def restore(self) -> None:
        """Put back what was remembered."""

    def confirm(self) -> int:
        """Return how many of the last updates, one after the other, were left out unnoticed."""


class HostGuard:
    """Ask for each norm at once; on a GPU the host waits for it."""

    def __init__(self, backup: Backup) -> None:
        self._backup = backup

    def remember(self) -> None:
        """Keep what an update changes early."""
        self._backup.take()

    def refuses(self, norm: Tensor) -> bool:
        """Return whether a norm is not finite; waits for the device."""
        return not is_finite(norm)

    step = staticmethod(take_step)  # nothing was refused

    def restore(self) -> None:
        """Put back what was remembered."""
        self._backup.restore()

    def confirm(self) -> int:
        """Return 0: whatever was left out was refused."""
        return 0


class DeviceGuard:
    """Let the device decide, and ask it where the host waits anyway; off these it never waits.

    From the first update on that is not finite, all are left out: when the host learns of it,
    everything is as it was before that update. So this is for runs that end then.
    """

    def __init__(self, backup: Backup, device: torch.device) -> None:
        self._backup = backup
        self._bad = torch.zeros((), device=device)  # 1 from the first such update on
        self._left_out = torch.zeros((), device=device)  # of the updates before this one

    def remember(self) -> None:
        """Keep what an update changes early, unless one was left out: then that stays kept."""
        self._left_out += self._bad
        self._backup.take(unless=self._bad)

    def refuses(self, norm: Tensor) -> bool:
        """Note on the device whether a norm is not finite; the host goes on."""
        bad = torch.isfinite(norm).logical_not().to(self._bad, non_blocking=True)
        torch.maximum(self._bad, bad.reshape(()), out=self._bad)
        return False

    def step(self, optimizer: Optimizer) -> None:
        """Step unless an update was bad, in the optimizer's own kernel: as torch's scaler does."""
        optimizer.grad_scale, optimizer.found_inf = None, self._bad  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def restore(self) -> None:
        """Put back what was remembered."""
        self._backup.restore()

    def confirm(self) -> int:
        """Return how many updates were left out, and undo the first one; waits for the device."""
        count = int((self._left_out + self._bad).item())
        if count:
            self._backup.restore()
            self._bad.zero_()
            self._left_out.zero_()
        return count


def guard_of(parts: Parts, backup: Backup) -> Guard:
    """Choose who decides; `backup` keeps what an update changes before that.

    The device does where such an update ends the run at the next log line, and where the kernels
    of the optimizers can leave a step out. Everywhere else the host asks: once an update, or once
    for each turn of a task that has turns.
    """
    device = parts.strategy.device
    by_device = (
        waits_for(device)
        and parts.options.on_nonfinite == "stop"
        and not parts.precision.scales
        and not parts.strategy.updates_on_host
        and all(can_leave_out(o) for o in parts.optimizers.optimizers.values())
    )
    return DeviceGuard(backup, device) if by_device else HostGuard(backup)


def waits_for(device: torch.device) -> bool:
    """Return whether the host must wait to read a number of the device."""
    return device.type != "cpu"
