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


def test_ten_crops_are_averaged():
    image = torch.randint(0, 256, (3, 12, 12), dtype=torch.uint8)
    pipeline = Pipeline(
        {
            "crops": v2.TenCrop(8),
            "stack": StackViews(),
            "to_float": ToFloat(),
            "normalize": Standardize([0.5] * 3, [0.2] * 3),
        }
    )
    views = pipeline(image)
    assert views.shape == (10, 3, 8, 8)
    model = _model()
    by_hand = torch.stack(
        [model(((crop / 255 - 0.5) / 0.2)[None])[0] for crop in v2.TenCrop(8)(image)]
    )
    averaged = average_views(model, torch.stack([views, views]))
    assert torch.equal(Classification(5).answer(model, torch.stack([views, views])), averaged)
    assert torch.allclose(averaged, by_hand.mean(0).expand(2, 5), atol=1e-5)
    assert torch.equal(average_views(model, views), model(views))  # single images


def test_videos_go_to_the_model_as_they_are():
    videos = torch.rand(2, 3, 4, 8, 8)  # [n, C, frames, H, W]
    model = nn.Sequential(nn.Conv3d(3, 5, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten())
    task = Classification(5, average_views=False)
    assert torch.equal(task.answer(model, videos), model(videos))
    output = task.evaluation_step(model, (videos, torch.tensor([0, 4]))).output
    assert torch.equal(output, model(videos))


def test_shifted_views_are_reflected_at_the_edge():
    image = torch.rand(3, 8, 6)
    padded = pad(image[None], [2, 2, 2, 2], mode="reflect")[0]
    views = Shifted(2)(image)
    assert torch.equal(views, torch.stack([image, padded[:, :8, :6], padded[:, 4:, 4:]]))
    both = Mirrored()(views)
    assert torch.equal(both, torch.cat([views, views.flip(-1)]))
    assert torch.equal(Mirrored()(image), torch.stack([image, image.flip(-1)]))


def test_views_of_a_batch_equal_those_of_each_image():
    images = torch.randint(0, 256, (5, 3, 8, 6), dtype=torch.uint8)
    shift = Shifted()
    mirror = Mirrored()
    each = torch.stack([mirror(shift(image)) for image in images])
    assert torch.equal(mirror.of_batch(shift.of_batch(images)), each)


N = 40_000


@pytest.mark.parametrize("which", range(3))
def test_numbers_are_uniform(which):
    draws = Draws(keys(range(N), which))
    first = draws.uniform()
    second = draws.uniform(-2, 3)
    assert 0 <= first.min() < first.max() < 1
    assert -2 <= second.min() < second.max() <= 3
    assert kstest(first.double(), "uniform").pvalue > 1e-3
    assert kstest((second.double() + 2) / 5, "uniform").pvalue > 1e-3
    for sides in (2, 9, 37):
        counts = np.bincount(draws.integers(sides), minlength=sides)
        assert len(counts) == sides
        assert chisquare(counts).pvalue > 1e-3
    bounds = torch.arange(1, N + 1)  # each sample has its own
    bounded = draws.integers(bounds)
    assert (bounded < bounds).all()
    assert kstest(((bounded + 0.5) / bounds)[500:].double(), "uniform").pvalue > 1e-3
    orders = draws.order(3) @ torch.tensor([9, 3, 1])
    counts = orders.unique(return_counts=True)[1]
    assert len(counts) == 6
    assert chisquare(counts).pvalue > 1e-3


def test_draws_of_samples_are_uncorrelated():
    """Between neighbours in a sample, samples, epochs and names: a 10 x 10 table of pairs."""
    assert keys([0, 7, 2**63], 3, 2).tolist() == [key(3, 2, value) for value in (0, 7, 2**63)]
    draws = Draws(keys(range(N), 1))
    first = draws.uniform()
    second = draws.uniform()
    epochs = [Draws(keys(range(N), 1, 2, epoch)).uniform() for epoch in (0, 1)]
    names = [Draws(keys(range(N), 1) ^ np.uint64(name)).uniform() for name in (6, 7)]
    for one, other in [(first, second), (first[:-1], first[1:]), tuple(epochs), tuple(names)]:
        cells = (one * 10).long() * 10 + (other * 10).long()
        assert chisquare(np.bincount(cells, minlength=100)).pvalue > 1e-3
