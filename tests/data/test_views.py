"""Crops and mirrored copies: averaged as one by one."""

import torch
from torch import nn
from torch.nn.functional import pad
from torchvision.transforms import v2

from data.transforms import (
    Mirrored,
    Pipeline,
    Shifted,
    StackViews,
    Standardize,
    ToFloat,
    average_views,
)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5))


def test_ten_crops_are_averaged() -> None:
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
    assert torch.allclose(averaged, by_hand.mean(0).expand(2, 5), atol=1e-5)


def test_mirrored_views() -> None:
    image = torch.rand(3, 8, 8)
    views = Mirrored()(image)
    assert torch.equal(views, torch.stack([image, image.flip(-1)]))
    assert Mirrored()(views).shape == (4, 3, 8, 8)


def test_single_views_pass_through() -> None:
    images = torch.rand(4, 3, 8, 8)
    model = _model()
    assert torch.equal(average_views(model, images), model(images))


def test_shifted_views_are_reflected_at_the_edge() -> None:
    image = torch.rand(3, 8, 6)
    padded = pad(image[None], [2, 2, 2, 2], mode="reflect")[0]
    views = Shifted(2)(image)
    assert torch.equal(views, torch.stack([image, padded[:, :8, :6], padded[:, 4:, 4:]]))
    assert Mirrored()(views).shape == (6, 3, 8, 6)


def test_the_views_of_a_batch_are_those_of_each_image() -> None:
    images = torch.randint(0, 256, (5, 3, 8, 6), dtype=torch.uint8)
    shift, mirror = Shifted(), Mirrored()
    each = torch.stack([mirror(shift(image)) for image in images])
    assert torch.equal(mirror.of_batch(shift.of_batch(images)), each)
