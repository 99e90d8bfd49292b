"""Several views of one image in evaluation (crops, mirrored copies), and the mean over them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class StackViews:
    """Turn the tuple of images that FiveCrop or TenCrop returns into a tensor (views, C, H, W)."""

    def __call__(self, views: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(views))


class Mirrored:
    """Return an image and its mirror image as two views (2, C, H, W); of views, twice as many."""

    def __call__(self, image: Tensor) -> Tensor:
        views = image if image.ndim == 4 else image[None]
        return torch.cat([views, views.flip(-1)])


def average_views(model: Callable[[Tensor], Tensor], views: Tensor) -> Tensor:
    """Return the mean of the model's outputs over the views of each sample.

    views: (n, views, C, H, W); inputs of four dimensions are given to the model as they are.
    """
    if views.ndim != 5:
        return model(views)
    outputs = model(views.flatten(0, 1))
    return outputs.view(*views.shape[:2], *outputs.shape[1:]).mean(1)
