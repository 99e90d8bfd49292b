"""Keep an update that is not finite from being applied: no parameter, buffer or state changes."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from regimen.trainer import fast
from regimen.trainer.components.components import Components
from regimen.trainer.device import is_async
from regimen.trainer.optimizers.state import supports_found_inf
from regimen.trainer.task import Task

_MOST_FLAGS = 1000  # that are kept one by one, where nothing is logged for long


class UpdateBackup:
    """Copies of what an update changes before it is known to be finite, or an evaluation.

    These are buffers: a forward pass writes to them (BatchNorm's statistics), or replaces them
    (`self.centre = new`). The state of the `task` between batches. And parameters and state of the
    `early_optimizers`, those that step before the last gradient of an update is known.

    The tensors of a device and dtype are copied as one vector, with one kernel.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        early_optimizers: Sequence[Optimizer] = (),
        task: Task | None = None,
    ) -> None:
        # Each module's own dict of buffers, so that a replaced buffer can be put back.
        self._owners = [m._buffers for root in modules for m in root.modules() if m._buffers]
        self._optimizers = early_optimizers
        self._task = task
        self._task_state: dict[str, Any] = {}
        self._buffers: list[tuple[dict[str, Any], str, Tensor]] = []
        self._states: list[dict[Any, Any]] = []  # of each optimizer, by parameter
        self._tensors: list[Tensor] = []
        self._layout: list[Any] = []  # shape, dtype and device of each tensor
        self._copies: list[Tensor] = []  # a vector for each device and dtype

    def save(self, left_out: Tensor | None = None) -> None:
        """Copy everything, before an update.

        `left_out`: a flag on the device, which is set once an earlier update was left out. The
        copies are then those from before that update, and stay, but for the task's state: the run
        ends there.
        """
        if self._task is not None:
            self._task_state = self._task.state_dict()
        self._buffers = self._find_buffers()
        if not self._buffers and not self._optimizers:
            return
        states = [{p: _structure(s) for p, s in o.state.items()} for o in self._optimizers]
        tensors = self._tensors_of(states)
        layout = [_layout_of(tensor) for tensor in tensors]

        has_copies = bool(self._copies)
        is_same_layout = layout == self._layout
        # The last update has created state: the device cannot choose between vectors of other
        # lengths. The host waits for the flag, after the first update only, and keeps all or none.
        if left_out is not None and has_copies and not is_same_layout and left_out.item():
            return
        copies = _joined(tensors)
        if left_out is not None and has_copies and is_same_layout:
            # The device chooses, and nothing waits: the earlier copies where the flag is set.
            stays = left_out.bool()
            for number, earlier in enumerate(self._copies):
                copies[number] = torch.where(stays.to(earlier.device), earlier, copies[number])

        self._tensors = tensors
        self._states = states
        self._layout = layout
        self._copies = copies

    def _find_buffers(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Return the buffers that there are now, each with the dict that holds it and its name."""
        found = []
        for owner in self._owners:
            for name, buffer in owner.items():
                # Sparse ones (a graph, say) are constants; they cannot be joined.
                if buffer is not None and buffer.numel() and buffer.layout is torch.strided:
                    found.append((owner, name, buffer))
        return found

    def _tensors_of(self, states: Sequence[Mapping[Any, Any]]) -> list[Tensor]:
        """Return all tensors to copy; of a sharded one, this process's shard."""
        tensors = [buffer for _, _, buffer in self._buffers]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                tensors += group["params"]
        for state in states:
            for values in state.values():
                tensors += _tensors_in(values)
        return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what was saved; state that did not exist then is dropped."""
        if self._task is not None:
            self._task.load_state_dict(self._task_state)
        for owner, name, buffer in self._buffers:
            owner[name] = buffer
        for group, vector in zip(_by_device_and_dtype(self._tensors), self._copies, strict=True):
            parts = torch.split(vector, [tensor.numel() for tensor in group])
            for tensor, part in zip(group, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
        # No states were saved where the backup was never needed.
        for optimizer, states in zip(self._optimizers, self._states, strict=False):
            optimizer.state.clear()
            optimizer.state.update({p: _structure(s) for p, s in states.items()})

    def rebind_buffers(self) -> None:
        """Make the saved tensors the buffers again, with the values of those assigned meanwhile.

        Averages and wrappers refer to them. One of another shape or dtype replaces the saved one.
        """
        for owner, name, buffer in self._buffers:
            new = owner.get(name)
            if new is not buffer and new is not None and _layout_of(new) == _layout_of(buffer):
                with torch.no_grad():
                    owner[name] = buffer.copy_(new)


class Guard:
    """The host reads the norm of the gradients once per phase, and undoes a non-finite update.

    On an accelerator it waits for the device there.
    """

    is_deferred = False  # whether the host learns of a non-finite update only later

    def __init__(self, backup: UpdateBackup) -> None:
        self._backup = backup

    def begin_update(self) -> None:
        """Copy what the update changes before it is known to be finite."""
        self._backup.rebind_buffers()
        self._backup.save()

    def is_nonfinite(self, norm: Tensor) -> bool:
        """Return whether the update has to be undone, by `restore`; waits for the device."""
        return not math.isfinite(norm.item())

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step."""
        fast.step_optimizer(optimizer)

    def end_update(self) -> None:
        """End an update that was applied."""
        self._backup.rebind_buffers()

    def restore(self) -> None:
        """Undo the update."""
        self._backup.restore()

    def undo_skipped(self) -> int:
        """Return how many updates were skipped without the host's knowledge: none here."""
        return 0


class DeviceGuard(Guard):
    """The device decides, so that the host does not wait for it in an update.

    After the first non-finite update it leaves out all further ones; `undo_skipped` tells the host
    how many, and puts everything back to what it was before the first. That is only possible where
    the run ends with such an update, and where the kernels of all optimizers can leave a step out.
    """

    is_deferred = True

    def __init__(self, backup: UpdateBackup, device: torch.device) -> None:
        super().__init__(backup)
        # 0 until a norm is not finite, then 1: `found_inf` as the optimizers' kernels take it.
        self._found_inf = torch.zeros((), device=device)
        # The flags before each update since `undo_skipped`; sums of them, where there were many.
        self._earlier: list[Tensor] = []

    def begin_update(self) -> None:
        """Copy what the update changes, unless an earlier update was left out."""
        if len(self._earlier) >= _MOST_FLAGS:
            self._earlier = [torch.stack(self._earlier).sum()]  # on the device: nothing waits
        self._earlier.append(self._found_inf)
        self._backup.rebind_buffers()
        self._backup.save(left_out=self._found_inf)

    def is_nonfinite(self, norm: Tensor) -> bool:
        """Set the flag on the device if the norm is not finite; return False."""
        norm = norm.to(self._found_inf.device, non_blocking=True)  # without gradients: on the host
        # flag + 0 * norm: 0 times infinity is NaN, which is not 0 either. A norm of any type gives
        # a float32.
        flag = torch.add(self._found_inf, norm, alpha=0, out=torch.empty_like(self._found_inf))
        self._found_inf = flag.ne_(0)
        return False

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step, whose kernel leaves the step out as for torch's GradScaler."""
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
        try:
            fast.step_optimizer(optimizer)
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def undo_skipped(self) -> int:
        """Return how many of the last updates, in a row, were left out; undo the first of them.

        Waits for the device.
        """
        earlier = self._earlier
        self._earlier = []
        if not self._found_inf.item():  # the host waits for the device here
            return 0
        # The flag was set before all left out but the first. The host waits once more.
        skipped = int(torch.stack(earlier).sum().item()) + 1
        self.restore()
        self._found_inf = torch.zeros_like(self._found_inf)
        return skipped


def make_guard(components: Components, early_optimizers: Sequence[Optimizer]) -> Guard:
    """Return the guard of a training.

    `early_optimizers`: those that step before the last gradient of an update is known.
    """
    modules = [components.model, *components.task.own_modules().values()]
    backup = UpdateBackup(modules, early_optimizers, components.task)
    if _device_can_decide(components):
        return DeviceGuard(backup, components.strategy.device)
    return Guard(backup)


def _device_can_decide(components: Components) -> bool:
    strategy = components.strategy
    return (
        is_async(strategy.device)
        # With "stop" the run ends with such an update anyway. With fp16 it goes on, and a skipped
        # update moves neither schedule nor averages: the host has to know of it at once.
        and components.options.on_nonfinite == "stop"
        and not components.precision.scales
        and not strategy.updates_on_host
        and all(supports_found_inf(o) for o in components.optimizers.optimizers.values())
    )


def _layout_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _by_device_and_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


@torch.no_grad()
def _joined(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies of tensors as vectors, one for each device and dtype."""
    groups = _by_device_and_dtype(tensors)
    return [torch.cat([tensor.reshape(-1) for tensor in group]) for group in groups]


def _tensors_in(values: Any) -> list[Tensor]:
    if not isinstance(values, Mapping):
        return []
    return [value for value in values.values() if isinstance(value, Tensor)]


def _structure(values: Any) -> Any:
    # One parameter's state: its tensors themselves, copies of all other values.
    return copy.deepcopy(values, {id(tensor): tensor for tensor in _tensors_in(values)})
