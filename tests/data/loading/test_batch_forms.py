"""Transforms of whole batches: which, and that nothing but the configuration decides on it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torchvision.transforms import v2

from conf.check import parse
from data import batch_transforms as batched
from data.decode import quick_form
from data.errors import DataError
from data.keys import Draws
from data.loading.device_transforms import batch_form, check_per_sample, defer
from data.transforms import Mirrored, Pipeline, ProgressiveResize, Shifted, Standardize, ToFloat
from scripts.composition.compose import compose
from trainer.assembly.data import build_data
from trainer.assembly.experiment import eval_loader, train_loader

SCALED, PLAIN = ToFloat(), Standardize([0.5], [0.5])


@pytest.mark.parametrize(
    ("steps", "left"),
    [
        pytest.param([batched.RandomCrop(8, 2), SCALED, PLAIN], 0, id="all"),
        pytest.param([v2.RandomCrop(8, 2), batched.ColorJitter(0.1), SCALED], 1, id="part"),
        pytest.param([v2.RandomCrop(8), v2.RandAugment(), SCALED], 2, id="needs-single-images"),
        pytest.param([SCALED, PLAIN, Shifted(), Mirrored()], 0, id="views"),
        pytest.param([ProgressiveResize([8, 16]), SCALED], 0, id="of-an-epoch"),
        pytest.param([], 0, id="none"),
    ],
)
def test_the_last_steps_that_can_are_deferred(steps: list[Any], left: int) -> None:
    pipeline = Pipeline({str(number): step for number, step in enumerate(steps)})
    defer(pipeline, "train")
    assert list(pipeline.steps.values()) == steps[:left]
    assert list(pipeline.deferred) == [f"train.{number}" for number in range(left, len(steps))]
    check_per_sample(pipeline, "transforms.train")


def test_torchvisions_transforms_are_not_replaced() -> None:
    for step in (v2.RandomHorizontalFlip(), v2.RandomCrop(8), v2.RandomAffine(5)):
        assert batch_form(step) is None


def test_a_step_for_batches_takes_single_images_before_one_that_does() -> None:
    steps = {"flip": batched.RandomHorizontalFlip(), "nothing": v2.ColorJitter()}
    pipeline = Pipeline(steps)
    defer(pipeline, "train")
    check_per_sample(pipeline, "transforms.train")
    image = _pictures(torch.uint8)[0]
    torch.manual_seed(0)
    seen = [pipeline(image) for _ in range(20)]
    turned = sum(torch.equal(one, image.flip(-1)) for one in seen)
    assert 4 < turned < 16
    assert turned + sum(torch.equal(one, image) for one in seen) == 20
    torch.manual_seed(0)
    assert all(torch.equal(pipeline(image), one) for one in seen)


@pytest.mark.parametrize(
    "step",
    [
        batched.AlternatingFlip(),
        batched.RandomCrop(8, masks=True),
        ProgressiveResize([8]),
    ],
    ids=lambda step: type(step).__name__,
)
def test_what_single_images_cannot_have_is_refused(step: Any) -> None:
    pipeline = Pipeline({"step": step, "augment": v2.RandAugment()})
    defer(pipeline, "train")
    with pytest.raises(DataError, match=r"transforms\.train\.step: \w+ treats whole batches"):
        check_per_sample(pipeline, "transforms.train")


def _pictures(dtype: torch.dtype, side: int = 24) -> Tensor:
    shape = (37, 3, side, side)
    drawn = torch.randint(0, 256, shape, generator=Generator().manual_seed(1), dtype=torch.uint8)
    return drawn if dtype == torch.uint8 else drawn.to(dtype) / 255


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    "transform",
    [
        batched.RandomHorizontalFlip(),
        batched.RandomVerticalFlip(),
        batched.AlternatingFlip(),
        batched.RandomCrop(20, padding=3),
        batched.RandomCrop(20, padding=3, padding_mode="reflect"),
        batched.RandomErasing(0.5, value=[1.0, 2.0, 3.0]),
        batched.RandomResizedCrop(16),
        batched.RandomAffine(10, (0.1, 0.1), (0.9, 1.1)),
        batched.RandomAffine(10, interpolation="bilinear"),
        batched.ColorJitter(0.4, 0.4, 0.4),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_an_image_is_the_same_in_every_batch_to_the_bit(transform: Any, dtype: torch.dtype) -> None:
    images = _pictures(dtype)
    rows = transform.draw(Draws.seeded(37, 4), 24, 24)
    whole = transform(images, *rows)
    for part in (slice(0, 1), slice(3, 12), slice(36, 37)):
        assert torch.equal(transform(images[part], *(row[part] for row in rows)), whole[part])


@pytest.mark.parametrize("axis", [-1, -2])
def test_large_images_are_mirrored_as_small_ones(axis: int) -> None:
    flip = batched.RandomHorizontalFlip() if axis == -1 else batched.RandomVerticalFlip()
    images, which = _pictures(torch.uint8, 120), torch.arange(37) % 3 == 0
    mixed = [image.flip(axis) if w else image for image, w in zip(images, which, strict=True)]
    assert torch.equal(flip(images, which), torch.stack(mixed))


@pytest.mark.parametrize("size", [(20, 30), (300, 200)])
def test_the_quick_resized_crop_is_torchvisions_to_the_bit(size: tuple[int, int]) -> None:
    crop = v2.RandomResizedCrop(48)
    quick = quick_form(crop)
    image = torch.randint(
        0, 256, (3, *size), generator=Generator().manual_seed(2), dtype=torch.uint8
    )
    for seed in range(10):
        torch.manual_seed(seed)
        expected = crop(image)
        torch.manual_seed(seed)
        assert torch.equal(quick(image), expected)
    other = v2.RandomResizedCrop(48, antialias=False)
    assert quick_form(other) is other


def test_conversion_and_standardization_in_one_are_both_to_the_bit() -> None:
    both = Standardize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])
    for images in (_pictures(torch.uint8), _pictures(torch.float32)):
        before = images.clone()
        assert torch.equal(both.after(SCALED)(images), both(SCALED(images)))
        assert torch.equal(images, before)


@pytest.mark.parametrize("channels", [1, 3])
def test_no_value_of_a_byte_is_rounded_otherwise(channels: int) -> None:
    """Against the plain formula; sizes with a rest beside whole vector registers."""
    generator = Generator().manual_seed(channels)
    every = torch.arange(256, dtype=torch.uint8).repeat(channels, 1)
    for _ in range(50):
        mean, std = (torch.rand(channels, generator=generator) + 0.01 for _ in range(2))
        step = Standardize(mean.tolist(), std.tolist()).after(SCALED)
        for images in (every.view(channels, 16, 16), every.view(1, channels, 256, 1)[:, :, :253]):
            floats = images.to(torch.float32) / 255
            expected = (floats - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
            assert torch.equal(step(images), expected)


def _seen(
    tree: Path, *words: str, accumulation: int = 1, world: int = 1, workers: int = 0
) -> dict[int, Tensor]:
    """Sample -> what the network sees, over all ranks and micro-batches of epoch 1."""
    config = parse(
        compose(
            [
                "experiment=resnet18",
                "data=image_folder",
                f"data.root={tree}",
                "data.image_size=12",
                "data.val_fraction=0",
                "loader.batch_size=8",
                f"loader.num_workers={workers}",
                f"trainer.gradient_accumulation_steps={accumulation}",
                *words,
            ]
        ).config
    )
    found: dict[int, Tensor] = {}
    for rank in range(world):
        group = SimpleNamespace(rank=rank, world_size=world)
        strategy: Any = SimpleNamespace(group=group, device=torch.device("cpu"))
        loader = train_loader(config, build_data(config, ("train",)), strategy)
        for micro in loader.epoch(1):
            found |= dict(
                zip(micro.piece.indices[: micro.piece.count], micro.batch[0], strict=False)
            )
        loader.close()
    return found


@pytest.mark.parametrize("sizes", ["one-size", "sizes-differ"])
def test_neither_cache_nor_workers_nor_the_split_change_a_bit(
    picture_tree: Path, write_image: Any, sizes: str
) -> None:
    if sizes == "sizes-differ":
        write_image(picture_tree / "train" / "cat" / "wide.png", size=(19, 12))
        write_image(picture_tree / "train" / "dog" / "tall.png", size=(11, 23))
    words = ("transforms=crop_flip",)
    expected = _seen(picture_tree, *words)
    assert len(expected) == (16 if sizes == "one-size" else 18)
    others = [
        _seen(picture_tree, *words, accumulation=3),
        _seen(picture_tree, *words, world=2, accumulation=2),
        _seen(picture_tree, *words, "data.cache=ram"),
        _seen(picture_tree, *words, "data.cache=disk", workers=1),
    ]
    for seen in others:
        assert seen.keys() == expected.keys()
        assert all(torch.equal(seen[index], expected[index]) for index in expected)


def test_sizes_that_stay_different_are_told(picture_tree: Path, write_image: Any) -> None:
    write_image(picture_tree / "train" / "cat" / "wide.png", size=(19, 12))
    with pytest.raises(DataError, match=r"differ in size \(10 x 12, 12 x 19\): see transforms"):
        _seen(picture_tree, "transforms=basic")


def test_a_collate_function_of_ones_own_gets_transformed_samples(picture_tree: Path) -> None:
    node = "loader.collate_fn={_target_: torch.utils.data.default_collate, _partial_: true}"
    seen = _seen(picture_tree, "transforms=crop_flip", node)
    assert {image.dtype for image in seen.values()} == {torch.float32}


def test_evaluation_standardizes_batches_as_samples(picture_tree: Path) -> None:
    words = ["experiment=resnet18", "data=image_folder", f"data.root={picture_tree}"]
    config = parse(compose([*words, "data.image_size=8"]).config)
    data = build_data(config, ("test",))
    pipeline = data.sets["test"].transform
    assert list(pipeline.steps) == ["resize", "crop"]
    steps = Pipeline({**pipeline.steps, **pipeline.deferred})
    group = SimpleNamespace(rank=0, world_size=1)
    strategy: Any = SimpleNamespace(group=group, device=torch.device("cpu"))
    loader = eval_loader(config, data.sets["test"], strategy)
    images = torch.cat([micro.batch[0] for micro in loader.epoch(0)])
    raw = build_data(config, ("test",)).sets["test"]
    raw.transform = steps
    assert torch.equal(images, torch.stack([raw[index][0] for index in range(len(raw))]))
