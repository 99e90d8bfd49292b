"""The draws of all samples for an epoch, computed at once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from data.keys import Draws, Words

# Samples of the largest data set that has tables: an epoch of it begins some 0.1 s later, and its
# draws take some 10 MB.
LARGEST = 2**17


class DrawTable:
    """Take the rows of draws of a batch from those of all samples.

    Drawing takes some 30 numpy calls, which for a batch cost as much as for a thousand samples.
    The rows are the same, since a sample's draws depend on its key and the epoch alone.
    """

    def __init__(self, draw: Callable[[Draws, int, int], Sequence[Tensor]], samples: int) -> None:
        self.draw = draw
        self.samples = samples
        self._epoch: int | None = None
        self._size = (0, 0)
        self._rows: Sequence[Tensor] = ()

    def rows(
        self, which: Tensor, keys: Callable[[Any], Words], epoch: int, size: tuple[int, int]
    ) -> list[Tensor] | None:
        """Return the draws of samples, by number, for images of a size (height, width).

        keys: returns those of samples, for this epoch. None for another size than that of the
        epoch's first batch: a table for each would be in vain.
        """
        if self._epoch != epoch:
            draws = Draws(keys(np.arange(self.samples)), epoch)
            self._rows = self.draw(draws, *size)
            self._epoch, self._size = epoch, size
        if self._size != size:
            return None
        return [row.index_select(0, which) for row in self._rows]
