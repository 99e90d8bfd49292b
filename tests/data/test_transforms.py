"""Views of an image, averaged as one by one; random numbers of each sample's own."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest
from torch import nn
from torch.nn.functional import pad
from torchvision.transforms import v2

from regimen.data.keys import Draws, key, keys
from regimen.data.transforms import (
    Mirrored,
    Pipeline,
    Shifted,
    StackViews,
    Standardize,
    ToFloat,
    average_views,
)
from regimen.trainer.tasks.classification import Classification


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5))


@pytest.fixture
def ten_crops():
    """An image, its ten crops as a pipeline makes them, and by hand."""
    image = torch.randint(0, 256, (3, 12, 12), dtype=torch.uint8)
    pipeline = Pipeline(
        {
            "crops": v2.TenCrop(8),
            "stack": StackViews(),
            "to_float": ToFloat(),
            "normalize": Standardize([0.5] * 3, [0.2] * 3),
        }
    )
    crops = torch.stack(v2.TenCrop(8)(image))
    return pipeline(image), (crops / 255 - 0.5) / 0.2


def test_ten_crops_are_averaged(ten_crops):
    views, by_hand = ten_crops
    model = _model()
    batch = torch.stack([views, views])

    averaged = average_views(model, batch)

    assert views.shape == (10, 3, 8, 8)
    expected = torch.stack([model(view[None])[0] for view in by_hand]).mean(0)
    assert torch.allclose(averaged, expected.expand(2, 5), atol=1e-5)
    assert torch.equal(Classification(5).answer(model, batch), averaged)


def test_videos_go_to_the_model_as_they_are():
    videos = torch.rand(2, 3, 4, 8, 8)  # [n, C, frames, H, W]
    model = nn.Sequential(nn.Conv3d(3, 5, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten())
    task = Classification(5, average_views=False)
    assert torch.equal(task.answer(model, videos), model(videos))
    output = task.evaluation_step(model, (videos, torch.tensor([0, 4]))).output
    assert torch.equal(output, model(videos))


def test_single_images_are_not_averaged(ten_crops):
    images, _ = ten_crops
    model = _model()

    assert torch.equal(average_views(model, images), model(images))


def test_shifted_views_are_reflected_at_the_edge():
    image = torch.rand(3, 8, 6)

    views = Shifted(2)(image)

    padded = pad(image[None], [2, 2, 2, 2], mode="reflect")[0]
    upper_left = padded[:, :8, :6]
    lower_right = padded[:, 4:, 4:]
    assert torch.equal(views, torch.stack([image, upper_left, lower_right]))


def test_views_of_a_batch_equal_those_of_each_image():
    images = torch.randint(0, 256, (5, 3, 8, 6), dtype=torch.uint8)
    shift = Shifted()
    mirror = Mirrored()
    each = torch.stack([mirror(shift(image)) for image in images])
    assert torch.equal(mirror.of_batch(shift.of_batch(images)), each)


N = 40_000


def test_mirrored_views_stand_behind_the_others():
    image = torch.rand(3, 8, 6)
    views = torch.rand(3, 3, 8, 6)

    assert torch.equal(Mirrored()(image), torch.stack([image, image.flip(-1)]))
    assert torch.equal(Mirrored()(views), torch.cat([views, views.flip(-1)]))


def assert_uniform(values):
    """Refuse values that are not uniform on 0 to 1, by Kolmogorov's and Smirnov's test."""
    assert kstest(values.double(), "uniform").pvalue > 1e-3


def assert_equally_often(counts):
    assert chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("which", range(3))
def test_numbers_are_uniform(which):
    draws = Draws(keys(range(N), which))

    first = draws.uniform()
    second = draws.uniform(-2, 3)

    assert 0 <= first.min() < first.max() < 1
    assert -2 <= second.min() < second.max() <= 3
    assert_uniform(first)
    assert_uniform((second.double() + 2) / 5)


@pytest.mark.parametrize("which", range(3))
def test_integers_are_uniform(which):
    draws = Draws(keys(range(N), which))

    for sides in (2, 9, 37):
        counts = np.bincount(draws.integers(sides), minlength=sides)
        assert len(counts) == sides
        assert_equally_often(counts)

    bounds = torch.arange(1, N + 1)  # each sample has its own
    bounded = draws.integers(bounds)
    assert (bounded < bounds).all()
    fractions = (bounded + 0.5) / bounds
    assert_uniform(fractions[500:])  # of small bounds there are few values


@pytest.mark.parametrize("which", range(3))
def test_orders_are_equally_frequent(which):
    draws = Draws(keys(range(N), which))

    orders = draws.order(3)

    numbered = orders @ torch.tensor([9, 3, 1])
    _, counts = numbered.unique(return_counts=True)
    assert len(counts) == 6
    assert_equally_often(counts)


def test_keys_of_many_samples_are_those_of_each():
    samples = [0, 7, 2**63]
    assert keys(samples, 3, 2).tolist() == [key(3, 2, sample) for sample in samples]


def assert_uncorrelated(one, other):
    """Refuse pairs that do not fill a table of 10 x 10 evenly."""
    rows = (one * 10).long()
    columns = (other * 10).long()
    counts = np.bincount(rows * 10 + columns, minlength=100)
    assert_equally_often(counts)


def test_draws_of_samples_are_uncorrelated():
    draws = Draws(keys(range(N), 1))
    first = draws.uniform()
    second = draws.uniform()

    assert_uncorrelated(first, second)
    assert_uncorrelated(first[:-1], first[1:])  # of neighbours


def test_draws_of_epochs_and_of_names_are_uncorrelated():
    epochs = [Draws(keys(range(N), 1, 2, epoch)).uniform() for epoch in (0, 1)]
    names = [Draws(keys(range(N), 1) ^ np.uint64(name)).uniform() for name in (6, 7)]

    assert_uncorrelated(*epochs)
    assert_uncorrelated(*names)
