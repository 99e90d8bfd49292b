"""Batched transforms against torchvision's per-sample forms: the same pixels, the same chances."""

from typing import Any

import pytest
import torch
from scipy.stats import ks_2samp
from torch import Generator, Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from data import batch_transforms as batched
from data.errors import DataError
from data.keys import Draws, keys

N = 1500
HEIGHT, WIDTH = 12, 16


def _pictures(samples: int, channels: int = 3, dtype: torch.dtype = torch.uint8) -> Tensor:
    shape = (samples, channels, HEIGHT, WIDTH)
    drawn = torch.randint(0, 256, shape, generator=Generator().manual_seed(1), dtype=torch.uint8)
    return drawn if dtype == torch.uint8 else drawn.to(dtype) / 255


def _coordinates() -> Tensor:
    """An image that says of each pixel where it comes from, and that it is one."""
    rows = torch.arange(1.0, HEIGHT + 1)[:, None].expand(HEIGHT, WIDTH)
    columns = torch.arange(1.0, WIDTH + 1).expand(HEIGHT, WIDTH)
    return torch.stack([rows, columns, torch.ones(HEIGHT, WIDTH)])


def _draw(transform: Any, samples: int, seed: int = 0) -> Any:
    return transform.draw(Draws(keys(range(samples), seed)), HEIGHT, WIDTH)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("padding_mode", ["constant", "reflect", "edge"])
def test_crop_cuts_the_drawn_windows(dtype: torch.dtype, padding_mode: str) -> None:
    images = _pictures(20, dtype=dtype)
    crop = batched.RandomCrop((9, 14), padding=2, padding_mode=padding_mode)
    top, left = _draw(crop, 20)
    padded = F.pad(images, [2], padding_mode=padding_mode)
    expected = [F.crop(padded[i], int(top[i]), int(left[i]), 9, 14) for i in range(20)]
    assert torch.equal(crop(images, top, left), torch.stack(expected))
    with pytest.raises(DataError, match="does not fit into images of 12 x 16"):
        _draw(batched.RandomCrop(20, padding=1), 2)


@pytest.mark.parametrize(("name", "function"), [("Horizontal", F.hflip), ("Vertical", F.vflip)])
def test_flip_mirrors_the_drawn_images_and_masks(name: str, function: Any) -> None:
    images = _pictures(20)
    flip = getattr(batched, f"Random{name}Flip")(p=0.4, masks=True)
    (drawn,) = _draw(flip, 20)
    expected = torch.stack([function(images[i]) if drawn[i] else images[i] for i in range(20)])
    assert 0 < drawn.sum() < 20
    assert torch.equal(flip(images, drawn), expected)
    assert torch.equal(flip(images.bfloat16(), drawn), expected.bfloat16())
    flip.in_place = True  # as where nobody else has the images
    assert torch.equal(flip.on_masks(images[:, 0], drawn), expected[:, 0])
    assert torch.equal(images, _pictures(20))
    assert flip(images, drawn) is images
    assert torch.equal(images, expected)


def test_an_alternating_flip_shows_each_image_both_ways_in_two_epochs() -> None:
    flip, images = batched.AlternatingFlip(), _pictures(40)
    seen = [
        flip(images, *flip.draw(Draws(keys(range(40), 1), epoch), HEIGHT, WIDTH))
        for epoch in range(3)
    ]
    assert torch.equal(seen[0], seen[1].flip(-1))
    assert torch.equal(seen[0], seen[2])
    turned = [bool((a != b).any()) for a, b in zip(seen[0], images, strict=True)]
    assert 8 < sum(turned) < 32


def test_crop_treats_masks_alike_with_their_own_fill() -> None:
    crop = batched.RandomCrop(10, padding=3, fill=7, masks=True, mask_fill=99)
    draws = _draw(crop, 30)
    cut = crop(torch.zeros(30, 1, HEIGHT, WIDTH), *draws)
    mask = crop.on_masks(torch.zeros(30, HEIGHT, WIDTH, dtype=torch.long), *draws)
    assert mask.shape == (30, 10, 10)
    assert torch.equal(cut[:, 0] == 7, mask == 99)
    assert (mask == 99).any()


@pytest.mark.parametrize("value", [5.0, [1.0, 2.0, 3.0]])
def test_erasing_overwrites_the_drawn_boxes(value: Any) -> None:
    images = _pictures(40, dtype=torch.float32)
    erasing = batched.RandomErasing(p=0.7, value=value)
    top, left, tall, wide = _draw(erasing, 40)
    fill = torch.tensor(value).view(-1, 1, 1)
    expected = [
        F.erase(images[n], int(i), int(j), int(h), int(w), fill) if h else images[n]
        for n, (i, j, h, w) in enumerate(zip(top, left, tall, wide, strict=True))
    ]
    assert 0 < (tall == 0).sum() < 40
    assert torch.equal(erasing(images, top, left, tall, wide), torch.stack(expected))
    erasing.in_place = True  # as where nobody else has the images
    assert erasing(images, top, left, tall, wide) is images
    assert torch.equal(images, torch.stack(expected))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_affine_is_torchvisions(interpolation: str) -> None:
    images = _pictures(30, dtype=torch.float32)
    affine = batched.RandomAffine(20, (0.2, 0.1), (0.8, 1.3), interpolation)
    angle, x, y, by = _draw(affine, 30)
    expected = [
        F.affine(
            images[n],
            float(angle[n]) * 180 / torch.pi,
            [int(x[n]), int(y[n])],
            float(by[n]),
            [0.0, 0.0],
            interpolation=v2.InterpolationMode(interpolation),
        )
        for n in range(30)
    ]
    difference = (affine(images, angle, x, y, by) - torch.stack(expected)).abs()
    # Rounding to the nearest pixel may fall to either side.
    assert (difference > 1e-4).float().mean() < 0.002


def test_resized_crop_is_torchvisions_without_antialias() -> None:
    images = _pictures(30, dtype=torch.float32)
    crop = batched.RandomResizedCrop((12, 10))
    top, left, tall, wide = _draw(crop, 30)
    result = crop(images, top, left, tall, wide)
    for n in range(30):
        box = (int(top[n]), int(left[n]), int(tall[n]), int(wide[n]))
        expected = F.resized_crop(images[n], *box, [12, 10], antialias=False)
        # Inside: at a box's edge we read its neighbours, torchvision does not.
        assert torch.allclose(result[n, :, 2:-2, 2:-2], expected[:, 2:-2, 2:-2], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_jitter_is_torchvisions_in_the_drawn_order(dtype: torch.dtype) -> None:
    images = _pictures(30, dtype=dtype)
    jitter = batched.ColorJitter(0.4, 0.5, 0.6)
    factors, order = _draw(jitter, 30)
    functions = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)
    expected = []
    for n in range(30):
        image = images[n]
        for turn in order[n].tolist():
            image = functions[turn](image, float(factors[n, turn]))
        expected.append(image)
    difference = (jitter(images, factors, order).float() - torch.stack(expected).float()).abs()
    # In 8 bits a rounding may fall to either side, and the next step may enlarge that.
    assert difference.max() <= (3 if dtype == torch.uint8 else 1e-5)
    assert (difference > 1e-5).float().mean() < 0.001
    assert len(order.unique(dim=0)) == 6


def _features(images: Tensor) -> Tensor:
    """Numbers that tell where pixels came from and how many there are (n, features)."""
    middle = images[:, :, images.shape[-2] // 2, images.shape[-1] // 2]
    corner = images[:, :, 1, 2]
    return torch.cat([middle, corner, images.sum((-1, -2))], 1)


@pytest.mark.parametrize(
    ("name", "options", "others"),
    [
        ("RandomHorizontalFlip", {"p": 0.3}, {}),
        ("RandomVerticalFlip", {"p": 0.3}, {}),
        ("RandomCrop", {"size": (10, 13), "padding": 3}, {}),
        ("RandomErasing", {"p": 0.6}, {}),
        ("RandomErasing", {"p": 1.0, "scale": (0.5, 1.5)}, {"scale": (0.5, 1.0)}),
        ("RandomResizedCrop", {"size": (8, 8)}, {"antialias": False}),
        ("RandomAffine", {"degrees": 30, "translate": (0.1, 0.2), "scale": (0.7, 1.2)}, {}),
        ("ColorJitter", {"brightness": 0.8}, {}),
    ],
)
def test_batched_form_has_the_distribution_of_the_per_sample_form(
    name: str, options: dict[str, Any], others: dict[str, Any]
) -> None:
    ours, theirs = getattr(batched, name)(**options), getattr(v2, name)(**{**options, **others})
    picture = torch.full((1, HEIGHT, WIDTH), 0.5) if name == "ColorJitter" else _coordinates()
    many = picture.expand(N, *picture.shape)
    one = _features(ours(many, *_draw(ours, N, seed=11)))
    torch.manual_seed(12)
    other = _features(torch.stack([theirs(picture) for _ in range(N)]))
    chances = [
        ks_2samp(one[:, i].round(decimals=2), other[:, i].round(decimals=2)).pvalue
        for i in range(one.shape[1])
    ]
    assert min(chances) < 1e-6 if "scale" in others else min(chances) > 1e-3  # negative control
