"""Transforms of single samples: a named, ordered pipeline, and steps that torchvision lacks."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from regimen.data.decode import pil_to_tensor
from regimen.data.errors import DataError, reason
from regimen.data.keys import Draws

Transform = Callable[[Any], Any] | None

# torchvision's transforms whose result for a batch is bit-equal to that for each image.
_PER_PIXEL = (v2.Identity, v2.Normalize, v2.ToDtype)


def acts_on_batches(transform: Any) -> bool:
    """Return whether a transform is deterministic and treats each image of a batch separately.

    No transform (None) does. Your own declare it by an attribute `acts_on_batches = True`.
    """
    if transform is None:
        return True
    declared = getattr(transform, "acts_on_batches", None)
    return type(transform) in _PER_PIXEL if declared is None else bool(declared)


def on_inputs(transform: Transform, sample: Any) -> Any:
    """Transform the inputs of a sample: the first part of a tuple, or the sample itself."""
    if transform is None:
        return sample
    if isinstance(sample, tuple):
        return transform(sample[0]), *sample[1:]
    return transform(sample)


@functools.cache
def constants(
    values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a value for each channel (C, 1, 1) on a device; only the first call copies them."""
    return torch.tensor(values, dtype=dtype).view(-1, 1, 1).to(device)


@dataclass(eq=False)
class Pipeline:
    """Apply named steps in order; null steps are dropped; errors name the step.

    Pillow's images become tensors before the first of our own steps, or at the end.

    key: the configuration key of the steps, for messages.
    deferred: further steps, which the loader applies to whole batches.
    """

    steps: dict[str, Any]
    key: str = "transforms"

    def __post_init__(self) -> None:
        self.steps = {name: step for name, step in self.steps.items() if step is not None}
        self.deferred = dict[str, Any]()

    @property
    def acts_on_batches(self) -> bool:
        """Whether a batch may be passed instead of an image."""
        return all(acts_on_batches(step) for step in self.steps.values())

    @property
    def takes_files(self) -> bool:
        """Whether the first step takes a `LargeJpeg` (`data.decode`) as well as a decoded image."""
        first = next(iter(self.steps.values()), None)
        return bool(getattr(first, "takes_files", False))

    def __call__(self, sample: Any) -> Any:
        for name, step in self.steps.items():
            try:
                sample = _apply(step, sample)
            except (DataError, MemoryError):
                raise
            except Exception as error:
                raise DataError(f"{self.key}.{name} failed: {reason(error)}") from error
        if isinstance(sample, Image.Image):
            return pil_to_tensor(sample)
        return sample


def _apply(step: Any, sample: Any) -> Any:
    if isinstance(sample, Image.Image) and type(step).__module__.startswith("regimen.data."):
        sample = pil_to_tensor(sample)
    if not hasattr(step, "draw"):
        return step(sample)
    # A transform of whole batches draws by keys. This one comes from the global generator, which
    # the loader seeds for each sample.
    sample_key = torch.randint(2**62, (1,)).numpy().astype(np.uint64)
    rows = step.draw(Draws(sample_key), *sample.shape[-2:])
    return step(sample[None], *rows)[0]


class ToFloat:
    """Turn uint8 images into float32 in [0, 1]; leave floating tensors as they are."""

    acts_on_batches = True

    def __call__(self, image: Tensor) -> Tensor:
        if image.is_floating_point():
            return image
        return image.to(torch.float32).div_(torch.iinfo(image.dtype).max)


class Standardize:
    """Subtract the mean and divide by the standard deviation, channel by channel (C, H, W)."""

    acts_on_batches = True

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if len(mean) != len(std) or min(std) <= 0:
            raise DataError(f"mean {mean} and std {std} must be as long, std positive")
        self.mean = tuple(mean)
        self.std = tuple(std)
        self._negative_mean = torch.empty(0)  # (C, H, W), for images of the last size

    def beside(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation (C, 1, 1) on the device of an image."""
        return constants(self.mean, image.device), constants(self.std, image.device)

    def __call__(self, image: Tensor) -> Tensor:
        mean, std = self.beside(image)
        return (image - mean).div_(std)

    def after(self, to_float: ToFloat) -> Callable[[Tensor], Tensor]:
        """Return `ToFloat` and this step as one, bit-equal, with half the memory traffic."""

        def fused(image: Tensor) -> Tensor:
            shape = image.shape[-3:]
            on_host = image.device.type == "cpu"
            if shape[0] != len(self.mean) or image.dtype != torch.uint8 or not on_host:
                return self(to_float(image))
            # addcdiv computes -mean + x / 255 with the roundings of the two steps. It is fast if
            # all operands but one have the shape of an image.
            mean, std = self.beside(image)
            if self._negative_mean.shape != shape:
                self._negative_mean = (-mean).expand(shape).contiguous()
            out = torch.empty(image.shape).copy_(image)
            white = constants((255.0,), image.device)
            return torch.addcdiv(self._negative_mean, out, white, out=out).div_(std)

        return fused


class ProgressiveResize:
    """Resize the images of training batches to a square of another size in each epoch.

    sizes: pixels a side in epochs 0, 1, ...; the last one holds for all further epochs. Small
    images at first take less work. Bilinear with antialiasing; images of 8 bits are rounded.
    """

    moves_pixels = True  # so that boxes would stay behind

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        if not self.sizes or min(self.sizes) < 1:
            raise DataError(f"sizes={self.sizes}: give a positive number of pixels for each epoch")

    def of_epoch(self, epoch: int) -> Callable[[Tensor], Tensor]:
        """Return the resizing of an epoch, for images (..., C, H, W)."""
        side = self.sizes[min(epoch, len(self.sizes) - 1)]

        def resized(images: Tensor) -> Tensor:
            if images.shape[-2:] == (side, side):
                return images
            as_floats = images.dtype == torch.uint8 and not images.is_cpu  # has no such kernel
            values = images.float() if as_floats else images
            values = interpolate(values, (side, side), mode="bilinear", antialias=True)
            return values.round_().to(images.dtype) if as_floats else values

        return resized


class StackViews:
    """Turn the tuple of images that FiveCrop or TenCrop returns into a tensor (views, C, H, W)."""

    def __call__(self, views: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(views))


class Mirrored:
    """Return an image and its mirror image as two views (2, C, H, W).

    Views (views, C, H, W), such as of StackViews, become twice as many.
    """

    def __call__(self, image: Tensor) -> Tensor:
        return self._extended(image if image.ndim == 4 else image[None])

    def of_batch(self, images: Tensor) -> Tensor:
        """Return the views of a batch of images, or of views: (n, views, C, H, W)."""
        return self._extended(images if images.ndim == 5 else images[:, None])

    def _extended(self, views: Tensor) -> Tensor:
        return torch.cat([views, views.flip(-1)], -4)


class Shifted(Mirrored):
    """Return an image, and the image moved down and right, and up and left, as three views.

    It moves by `pixels`; the border that comes into view is reflected. Views become three times as
    many.
    """

    def __init__(self, pixels: int = 1) -> None:
        self.pixels = pixels

    def _extended(self, views: Tensor) -> Tensor:
        height, width = views.shape[-2:]
        padded = F.pad(views, [self.pixels], padding_mode="reflect")
        down_right = padded[..., :height, :width]
        up_left = padded[..., 2 * self.pixels :, 2 * self.pixels :]
        return torch.cat([views, down_right, up_left], -4)


def average_views(model: Callable[[Tensor], Tensor], views: Tensor) -> Tensor:
    """Return the mean of the model's outputs over the views of each sample.

    views: (n, views, C, H, W). Other inputs go to the model as they are.
    """
    if views.ndim != 5:
        return model(views)
    outputs = model(views.flatten(0, 1))
    by_sample = outputs.view(*views.shape[:2], *outputs.shape[1:])
    return by_sample.mean(1)
