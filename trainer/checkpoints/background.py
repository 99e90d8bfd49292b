"""Write checkpoints in the background: a copy of the state, and a writer thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from data.batch import map_tensors


def on_host(tree: Any, copy: Callable[[Tensor], Tensor] = Tensor.cpu) -> Any:
    """Return `tree` with its tensors on the CPU; what was one tensor (tied weights) stays one.

    Sharded tensors (DTensor) and those on the meta device stay as they are.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        if tensor.is_meta or hasattr(tensor, "device_mesh"):
            return tensor
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            return tensor.cpu().clone()
        storage = tensor.untyped_storage().data_ptr()
        place = (storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in copies:
            copies[place] = copy(tensor)
        return copies[place]

    return map_tensors(moved, tree)


class Staging:
    """Copies of tensors in host memory, whose buffers are used again by the next save.

    Allocating memory costs several times as much as copying. Pinned memory, which asynchronous
    copies from a GPU need, costs even more.
    """

    def __init__(self) -> None:
        self._buffers: dict[Any, list[Tensor]] = {}  # by shape, stride, dtype, pinned
        self._events: list[torch.cuda.Event] = []

    @torch.no_grad()
    def copy(self, tree: Any) -> Any:
        """Return a copy of `tree`; the previous one is overwritten.

        Copies of CUDA tensors are complete after `wait`.
        """
        free, self._buffers = self._buffers, defaultdict(list)
        devices: set[torch.device] = set()

        def copied(tensor: Tensor) -> Tensor:
            kind = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cuda)
            if free.get(kind):
                buffer = free[kind].pop()
            else:
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[kind].append(buffer)
            devices.update([tensor.device] if tensor.is_cuda else [])
            return buffer.copy_(tensor, non_blocking=tensor.is_cuda)

        result = on_host(tree, copied)
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]
        return result

    def wait(self) -> None:
        """Wait until the copies of CUDA tensors are complete; called by the writer thread."""
        for event in self._events:
            event.synchronize()


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

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = Thread(target=run, name="checkpoint")
        try:
            self._thread.start()
        except RuntimeError:  # the limit on threads is reached: write in this thread
            self._thread = None
            run()

    def finish(self) -> None:
        """Wait until the task ends, and raise its exception, if any."""
        if self._thread is not None:
            self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error
