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
HEIGHT = 12
WIDTH = 16


def _pictures(samples, dtype=torch.uint8):
    shape = (samples, 3, HEIGHT, WIDTH)
    generator = Generator().manual_seed(1)
    pictures = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if dtype == torch.uint8:
        return pictures
    return pictures.to(dtype) / 255


def _coordinates():
    """An image that says of each pixel where it comes from, and that it is one."""
    rows = torch.arange(1.0, HEIGHT + 1)[:, None].expand(HEIGHT, WIDTH)
    columns = torch.arange(1.0, WIDTH + 1).expand(HEIGHT, WIDTH)
    return torch.stack([rows, columns, torch.ones(HEIGHT, WIDTH)])


def _draw(transform, samples, seed=0, epoch=0):
    draws = Draws(keys(range(samples), seed), epoch)
    return transform.draw(draws, HEIGHT, WIDTH)


def _windows(mode):
    def window(image, top, left):
        padded = F.pad(image, [2], padding_mode=mode)
        return F.crop(padded, int(top), int(left), 9, 14)

    return batched.RandomCrop((9, 14), padding=2, padding_mode=mode), window


def _flips(name, mirror):
    flip = getattr(batched, f"Random{name}Flip")(p=0.4, masks=True)

    def flipped(image, drawn):
        return mirror(image) if drawn else image

    return flip, flipped


def _erased(value):
    fill = torch.tensor(value).view(-1, 1, 1)

    def erased(image, *box):
        top, left, height, width = [int(edge) for edge in box]
        return F.erase(image, top, left, height, width, fill) if height else image

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
        top, left, height, width = [int(edge) for edge in box]
        return F.resized_crop(image, top, left, height, width, [12, 10], antialias=False)

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


def _one_by_one(function, images, draws):
    """Return what a function for one image makes of each, with what was drawn for it."""
    results = []
    for number, image in enumerate(images):
        own_draws = [row[number] for row in draws]
        results.append(function(image, *own_draws))
    return torch.stack(results)


FORMS = [
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
]


@pytest.mark.parametrize(("pair", "dtypes", "largest", "share"), FORMS)
def test_each_image_is_torchvisions_for_what_was_drawn(pair, dtypes, largest, share):
    transform, one = pair
    for dtype in dtypes:
        images = _pictures(40, dtype=dtype)
        draws = _draw(transform, 40)

        result = transform(images, *draws)

        expected = _one_by_one(one, images, draws)
        difference = (result.float() - expected.float()).abs()
        if isinstance(transform, batched.RandomResizedCrop):
            # Inside: at a box's edge we read its neighbours, torchvision does not.
            difference = difference[..., 2:-2, 2:-2]
        assert difference.max() <= largest
        is_different = difference > 1e-4
        assert is_different.float().mean() <= share
        assert torch.equal(images, _pictures(40, dtype=dtype))
        if hasattr(transform, "in_place"):
            _assert_same_in_place(transform, images, draws, expected)


def _assert_same_in_place(transform, images, draws, expected):
    """Compare a transform with what it makes where nobody else has the images."""
    alone = copy.copy(transform)
    alone.in_place = True
    if hasattr(alone, "on_masks"):
        masks = alone.on_masks(images[:, 0], *draws)
        assert torch.equal(masks, expected[:, 0])
    result = alone(images, *draws)
    assert torch.equal(result, expected)
    if images.dtype != torch.bfloat16:
        assert result is images


@pytest.mark.parametrize("pair", [pytest.param(form.values[0], id=form.id) for form in FORMS])
@pytest.mark.parametrize("dtype", [BYTES, FLOATS], ids=["bytes", "floats"])
def test_each_image_is_the_same_in_every_batch(pair, dtype):
    transform, _ = pair
    images = _pictures(40, dtype)
    draws = _draw(transform, 40)

    whole = transform(images, *draws)

    for part in (slice(0, 1), slice(3, 12), slice(39, 40)):
        own_draws = [row[part] for row in draws]
        assert torch.equal(transform(images[part], *own_draws), whole[part])


def test_an_alternating_flip_shows_each_image_both_ways_in_two_epochs():
    flip = batched.AlternatingFlip()
    images = _pictures(40)

    first, second, third = [
        flip(images, *_draw(flip, 40, seed=1, epoch=epoch)) for epoch in range(3)
    ]

    assert torch.equal(first, second.flip(-1))
    assert torch.equal(first, third)
    turned = (first != images).flatten(1).any(1)
    assert 8 < turned.sum() < 32


def test_crop_treats_masks_alike_with_their_own_fill():
    crop = batched.RandomCrop(10, padding=3, fill=7, masks=True, mask_fill=99)
    draws = _draw(crop, 30)
    images = torch.zeros(30, 1, HEIGHT, WIDTH)
    masks = torch.zeros(30, HEIGHT, WIDTH, dtype=torch.long)

    images = crop(images, *draws)
    masks = crop.on_masks(masks, *draws)

    assert masks.shape == (30, 10, 10)
    assert torch.equal(images[:, 0] == 7, masks == 99)
    assert (masks == 99).any()


def _features(images):
    """Numbers that tell where pixels came from and how many there are (n, features)."""
    middle = images[:, :, images.shape[-2] // 2, images.shape[-1] // 2]
    corner = images[:, :, 1, 2]
    return torch.cat([middle, corner, images.sum((-1, -2))], 1)


def test_a_crop_larger_than_the_images_is_refused():
    with pytest.raises(DataError, match="does not fit into images of 12 x 16"):
        _draw(batched.RandomCrop(20, padding=1), 2)


def _lowest_chance(ours, theirs):
    """Return the least p of Kolmogorov's and Smirnov's test over the features of pictures."""
    torch.manual_seed(12)
    is_colour = isinstance(ours, batched.ColorJitter)
    picture = torch.full((1, HEIGHT, WIDTH), 0.5) if is_colour else _coordinates()
    many = picture.expand(N, *picture.shape)
    of_batch = _features(ours(many, *_draw(ours, N, seed=11))).round(decimals=2)
    one_by_one = torch.stack([theirs(picture) for _ in range(N)])
    of_each = _features(one_by_one).round(decimals=2)
    chances = []
    for column in range(of_batch.shape[1]):
        chances.append(ks_2samp(of_batch[:, column], of_each[:, column]).pvalue)
    return min(chances)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (batched.RandomHorizontalFlip(p=0.3), v2.RandomHorizontalFlip(p=0.3)),
        (batched.RandomVerticalFlip(p=0.3), v2.RandomVerticalFlip(p=0.3)),
        (batched.RandomCrop((10, 13), padding=3), v2.RandomCrop((10, 13), padding=3)),
        (batched.RandomErasing(p=0.6), v2.RandomErasing(p=0.6)),
        (batched.RandomResizedCrop((8, 8)), v2.RandomResizedCrop((8, 8), antialias=False)),
        (
            batched.RandomAffine(30, (0.1, 0.2), (0.7, 1.2)),
            v2.RandomAffine(30, (0.1, 0.2), (0.7, 1.2)),
        ),
        (batched.ColorJitter(brightness=0.8), v2.ColorJitter(brightness=0.8)),
    ],
    ids=lambda step: type(step).__name__,
)
def test_batched_form_has_the_distribution_of_the_per_sample_form(ours, theirs):
    assert _lowest_chance(ours, theirs) > 1e-3


def test_another_distribution_is_noticed():
    """Else the test above would show nothing."""
    ours = batched.RandomErasing(p=1.0, scale=(0.5, 0.7))
    theirs = v2.RandomErasing(p=1.0, scale=(0.5, 1.0))

    assert _lowest_chance(ours, theirs) < 1e-6
