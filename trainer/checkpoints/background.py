"""Write checkpoints in the background: a copy of the state, and a writer thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from data.batch import map_tensors


class Staging:
    """Copies of tensors in host memory, whose buffers are reused by the next save.

    Allocating memory costs several times as much as copying. Pinned memory, which asynchronous
    copies from a GPU need, costs even more.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[Any, Tensor]] = []  # by shape, stride, dtype, pinned
        self._events: list[torch.cuda.Event] = []

    @torch.no_grad()
    def copy(self, tree: Any) -> Any:
        """Return `tree` with its tensors copied; tied weights stay tied.

        The previous copies are overwritten. Copies of CUDA tensors are complete after `wait`.
        Sharded tensors (DTensor) are not copied.
        """
        free: dict[Any, list[Tensor]] = defaultdict(list)
        for kind, buffer in self._buffers:
            free[kind].append(buffer)
        self._buffers = []
        copies: dict[Any, Tensor] = {}
        devices: set[torch.device] = set()

        def copied(tensor: Tensor) -> Tensor:
            if tensor.is_meta or hasattr(tensor, "device_mesh"):
                return tensor
            if tensor.layout is not torch.strided:
                return tensor.detach().cpu().clone()
            kind = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cuda)
            place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), *kind)
            if place not in copies:
                buffer = free[kind].pop() if free[kind] else _like(tensor)
                copies[place] = buffer.copy_(tensor, non_blocking=tensor.is_cuda)
                self._buffers.append((kind, buffer))
                devices.update([tensor.device] if tensor.is_cuda else [])
            return copies[place]

        result = map_tensors(copied, tree)
        self._events = [_recorded(device) for device in devices]
        return result

    def wait(self) -> None:
        """Wait until the copies of CUDA tensors are complete; called by the writer thread."""
        for event in self._events:
            event.synchronize()


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="cpu", pin_memory=tensor.is_cuda)


def _recorded(device: torch.device) -> torch.cuda.Event:
    """Return an event recorded after the copies on a device's current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class Writer:
    """Run one task at a time on a thread that is joined before the process exits."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether the task is still running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Start a task. `finish` must have been called for the previous one."""
        self._thread = Thread(target=self._run, args=(work,), name="checkpoint")
        try:
            self._thread.start()
        except RuntimeError:  # the limit on threads is reached: write in this thread
            self._thread = None
            self._run(work)

    def finish(self) -> None:
        """Wait until the task ends, and raise its exception, if any."""
        if self._thread is not None:
            self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
