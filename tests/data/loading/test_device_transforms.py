"""Device transforms: the same images whatever the split, and mixing keyed by its place."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import v2

from data import batch_transforms as batched
from data.batch import Piece
from data.errors import DataError
from data.loading.device_transforms import DeviceTransforms
from data.loading.loader import Loader
from data.orders import Shuffled
from data.sources import Digits
from data.transforms import ProgressiveResize, Standardize, ToFloat
from data.updates import UpdateSampler

STEPS = {
    "crop": batched.RandomCrop(16, padding=2),
    "flip": batched.RandomHorizontalFlip(),
    "to_float": ToFloat(),
    "jitter": batched.ColorJitter(0.4, 0.4),
    "erase": batched.RandomErasing(),
    "dropped": None,
    "normalize": Standardize([0.3], [0.3]),
}


def _images(
    accumulation: int = 1, world: int = 1, steps: Any = STEPS, seed: int = 3, epoch: int = 0
) -> dict[int, Tensor]:
    """Sample index -> transformed image, over all ranks and micro-batches of an epoch."""
    digits = Digits("val")
    found = {}
    for rank in range(world):
        sampler = UpdateSampler(
            Shuffled(50, 1),
            batch_size=16,
            gradient_accumulation_steps=accumulation,
            rank=rank,
            world_size=world,
        )
        transforms = DeviceTransforms(steps, seed)
        loader = Loader(digits, sampler, seed=3, transforms=transforms)
        for micro in loader.epoch(epoch):
            kept = zip(micro.piece.indices[: micro.piece.count], micro.batch[0], strict=False)
            found |= dict(kept)
    return found


def _equal(one: dict[int, Tensor], other: dict[int, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[i], other[i]) for i in one)


@pytest.mark.parametrize(("accumulation", "world"), [(3, 1), (1, 2), (4, 3), (16, 2)])
def test_draws_do_not_depend_on_the_split(accumulation: int, world: int) -> None:
    whole = _images()
    assert len(whole) == 50
    assert _equal(_images(accumulation, world), whole)


def test_draws_change_with_seed_and_epoch() -> None:
    assert not _equal(_images(seed=4), _images(seed=3))
    assert not _equal(_images(epoch=1), _images(epoch=0))


def test_dropping_a_step_leaves_the_others_draws() -> None:
    alone = {name: STEPS[name] for name in ("crop", "to_float")}
    with_flips = {**alone, "flip": batched.RandomHorizontalFlip(p=0.0)}
    assert _equal(_images(steps=alone), _images(steps=with_flips))


def test_a_users_own_transform_draws_for_batches_only() -> None:
    class Noise:
        drawn = 0

        def draw(self, draws: Any, height: int, width: int) -> tuple[Tensor, ...]:
            self.drawn = max(self.drawn, len(draws))
            return (draws.uniform(each=height * width).view(-1, 1, height, width),)

        def __call__(self, images: Tensor, noise: Tensor) -> Tensor:
            return images + noise

    noise = Noise()
    DeviceTransforms({"noise": noise}, seed=3)(torch.zeros(4, 1, 8, 8), _piece(4))
    assert noise.drawn == 4


@pytest.mark.parametrize("normalize", [Standardize([0.3], [0.3]), None])
def test_what_a_step_may_overwrite_is_nobody_elses(normalize: Any) -> None:
    """Boxes are erased from what the standardization made; the data stay."""
    images = torch.rand(12, 3, 16, 16)
    before = images.clone()
    erase = batched.RandomErasing(p=1.0, value=9.0)
    found = DeviceTransforms({"normalize": normalize, "erase": erase}, seed=3)(images, _piece(12))
    assert torch.equal(images, before)
    assert (found == 9.0).any()
    assert not erase.in_place


def test_training_rng_is_untouched() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    _images(steps={**STEPS, "mix": v2.MixUp(num_classes=10)})
    assert torch.equal(torch.rand(2), expected)


def _piece(n: int, update: int = 0, micro_batch: int = 0) -> Piece:
    return Piece(tuple(range(n)), n, 0, n, micro_batch, 2, 0, update)


@pytest.mark.parametrize("kind", [v2.MixUp, v2.CutMix])
def test_mixing_is_torchvisions_keyed_by_place(kind: Any) -> None:
    images, labels = torch.rand(8, 3, 6, 6), torch.arange(8) % 4
    transforms = DeviceTransforms({"mix": kind(num_classes=4)}, seed=1)
    mixed, shares = transforms((images, labels), _piece(8))
    again = transforms((images, labels), _piece(8))
    assert torch.equal(mixed, again[0])
    assert torch.allclose(shares.sum(1), torch.ones(8))
    share = float(shares[0, 0])
    assert 0 <= share <= 1
    if kind is v2.MixUp:
        expected = images * share + images.roll(1, 0) * (1 - share)
        assert torch.allclose(mixed, expected, atol=1e-6)
    else:
        own = (mixed == images).all(1).float().mean()
        assert abs(float(own) - share) < 1e-6
    for place in (_piece(8, update=1), _piece(8, micro_batch=1)):
        assert not torch.equal(transforms((images, labels), place)[1], shares)


def test_a_random_choice_of_mixers_is_one() -> None:
    choice = v2.RandomChoice([v2.MixUp(num_classes=3), v2.CutMix(num_classes=3)])
    transforms = DeviceTransforms({"mix": choice}, seed=0)
    _, shares = transforms((torch.rand(6, 1, 4, 4), torch.tensor([0, 1, 2] * 2)), _piece(6))
    assert shares.shape == (6, 3)


def test_a_users_own_mixer_says_so() -> None:
    class Swap:
        mixes_samples = True

        def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            order = torch.randperm(len(inputs))
            return inputs[order], targets[order]

    swap = DeviceTransforms({"swap": Swap()}, seed=0)
    inputs = torch.arange(9.0)[:, None]
    mixed, targets = swap((inputs, torch.arange(9)), _piece(9))
    assert torch.equal(mixed[:, 0].long(), targets)
    assert not torch.equal(mixed, inputs)


@pytest.mark.parametrize(
    "transform", [v2.RandomHorizontalFlip(), v2.RandomErasing(), v2.RandAugment()]
)
def test_per_sample_transforms_are_refused_here(transform: Any) -> None:
    with pytest.raises(DataError, match=r"transforms\.device\.flip: Ra.*data\.batch_transforms"):
        DeviceTransforms({"flip": transform}, seed=0)


def test_images_grow_from_epoch_to_epoch() -> None:
    steps = {**STEPS, "grow": ProgressiveResize([6, 12, 16])}
    whole = _images(epoch=1)
    grown = _images(steps=steps, epoch=1)
    images, again = (torch.stack(list(found.values())) for found in (whole, grown))
    expected = interpolate(images, [12, 12], mode="bilinear", antialias=True)
    assert torch.allclose(again, expected, atol=1e-6)
    assert _equal(_images(4, 3, steps, epoch=1), grown)
    assert {image.shape for image in _images(steps=steps).values()} == {(1, 6, 6)}
    for epoch in (2, 9):  # the last size, here that of the images, holds from then on
        assert _equal(_images(steps=steps, epoch=epoch), _images(epoch=epoch))


@pytest.mark.parametrize("side", [5, 16, 20])
def test_bytes_are_resized_like_numbers_and_rounded(side: int) -> None:
    images = torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8)
    resized = ProgressiveResize([side]).of_epoch(3)
    assert resized(images).dtype == torch.uint8
    assert (resized(images) - resized(images.float())).abs().max() <= 1.1  # rounds twice


def test_sizes_have_to_be_some_pixels() -> None:
    for sizes in ([], [8, 0]):
        with pytest.raises(DataError, match="give a positive number of pixels for each epoch"):
            ProgressiveResize(sizes)


Pair = namedtuple("Pair", "image label")


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda x, y: (x, y), id="tuple"),
        pytest.param(lambda x, y: [x, y, "extra"], id="list"),
        pytest.param(lambda x, y: Pair(x, y), id="namedtuple"),
        pytest.param(lambda x, y: {"image": x, "label": y, "name": "n"}, id="dict"),
        pytest.param(lambda x, y: x, id="tensor"),
    ],
)
def test_batches_of_any_form_keep_it(wrap: Any) -> None:
    batch = wrap(torch.full((4, 1, 3, 3), 255, dtype=torch.uint8), torch.arange(4))
    result = DeviceTransforms({"to_float": ToFloat()}, seed=0)(batch, _piece(4))
    assert type(result) is type(batch)
    leaves = list(result.values()) if isinstance(result, dict) else list(result)
    first = result if isinstance(result, Tensor) else leaves[0]
    assert torch.equal(first, torch.ones(4, 1, 3, 3))
    assert isinstance(result, Tensor) or len(leaves) == len(batch)


def test_a_failing_step_is_named() -> None:
    transforms = DeviceTransforms({"mix": v2.MixUp(num_classes=None)}, seed=0)
    with pytest.raises(DataError, match=r"transforms\.device\.mix failed: .*num_classes"):
        transforms((torch.rand(2, 1, 2, 2), torch.arange(2)), _piece(2))
