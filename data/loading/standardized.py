"""The end of a pipeline of 8-bit images as one step on a CPU: flipped, as floats, standardized.

Bit-equal to the steps one after the other. Images are taken a few at a time, which stay in the
CPU's cache, and written to memory that is used again: new pages cost more than the arithmetic.
"""

import math
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data.batch_transforms import RandomHorizontalFlip, Values
from data.images import flipped
from data.keys import Draws
from data.transforms import Standardize, ToFloat

_AT_ONCE = 2**18  # values of a part: 1 MB of floats
_LARGE = 2**20  # values; of smaller batches malloc itself reuses the memory


class BatchMemory:
    """Memory for batches on the CPU; that of a batch is used again once nothing holds it.

    A tensor's memory is a numpy array, which torch holds as long as there is a tensor, a view or
    another library's array that uses it. Only then it comes back, and at most one block is kept.
    """

    def __init__(self) -> None:
        self._idle: list[npt.NDArray[np.float32]] = []

    def floats(self, shape: Sequence[int]) -> Tensor:
        """Return an uninitialized float32 tensor."""
        size = math.prod(shape)
        block = self._idle.pop() if self._idle else None
        if block is None or len(block) < size:
            block = torch.empty(size).numpy()
        lent = block[:size].reshape(shape)  # a new object, that dies with the last tensor
        weakref.finalize(lent, self._return, block).atexit = False
        return torch.from_numpy(lent)

    def _return(self, block: npt.NDArray[np.float32]) -> None:
        self._idle[:] = [block]


class StandardizedFloats:
    """`ToFloat` and then `Standardize` as one step, for batches and single images."""

    acts_on_batches = True

    def __init__(self, to_float: ToFloat, standardize: Standardize) -> None:
        self.plain = standardize.after(to_float)
        self.standardize = standardize
        self.memory = BatchMemory()

    def __call__(self, images: Tensor) -> Tensor:
        if not self._quickly(images):
            return self.plain(images)
        result = self.memory.floats(images.shape)
        several = _of_a_part(images)
        for part, out in zip(
            torch.split(images, several), torch.split(result, several), strict=True
        ):
            self.standardize.of_bytes(part, out)
        return result

    def mirrored(self, images: Tensor, which: Tensor, axis: int) -> Tensor:
        """Flip the images of `which` (n,) first."""
        if not self._quickly(images):
            return self.plain(flipped(images, which, axis))
        if _of_a_part(images) > 1:
            return self(flipped(images, which, axis))
        result = self.memory.floats(images.shape)
        for image, out, turned in zip(images, result, which.tolist(), strict=True):
            self.standardize.of_bytes(image.flip(axis) if turned else image, out)
        return result

    def _quickly(self, images: Tensor) -> bool:
        """Return whether it is a large batch of bytes on a CPU, with the channels given."""
        large = images.numel() >= _LARGE and images.dtype == torch.uint8 and images.ndim == 4
        return large and images.device.type == "cpu" and self.standardize.fits(images)


def _of_a_part(images: Tensor) -> int:
    return max(1, _AT_ONCE // math.prod(images.shape[1:]))


class StandardizedFlip:
    """A random flip and what comes after it, `StandardizedFloats`; the draws are the flip's."""

    def __init__(self, flip: RandomHorizontalFlip, then: StandardizedFloats) -> None:
        self.flip = flip
        self.then = then
        self.lasting = getattr(flip, "lasting", False)

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Decide for each image, as the flip does."""
        return self.flip.draw(draws, height, width)

    def __call__(self, images: Tensor, flip: Tensor) -> Tensor:
        return self.then.mirrored(images, flip, self.flip.axis)
