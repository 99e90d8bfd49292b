"""Batched transforms against torchvision's per-sample forms: the same pixels, the same chances."""

import copy

import pytest
import torch
from scipy.stats import ks_2samp
from torch import Generator
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from regimen.data import batch_transforms as batched
from regimen.data.errors import DataError
from regimen.data.keys import Draws, keys

N = 1500
HEIGHT, WIDTH = 12, 16


def _pictures(samples, dtype=torch.uint8):
    shape = (samples, 3, HEIGHT, WIDTH)
    drawn = torch.randint(0, 256, shape, generator=Generator().manual_seed(1), dtype=torch.uint8)
    return drawn if dtype == torch.uint8 else drawn.to(dtype) / 255


def _coordinates():
    """An image that says of each pixel where it comes from, and that it is one."""
    rows = torch.arange(1.0, HEIGHT + 1)[:, None].expand(HEIGHT, WIDTH)
    columns = torch.arange(1.0, WIDTH + 1).expand(HEIGHT, WIDTH)
    return torch.stack([rows, columns, torch.ones(HEIGHT, WIDTH)])


def _draw(transform, samples, seed=0):
    return transform.draw(Draws(keys(range(samples), seed)), HEIGHT, WIDTH)


def _windows(mode):
    def window(image, top, left):
        return F.crop(F.pad(image, [2], padding_mode=mode), int(top), int(left), 9, 14)

    return batched.RandomCrop((9, 14), padding=2, padding_mode=mode), window


def _flips(name, mirror):
    flip = getattr(batched, f"Random{name}Flip")(p=0.4, masks=True)
    return flip, lambda image, drawn: mirror(image) if drawn else image


def _erased(value):
    fill = torch.tensor(value).view(-1, 1, 1)

    def erased(image, *box):
        return F.erase(image, *map(int, box), fill) if box[2] else image

    return batched.RandomErasing(p=0.7, value=value), erased


def _moved(interpolation):
    mode = v2.InterpolationMode(interpolation)

    def moved(image, angle, x, y, by):
        degrees = float(angle) * 180 / torch.pi
        place = [int(x), int(y)]
        return F.affine(image, degrees, place, float(by), [0.0, 0.0], interpolation=mode)

    return batched.RandomAffine(20, (0.2, 0.1), (0.8, 1.3), interpolation), moved


def _resized():
    def resized(image, *box):
        return F.resized_crop(image, *map(int, box), [12, 10], antialias=False)

    return batched.RandomResizedCrop((12, 10)), resized


def _coloured():
    functions = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)

    def coloured(image, factors, order):
        for turn in order.tolist():
            image = functions[turn](image, float(factors[turn]))
        return image

    return batched.ColorJitter(0.4, 0.5, 0.6), coloured


BYTES = torch.uint8
FLOATS = torch.float32


@pytest.mark.parametrize(
    ("pair", "dtypes", "largest", "share"),
    [
        pytest.param(_windows("constant"), [BYTES, FLOATS], 0, 0, id="crop"),
        pytest.param(_windows("reflect"), [BYTES, FLOATS], 0, 0, id="crop-reflect"),
        pytest.param(_windows("edge"), [BYTES, FLOATS], 0, 0, id="crop-edge"),
        pytest.param(_flips("Horizontal", F.hflip), [BYTES, torch.bfloat16], 0, 0, id="mirror"),
        pytest.param(_flips("Vertical", F.vflip), [BYTES, torch.bfloat16], 0, 0, id="flip"),
        pytest.param(_erased(5.0), [FLOATS], 0, 0, id="erase"),
        pytest.param(_erased([1.0, 2.0, 3.0]), [FLOATS], 0, 0, id="erase-colour"),
        # Rounding to the nearest pixel may fall to either side.
        pytest.param(_moved("nearest"), [FLOATS], 1, 0.002, id="affine"),
        pytest.param(_moved("bilinear"), [FLOATS], 1, 0.002, id="affine-bilinear"),
        pytest.param(_resized(), [FLOATS], 1e-4, 0, id="resized-crop"),
        pytest.param(_coloured(), [FLOATS], 1e-5, 0, id="jitter"),
        # In 8 bits a rounding may fall to either side, and the next step may enlarge that.
        pytest.param(_coloured(), [BYTES], 3, 0.001, id="jitter-8-bits"),
    ],
)
def test_each_image_is_torchvisions_for_what_was_drawn_and_the_same_in_every_batch(
    pair, dtypes, largest, share
):
    transform, one = pair
    for dtype in dtypes:
        images = _pictures(40, dtype=dtype)
        draws = _draw(transform, 40)
        result = transform(images, *draws)
        expected = torch.stack([one(images[n], *(d[n] for d in draws)) for n in range(40)])
        difference = (result.float() - expected.float()).abs()
        if isinstance(transform, batched.RandomResizedCrop):
            # Inside: at a box's edge we read its neighbours, torchvision does not.
            difference = difference[..., 2:-2, 2:-2]
        assert difference.max() <= largest
        assert (difference > 1e-4).float().mean() <= share
        assert torch.equal(images, _pictures(40, dtype=dtype))
        if hasattr(transform, "in_place"):  # as where nobody else has the images
            alone = copy.copy(transform)
            alone.in_place = True
            if hasattr(alone, "on_masks"):
                assert torch.equal(alone.on_masks(images[:, 0], *draws), expected[:, 0])
            held = alone(images, *draws)
            assert torch.equal(held, expected)
            assert held is images or dtype == torch.bfloat16
    for dtype in (BYTES, FLOATS):
        images = _pictures(40, dtype)
        draws = _draw(transform, 40)
        whole = transform(images, *draws)
        for part in (slice(0, 1), slice(3, 12), slice(39, 40)):
            assert torch.equal(transform(images[part], *(row[part] for row in draws)), whole[part])


def test_an_alternating_flip_shows_each_image_both_ways_in_two_epochs():
    flip = batched.AlternatingFlip()
    images = _pictures(40)
    seen = [
        flip(images, *flip.draw(Draws(keys(range(40), 1), epoch), HEIGHT, WIDTH))
        for epoch in range(3)
    ]
    assert torch.equal(seen[0], seen[1].flip(-1))
    assert torch.equal(seen[0], seen[2])
    turned = [bool((a != b).any()) for a, b in zip(seen[0], images, strict=True)]
    assert 8 < sum(turned) < 32


def test_crop_treats_masks_alike_with_their_own_fill():
    crop = batched.RandomCrop(10, padding=3, fill=7, masks=True, mask_fill=99)
    draws = _draw(crop, 30)
    cut = crop(torch.zeros(30, 1, HEIGHT, WIDTH), *draws)
    mask = crop.on_masks(torch.zeros(30, HEIGHT, WIDTH, dtype=torch.long), *draws)
    assert mask.shape == (30, 10, 10)
    assert torch.equal(cut[:, 0] == 7, mask == 99)
    assert (mask == 99).any()
    with pytest.raises(DataError, match="does not fit into images of 12 x 16"):
        _draw(batched.RandomCrop(20, padding=1), 2)


def _features(images):
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
def test_batched_form_has_the_distribution_of_the_per_sample_form(name, options, others):
    ours = getattr(batched, name)(**options)
    theirs = getattr(v2, name)(**{**options, **others})
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
