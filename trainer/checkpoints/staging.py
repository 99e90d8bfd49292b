"""Copies of a state in host memory, from which a thread writes while the training goes on."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from regimen.trainer.checkpoints.archive import on_host
from regimen.trainer.device import current_stream, pins

# Bytes of the first slab of pinned memory and of the largest, powers of two.
_FIRST_SLAB = 2**20
_LARGEST_SLAB = 2**26
_ALIGNMENT = 64  # bytes, at least as for any number format


class PinnedMemory:
    """Pinned memory in slabs, of which tensors take pieces one after the other.

    torch rounds each request up to a power of two, and asks the driver for each, which takes longer
    than a copy: so a few slabs of such sizes, which grow with what they have to hold.
    """

    def __init__(self) -> None:
        self._slabs = list[Tensor]()
        self._current = 0  # index of the slab that tensors are taken from
        self._offset = 0  # bytes of it that are taken
        self._next_size = _FIRST_SLAB

    @property
    def nbytes(self) -> int:
        """The bytes of all slabs."""
        return sum(slab.nbytes for slab in self._slabs)

    def restart(self) -> None:
        """Take from the first slab again: the tensors so far may be overwritten."""
        self._current = 0
        self._offset = 0

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized tensor of another's shape, dtype and, if dense, strides."""
        form = torch.empty_like(tensor, device="cpu")
        if not form.nbytes:
            return form
        slab, offset = self._allocate(form.nbytes)
        # Not a view of the slab: torch.save writes the whole storage of a tensor.
        count = form.untyped_storage().nbytes() // form.itemsize
        flat = torch.frombuffer(slab.numpy(), dtype=form.dtype, count=count, offset=offset)
        return flat.as_strided(form.shape, form.stride())

    def _allocate(self, size: int) -> tuple[Tensor, int]:
        """Return a slab with `size` free bytes, and their offset."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT  # rounded up
        while self._current < len(self._slabs):
            slab = self._slabs[self._current]
            offset = self._offset
            if offset + size <= slab.nbytes:
                self._offset += size
                return slab, offset
            self._current += 1
            self._offset = 0
        slab_size = max(self._next_size, 1 << (size - 1).bit_length())
        self._next_size = min(2 * self._next_size, _LARGEST_SLAB)
        slab = torch.empty(slab_size, dtype=torch.uint8, pin_memory=True)
        self._slabs.append(slab)
        self._offset = size
        return slab, 0


class Staging:
    """Copies of tensors in host memory, whose buffers are used again by the next save.

    Allocating memory costs several times as much as copying. Pinned memory, which asynchronous
    copies from an accelerator need, costs even more.
    """

    def __init__(self) -> None:
        self._buffers = dict[Any, list[Tensor]]()  # by shape, stride and dtype: not pinned
        self._pinned = PinnedMemory()
        self._events = list[torch.Event]()

    @torch.no_grad()
    def copy(self, tree: Any) -> Any:
        """Return a copy of `tree`; the previous one is overwritten.

        Copies from an accelerator are complete after `wait`.
        """
        free = self._buffers
        self._buffers = defaultdict(list)
        self._pinned.restart()
        devices = set[torch.device]()

        def copied(tensor: Tensor) -> Tensor:
            if pins(tensor.device):
                devices.add(tensor.device)
                return self._pinned.empty_like(tensor).copy_(tensor, non_blocking=True)
            layout = (tensor.shape, tensor.stride(), tensor.dtype)
            if free.get(layout):
                buffer = free[layout].pop()
            else:
                buffer = torch.empty_like(tensor, device="cpu")
            self._buffers[layout].append(buffer)
            return buffer.copy_(tensor)

        result = on_host(tree, copied)
        self._events = [current_stream(device).record_event() for device in devices]
        return result

    def wait(self) -> None:
        """Wait until the copies from an accelerator are complete; called by the writer thread."""
        for event in self._events:
            event.synchronize()
