"""What it takes to write checkpoints beside the training: a copy of the state, and a thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from data.batch import map_tensors


class Staging:
    """Copies of tensors in host memory, which the next copies use again.

    New memory costs several times what the copying does, and pinned memory, without which a GPU
    would be waited for, more still.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[Any, Tensor]] = []  # with what each can hold
        self._events: list[torch.cuda.Event] = []

    @torch.no_grad()
    def copy(self, tree: Any) -> Any:
        """Return `tree` with its tensors copied; what was one tensor (tied weights) stays one.

        The former copies are written over. Those of a GPU's tensors are whole after `wait`.
        Tensors that processes hold in parts stay as they are.
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
        """Wait until the copies of GPUs' tensors are whole; for the thread that reads them."""
        for event in self._events:
            event.synchronize()


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="cpu", pin_memory=tensor.is_cuda)


def _recorded(device: torch.device) -> torch.cuda.Event:
    """Return an event behind the copies of a device: the updates that follow come after them."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class Writer:
    """Do one piece of work at a time on a thread, which the end of the process waits for."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether the work goes on."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begin; the work before it must have been finished."""
        self._thread = Thread(target=self._run, args=(work,), name="checkpoint")
        try:
            self._thread.start()
        except RuntimeError:  # this machine gives no further thread
            self._thread = None
            self._run(work)

    def finish(self) -> None:
        """Wait for the end of the work; raise what it raised."""
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
