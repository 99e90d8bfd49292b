"""Flips, conversion to floats and standardization as one step, in memory that is used again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from data import batch_transforms as batched
from data.batch import Piece
from data.images import ImageTensors
from data.loading.device_transforms import DeviceTransforms
from data.loading.loader import Loader
from data.loading.on_device import OnDevice
from data.loading.standardized import BatchMemory
from data.orders import Sequential
from data.transforms import Standardize, ToFloat
from data.updates import UpdateSampler

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SIZES = [
    pytest.param((8, 3, 224, 224), id="an-image-at-a-time"),
    pytest.param((50, 3, 101, 77), id="several-at-a-time"),
    pytest.param((5, 3, 9, 7), id="small"),
    pytest.param((5, 1, 9, 7), id="small-of-other-channels"),
    pytest.param((40, 1, 201, 177), id="other-channels"),
]


def _piece(samples: int) -> Piece:
    return Piece(tuple(range(samples)), samples, 0, samples, 0, 1, 0, 0)


@pytest.mark.parametrize("flip", [None, batched.RandomHorizontalFlip, batched.RandomVerticalFlip])
@pytest.mark.parametrize("shape", SIZES)
def test_bits_of_batches_are_those_of_plain_torch(
    shape: tuple[int, ...], flip: type[batched.RandomHorizontalFlip] | None
) -> None:
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    before = images.clone()
    steps = {"flip": flip and flip(), "to_float": ToFloat(), "normalize": Standardize(MEAN, STD)}
    found = DeviceTransforms(steps, seed=3)(images, _piece(len(images)))
    whole = images
    if flip is not None:  # the flip alone draws the same: its name is
        whole = DeviceTransforms({"flip": flip()}, seed=3)(images, _piece(len(images)))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))
    assert torch.equal(found, (whole.to(torch.float32) / 255 - mean) / std)
    assert found.is_contiguous()
    assert found.shape[1] == 3
    assert torch.equal(images, before)


HOLDERS: list[Any] = [
    pytest.param(lambda batch: batch, id="tensor"),
    pytest.param(lambda batch: batch[1:2, :, 3:], id="view"),
    pytest.param(lambda batch: batch.numpy()[2], id="array"),
    pytest.param(lambda batch: from_dlpack(batch), id="dlpack"),
    pytest.param(lambda batch: batch.untyped_storage(), id="storage"),
    pytest.param(
        lambda batch: (batch * torch.ones((), requires_grad=True)).grad_fn, id="saved-for-backward"
    ),
]


@pytest.mark.parametrize("hold", HOLDERS)
def test_memory_is_used_again_only_once_nothing_holds_it(hold: Callable[[Tensor], Any]) -> None:
    memory, shape = BatchMemory(), (8, 3, 256, 256)
    batch = memory.floats(shape)
    place = batch.data_ptr()
    held = hold(batch)
    del batch
    others = [memory.floats(shape) for _ in range(3)]
    assert place not in [other.data_ptr() for other in others]
    del held
    again = memory.floats(shape)
    assert again.data_ptr() == place
    assert memory.floats(shape).data_ptr() != place


def test_a_smaller_batch_uses_the_memory_of_a_larger_one() -> None:
    memory = BatchMemory()
    place = memory.floats((8, 3, 256, 256)).data_ptr()
    smaller = memory.floats((7, 3, 256, 256))
    assert smaller.data_ptr() == place
    assert smaller.untyped_storage().nbytes() == 7 * 3 * 256 * 256 * 4
    del smaller
    assert memory.floats((9, 3, 256, 256)).data_ptr() != place


def test_batches_that_are_kept_stay_as_they_were() -> None:
    images = torch.randint(0, 256, (30, 3, 224, 224), dtype=torch.uint8)
    dataset = ImageTensors(images, torch.zeros(30, dtype=torch.int64), ["picture"])
    steps = {"to_float": ToFloat(), "normalize": Standardize(MEAN, STD)}
    loader = OnDevice(
        Loader(dataset, UpdateSampler(Sequential(30), batch_size=8), seed=1),
        torch.device("cpu"),
        transforms=DeviceTransforms(steps, seed=1),
    )
    kept = [micro.batch[0] for epoch in range(2) for micro in loader.epoch(epoch)]
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))
    whole = (images.to(torch.float32) / 255 - mean) / std
    assert torch.equal(torch.cat(kept), torch.cat([whole, whole]))
    places = {micro.batch[0].data_ptr() for micro in loader.epoch(2) if len(micro.batch[0]) == 8}
    assert len(places) == 2  # that of the batch in use, and that of the one before it
