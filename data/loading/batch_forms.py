"""Batched forms of transforms: those that declare it, and replacements for torchvision's.

Trailing steps of a pipeline that all have a batched form are applied by the loader, once for each
batch; the steps before them to each sample. This depends on the configuration alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import v2

from data import batch_transforms as batched
from data.decode import JpegFile
from data.errors import DataError
from data.formats.jpeg import Box
from data.transforms import Pipeline, acts_on_batches

_BLANK = torch.zeros(1, 1, 1, dtype=torch.uint8)


def quick_form(step: Any) -> Any:
    """Return a step with the same draws and result for each image, or `step` itself.

    It is faster, or takes JPEG files that are not decoded yet, or both.
    """
    quick = {v2.RandomResizedCrop: _QuickResizedCrop, v2.Resize: _QuickResize}.get(type(step))
    if quick is None or not step.antialias:
        return step
    mode = getattr(step.interpolation, "value", step.interpolation)
    plain = mode == "bilinear" and step.size is not None and not getattr(step, "max_size", None)
    return quick(step) if plain else step


class _QuickResizedCrop:
    """torchvision's RandomResizedCrop of 8-bit images, without the classes around its two calls.

    Bit-equal to torchvision's on CPUs with AVX2; on others torchvision rounds once more.
    The draws for a JPEG file that is not decoded yet are those for its picture.
    """

    takes_files = True

    def __init__(self, step: v2.RandomResizedCrop) -> None:
        self.step = step

    def __call__(self, image: Any) -> Any:
        if isinstance(image, JpegFile):
            box = self._box(_BLANK.expand(1, image.height, image.width))
            part = image.part(box, tuple(self.step.size))
            return self._cut(image.decoded(), box) if part is None else part
        if type(image) is not Tensor or image.dtype != torch.uint8:
            return self.step(image)
        return self._cut(image, self._box(image))

    def _box(self, image: Tensor) -> Box:
        drawn = self.step.make_params([image])
        return drawn["top"], drawn["left"], drawn["height"], drawn["width"]

    def _cut(self, image: Tensor, box: Box) -> Tensor:
        top, left, tall, wide = box
        part, size = image[None, :, top : top + tall, left : left + wide], list(self.step.size)
        return interpolate(part, size, mode="bilinear", antialias=True)[0]


class _QuickResize:
    """torchvision's Resize, and of JPEG files that are not decoded yet."""

    takes_files = True

    def __init__(self, step: v2.Resize) -> None:
        self.step = step

    def __call__(self, image: Any) -> Any:
        if not isinstance(image, JpegFile):
            return self.step(image)
        size = self._size(image.height, image.width)
        whole = image.part((0, 0, image.height, image.width), size)
        return self.step(image.decoded()) if whole is None else whole

    def _size(self, height: int, width: int) -> tuple[int, int]:
        size = self.step.size
        if len(size) == 2:
            return size[0], size[1]
        short, long = sorted((height, width))
        other = int(size[0] * long / short)
        return (size[0], other) if height <= width else (other, size[0])


def defer(pipeline: Pipeline, stage: str) -> None:
    """Move the trailing steps that have a batched form to the pipeline's `deferred`.

    There their names begin with that of the stage, such as `train.crop`.
    """
    forms = {name: batch_form(step) for name, step in pipeline.steps.items()}
    for name in reversed(forms):
        if forms[name] is None:
            break
        pipeline.deferred = {f"{stage}.{name}": forms[name], **pipeline.deferred}
        del pipeline.steps[name]


def check_per_sample(pipeline: Pipeline, key: str) -> None:
    """Raise DataError if a step that draws for whole batches would get single samples."""
    for name, step in pipeline.steps.items():
        if _takes_batches(step):
            raise DataError(
                f"{key}.{name}: {type(step).__name__} treats whole batches, and what follows, the "
                "data set or loader.collate_fn takes single samples: use torchvision's form of it, "
                "or move it to the end or to transforms.device"
            )


def batch_form(step: Any) -> Any:
    """Return a step for batches with the distribution of `step` for images, or None."""
    if _takes_batches(step) or acts_on_batches(step):
        return step
    if callable(of_batch := getattr(step, "of_batch", None)):
        return of_batch
    form = _FORMS.get(type(step))
    return None if form is None else form(step)


def _takes_batches(step: Any) -> bool:
    return hasattr(step, "draw") or hasattr(step, "of_epoch")


def _flip(kind: Callable[[float], Any]) -> Callable[[Any], Any]:
    return lambda step: kind(step.p)


def _crop(step: Any) -> Any:
    padding = step.padding or [0]
    plain = isinstance(step.fill, int | float) and not step.pad_if_needed
    if not plain or len(set(padding)) > 1:
        return None
    return batched.RandomCrop(step.size, padding[0], step.fill, step.padding_mode)


def _erasing(step: Any) -> Any:
    if step.value is None:  # noise
        return None
    value = step.value if len(step.value) > 1 else step.value[0]
    return batched.RandomErasing(step.p, step.scale, step.ratio, value)


def _affine(step: Any) -> Any:
    symmetric = step.degrees[0] == -step.degrees[1]
    mode = str(getattr(step.interpolation, "value", step.interpolation))
    plain = step.shear is None and step.center is None and step.fill == 0
    if not (symmetric and plain and mode in ("nearest", "bilinear")):
        return None
    shift, scale = step.translate or (0.0, 0.0), step.scale or (1.0, 1.0)
    return batched.RandomAffine(step.degrees[1], shift, scale, mode)


_FORMS: dict[type, Callable[[Any], Any]] = {
    v2.RandomHorizontalFlip: _flip(batched.RandomHorizontalFlip),
    v2.RandomVerticalFlip: _flip(batched.RandomVerticalFlip),
    v2.RandomCrop: _crop,
    v2.RandomErasing: _erasing,
    v2.RandomAffine: _affine,
}
