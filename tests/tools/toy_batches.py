"""What a loader gives of a data set."""

from typing import Any

from torch import Tensor

from regimen.data.loading.loader import Loader
from regimen.data.orders import Sequential
from regimen.data.samplers import UpdateSampler
from regimen.data.streams import as_dataset


def batches(
    source: Any, epoch: int = 0, start: int = 0, workers: int = 0, order: Any = None, **cut: Any
) -> list[Tensor]:
    """Return the inputs of an epoch's micro-batches, from updates of 6 samples on from `start`."""
    data = as_dataset(source)
    sampler = UpdateSampler(order or Sequential(len(data)), batch_size=6, **cut)
    loader = Loader(data, sampler, seed=9, num_workers=workers)
    try:
        return [micro.batch[0][: micro.batch_slice.count] for micro in loader.epoch(epoch, start)]
    finally:
        loader.close()
