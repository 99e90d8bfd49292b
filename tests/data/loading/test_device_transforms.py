"""Batches on their device, and transforms of whole ones: the same whatever the split."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import Generator
from torch.nn.functional import interpolate
from torchvision.transforms import v2

from regimen.data import batch_transforms as batched
from regimen.data.batch import BatchSlice, to_device
from regimen.data.errors import DataError
from regimen.data.loading.device_transforms import DeviceTransforms, check_per_sample, defer
from regimen.data.loading.fetch import collate
from regimen.data.loading.loader import Loader
from regimen.data.orders import Shuffled
from regimen.data.samplers import UpdateSampler
from regimen.data.sources import Digits
from regimen.data.transforms import (
    Mirrored,
    Pipeline,
    ProgressiveResize,
    Shifted,
    Standardize,
    ToFloat,
)
from toys import leaves

STEPS = {
    "crop": batched.RandomCrop(16, padding=2),
    "flip": batched.RandomHorizontalFlip(),
    "to_float": ToFloat(),
    "jitter": batched.ColorJitter(0.4, 0.4),
    "erase": batched.RandomErasing(),
    "dropped": None,
    "normalize": Standardize([0.3], [0.3]),
}


def _counted(micro):
    """Return (sample, what the network sees) of a micro-batch, without the borrowed samples."""
    batch_slice = micro.batch_slice
    inputs = micro.batch[0]
    return zip(batch_slice.indices[: batch_slice.count], inputs, strict=False)


def _images(accumulation=1, world=1, steps=STEPS, seed=3, epoch=0):
    """Sample index -> transformed image, over all ranks and micro-batches of an epoch."""
    digits = Digits("val")
    found = {}
    for rank in range(world):
        cut = {"gradient_accumulation_steps": accumulation, "world_size": world, "rank": rank}
        sampler = UpdateSampler(Shuffled(50, 1), batch_size=16, **cut)
        loader = Loader(digits, sampler, seed=3, transforms=DeviceTransforms(steps, seed))
        for micro in loader.epoch(epoch):
            found |= dict(_counted(micro))
    return found


def _equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[i], other[i]) for i in one)


@pytest.mark.parametrize(("accumulation", "world"), [(3, 1), (1, 2), (4, 3), (16, 2)])
def test_draws_do_not_depend_on_the_split(accumulation, world):
    whole = _images()

    assert len(whole) == 50
    assert _equal(_images(accumulation, world), whole)


def test_draws_depend_on_seed_and_epoch():
    whole = _images()

    assert not _equal(_images(seed=4), whole)
    assert not _equal(_images(epoch=1), whole)


def test_dropping_a_step_leaves_the_others_draws():
    alone = {"crop": STEPS["crop"], "to_float": STEPS["to_float"]}
    with_flips = {**alone, "flip": batched.RandomHorizontalFlip(p=0.0)}

    assert _equal(_images(steps=alone), _images(steps=with_flips))


def _batch_slice(n, update=0, micro_batch=0):
    return BatchSlice(tuple(range(n)), n, 0, n, micro_batch, 2, 0, update)


@pytest.mark.parametrize(
    "transform", [v2.RandomHorizontalFlip(), v2.RandomErasing(), v2.RandAugment()]
)
def test_per_sample_transforms_are_refused_here(transform):
    with pytest.raises(DataError, match=r"transforms\.device\.flip: Ra.*data\.batch_transforms"):
        DeviceTransforms({"flip": transform}, seed=0)


def test_each_step_draws_by_its_name():
    flip = batched.RandomHorizontalFlip()

    assert not _equal(_images(steps={"one": flip}), _images(steps={"other": flip}))


@pytest.fixture
def colour():
    """Eight pictures, and their labels of four classes."""
    images = torch.rand(8, 3, 6, 6)
    labels = torch.arange(8) % 4
    return images, labels


def test_mixup_is_torchvisions(colour):
    images, _ = colour
    transforms = DeviceTransforms({"mix": v2.MixUp(num_classes=4)}, seed=1)

    mixed, targets = transforms(colour, _batch_slice(8))

    assert torch.allclose(targets.sum(1), torch.ones(8))
    share = float(targets[0, 0])
    assert 0 <= share <= 1
    expected = images * share + images.roll(1, 0) * (1 - share)
    assert torch.allclose(mixed, expected, atol=1e-6)


def test_cutmix_is_torchvisions(colour):
    images, _ = colour
    transforms = DeviceTransforms({"mix": v2.CutMix(num_classes=4)}, seed=1)

    mixed, targets = transforms(colour, _batch_slice(8))

    assert torch.allclose(targets.sum(1), torch.ones(8))
    share = float(targets[0, 0])
    assert 0 <= share <= 1
    is_own_pixel = (mixed == images).all(1)
    assert abs(float(is_own_pixel.float().mean()) - share) < 1e-6


@pytest.mark.parametrize("kind", [v2.MixUp, v2.CutMix])
def test_mixing_is_keyed_by_the_place_of_the_batch(kind, colour):
    transforms = DeviceTransforms({"mix": kind(num_classes=4)}, seed=1)
    before = torch.get_rng_state()

    mixed, targets = transforms(colour, _batch_slice(8))

    assert torch.equal(torch.get_rng_state(), before)
    again, _ = transforms(colour, _batch_slice(8))
    assert torch.equal(mixed, again)
    _, at_next_update = transforms(colour, _batch_slice(8, update=1))
    assert not torch.equal(at_next_update, targets)
    _, in_next_micro_batch = transforms(colour, _batch_slice(8, micro_batch=1))
    assert not torch.equal(in_next_micro_batch, targets)


def test_images_grow_from_epoch_to_epoch():
    steps = {**STEPS, "grow": ProgressiveResize([6, 12, 16])}

    first = _images(steps=steps, epoch=0)
    second = _images(steps=steps, epoch=1)

    assert {image.shape for image in first.values()} == {(1, 6, 6)}
    images = torch.stack(list(_images(epoch=1).values()))
    expected = interpolate(images, [12, 12], mode="bilinear", antialias=True)
    grown = torch.stack(list(second.values()))
    assert torch.allclose(grown, expected, atol=1e-6)
    assert _equal(_images(4, 3, steps, epoch=1), second)
    for epoch in (2, 9):  # the last size, here that of the images, holds from then on
        assert _equal(_images(steps=steps, epoch=epoch), _images(epoch=epoch))


Pair = namedtuple("Pair", "image label")


WRAPS = [
    lambda x, y: (x, y),
    lambda x, y: [x, y, "extra"],
    Pair,
    lambda x, y: {"image": x, "label": y, "name": "n"},
    lambda x, y: x,
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_batches_of_any_form_keep_it(wrap):
    images = torch.full((4, 1, 3, 3), 255, dtype=torch.uint8)
    batch = wrap(images, torch.arange(4))

    result = DeviceTransforms({"to_float": ToFloat()}, seed=0)(batch, _batch_slice(4))

    assert type(result) is type(batch)
    (_, first), *others = leaves(result)
    assert torch.equal(first, torch.ones(4, 1, 3, 3))
    assert len(others) == len(list(leaves(batch))) - 1


SCALED = ToFloat()
PLAIN = Standardize([0.5], [0.5])


@pytest.mark.parametrize(
    ("steps", "left"),
    [
        ([batched.RandomCrop(8, 2), SCALED, PLAIN], 0),
        ([v2.RandomCrop(8, 2), batched.ColorJitter(0.1), SCALED], 1),
        ([v2.RandomCrop(8), v2.RandAugment(), SCALED], 2),
        ([SCALED, PLAIN, Shifted(), Mirrored()], 0),
        ([ProgressiveResize([8, 16]), SCALED], 0),
        ([], 0),
    ],
)
def test_the_last_steps_that_can_are_deferred(steps, left):
    pipeline = Pipeline({str(number): step for number, step in enumerate(steps)})
    defer(pipeline, "train")
    assert list(pipeline.steps.values()) == steps[:left]
    assert list(pipeline.deferred) == [f"train.{number}" for number in range(left, len(steps))]
    check_per_sample(pipeline, "transforms.train")


@pytest.mark.parametrize(
    "step", [batched.AlternatingFlip(), batched.RandomCrop(8, masks=True), ProgressiveResize([8])]
)
def test_a_step_for_whole_batches_is_refused_before_one_for_single_images(step):
    pipeline = Pipeline({"step": step, "augment": v2.RandAugment()})
    defer(pipeline, "train")
    with pytest.raises(DataError, match=r"transforms\.train\.step: \w+ treats whole batches"):
        check_per_sample(pipeline, "transforms.train")


@pytest.mark.parametrize("channels", [1, 3])
def test_no_value_of_a_byte_is_rounded_otherwise(channels):
    """Against the plain formula; sizes with a rest beside whole vector registers."""
    generator = Generator().manual_seed(channels)
    every = torch.arange(256, dtype=torch.uint8).repeat(channels, 1)
    picture = every.view(channels, 16, 16)
    batch = every.view(1, channels, 256, 1)[:, :, :253]
    for _ in range(50):
        mean = torch.rand(channels, generator=generator) + 0.01
        std = torch.rand(channels, generator=generator) + 0.01
        step = Standardize(mean.tolist(), std.tolist()).after(SCALED)
        for images in (picture, batch):
            scaled = images.to(torch.float32) / 255
            expected = (scaled - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
            assert torch.equal(step(images), expected)


def _words(tree, *more):
    return [
        "experiment=resnet18",
        "data=image_folder",
        f"data.root={tree}",
        "data.image_size=12",
        "data.val_fraction=0",
        "loader.batch_size=8",
        "loader.num_workers=0",
        *more,
    ]


@pytest.fixture
def mixed_tree(picture_tree, write_image):
    """The tree of pictures, with two of other sizes."""
    write_image(picture_tree / "train" / "cat" / "wide.png", size=(19, 12))
    write_image(picture_tree / "train" / "dog" / "tall.png", size=(11, 23))
    return picture_tree


def test_pictures_of_several_sizes_need_a_transform_that_resizes(mixed_tree, seen):
    words = _words(mixed_tree, "transforms=basic", "loader.batch_size=18")
    with pytest.raises(DataError, match=r"differ in size \(10 x 12, 12 x 19.*\): see transf"):
        seen(*words)


def _assert_seen_alike(seen, words, samples):
    """Compare what a network sees with other caches, workers and splits."""
    expected = seen(*words)
    assert len(expected) == samples
    others = [
        seen(*words, "trainer.gradient_accumulation_steps=3"),
        seen(*words, "trainer.gradient_accumulation_steps=2", world=2),
        seen(*words, "data.cache=ram"),
        seen(*words, "data.cache=disk", "loader.num_workers=1"),
        seen(*words, "data.cache=device"),
    ]
    for other in others:
        assert _equal(other, expected)


HOST_MEMORY = "ImageFolder stays in host memory: images of"


def test_neither_cache_nor_workers_nor_the_split_change_a_bit(picture_tree, seen, caplog):
    words = _words(picture_tree, "transforms=crop_flip")

    _assert_seen_alike(seen, words, samples=16)

    assert HOST_MEMORY not in caplog.text


def test_with_several_sizes_neither_cache_nor_workers_nor_the_split_change_a_bit(
    mixed_tree, seen, caplog
):
    words = _words(mixed_tree, "transforms=crop_flip")

    _assert_seen_alike(seen, words, samples=18)

    assert HOST_MEMORY in caplog.text


def test_a_collate_function_of_ones_own_gets_transformed_samples(picture_tree, seen):
    node = "loader.collate_fn={_target_: torch.utils.data.default_collate, _partial_: true}"

    found = seen(*_words(picture_tree, "transforms=crop_flip"), node)

    assert {image.dtype for image in found.values()} == {torch.float32}


def test_batches_keep_the_types_that_hold_their_samples():
    pair = Pair(torch.ones(2), 3)
    sample = {"pair": pair, "tuple": (1.5, np.float32(2)), "list": [1, "name"], "none": None}

    batch = collate([sample, sample, sample])
    on_meta = to_device(batch, torch.device("meta"))

    assert batch["pair"].label.tolist() == [3, 3, 3]
    assert batch["tuple"][0].dtype == torch.float64
    for held in (batch, on_meta):
        assert isinstance(held["pair"], Pair)
        assert isinstance(held["tuple"], tuple)
        assert held["pair"].image.shape == (3, 2)
        assert held["none"] is None
        assert held["list"][1] == ["name"] * 3
    assert on_meta["pair"].image.is_meta


CROP = "transforms=crop_flip"
REPEATED = {
    "balanced": ["+loader/sampler=balanced", "loader.sampler.num_samples=90"],
    "replacement": ["+loader/sampler=torch_random", "loader.sampler.num_samples=90"],
    "per-class": ["+loader/batch_sampler=per_class", "loader.batch_sampler.classes=2"],
}


def _drawn(built, *words, world=1):
    """(update, position in it) -> the draw and what the network sees, of an epoch's second half."""
    found = {}
    for rank in range(world):
        loader, *_ = built(*words, rank=rank, world=world)
        for micro in loader.epoch(1, len(loader) // 2):
            batch_slice = micro.batch_slice
            draws = batch_slice.draws()[: batch_slice.count]
            pairs = zip(draws, micro.batch[0], strict=False)
            for place, pair in enumerate(pairs, batch_slice.start):
                found[batch_slice.update, place] = pair
        loader.close()
    return found


@pytest.mark.parametrize("sampler", REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize(
    "transforms",
    [CROP, "transforms=on_device", "transforms=randaugment"],
    ids=["deferred", "device", "per-sample"],
)
def test_a_sample_drawn_again_is_another_picture_whatever_the_cache(
    picture_tree, built, sampler, transforms
):
    words = _words(picture_tree, transforms, *sampler)
    is_per_sample = transforms == "transforms=randaugment"
    # What is drawn per sample is drawn in workers, and needs samples in host memory.
    workers = "loader.num_workers=1" if is_per_sample else "loader.num_workers=0"
    caches = ["ram", "disk"] if is_per_sample else ["ram", "disk", "device"]

    expected = _drawn(built, *words)
    others = [_drawn(built, *words, "trainer.gradient_accumulation_steps=3", world=2)]
    for cache in caches:
        others.append(_drawn(built, *words, f"data.cache={cache}", workers))

    shown = {}
    for draw, image in expected.values():
        shown.setdefault(draw, image)
        assert torch.equal(shown[draw], image)
    sample, occurrence = max(shown, key=lambda draw: draw[1])
    assert occurrence > 0
    pictures = [image for (index, _), image in shown.items() if index == sample]
    assert len(_different(pictures)) > 1
    for found in others:
        assert found.keys() == expected.keys()
        for place, (draw, image) in expected.items():
            found_draw, found_image = found[place]
            assert found_draw == draw
            assert torch.equal(found_image, image)


def _different(images):
    return {image.numpy().tobytes() for image in images}


@pytest.mark.parametrize(
    "step",
    [
        batched.RandomCrop(8, padding=4),
        batched.RandomHorizontalFlip(),
        batched.AlternatingFlip(),
        batched.RandomErasing(1.0),
        batched.RandomResizedCrop(8),
        batched.RandomAffine(20, (0.2, 0.2)),
        batched.ColorJitter(0.4, 0.4),
    ],
    ids=lambda step: type(step).__name__,
)
def test_every_step_draws_anew_for_a_later_occurrence(step):
    images = torch.rand(1, 3, 8, 8).expand(64, -1, -1, -1).contiguous()
    # Samples 5 and 9, each drawn 32 times.
    occurrences = tuple(range(32)) * 2
    batch_slice = BatchSlice((5,) * 32 + (9,) * 32, 64, 0, 64, 0, 1, 0, 0, occurrences)
    transforms = DeviceTransforms({"step": step}, seed=1)

    whole = transforms(images, batch_slice)

    assert len(_different(whole[:32])) > 1
    assert not torch.equal(whole[:32], whole[32:])
    for number, (index, occurrence) in enumerate(batch_slice.draws()):
        alone = BatchSlice((index,), 1, 0, 1, 0, 1, 0, 0, (occurrence,))
        (image,) = transforms(images[:1], alone)
        assert torch.equal(image, whole[number])
    unrepeated = BatchSlice((5, 9), 2, 0, 2, 0, 1, 0, 0)
    assert torch.equal(transforms(images[:2], unrepeated), whole[[0, 32]])
