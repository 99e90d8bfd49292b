"""What a run shows besides scalars: images, histograms and curves, as plain numpy arrays."""

import io
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Image = NDArray[np.uint8]  # [height, width, 3], RGB


class Histogram(NamedTuple):
    """How many of the finite values lie between two edges each."""

    edges: NDArray[np.float64]  # [bins + 1]
    counts: NDArray[np.int64]  # [bins]
    total: float  # sum of the values
    squares: float  # sum of their squares


class PRCurve(NamedTuple):
    """Counts of a binary decision at rising thresholds; all arrays are [thresholds]."""

    thresholds: NDArray[np.float64]
    true_positives: NDArray[np.float64]
    false_positives: NDArray[np.float64]
    true_negatives: NDArray[np.float64]
    false_negatives: NDArray[np.float64]

    @property
    def precision(self) -> NDArray[np.float64]:
        """The share of positive decisions that are right; 1 where there are none."""
        found = self.true_positives + self.false_positives
        return np.where(found > 0, self.true_positives / np.maximum(found, 1), 1.0)

    @property
    def recall(self) -> NDArray[np.float64]:
        """The share of positive samples that are found; 0 where there are none."""
        there = self.true_positives + self.false_negatives
        return self.true_positives / np.maximum(there, 1)


Media = Image | Histogram | PRCurve | str  # a text is Markdown


def as_image(image: Any) -> Image:
    """Return an image, or a figure of matplotlib's, as uint8 [height, width, 3].

    A tensor has the shape [C, H, W] or [H, W], anything else (numpy, PIL) [H, W, C] or [H, W], with
    C = 1, 3 or 4. Floating-point values are from 0 to 1, others from 0 to 255. Raises ValueError.
    """
    if hasattr(image, "savefig"):
        from PIL import Image as Pillow  # which a run without figures does not need

        file = io.BytesIO()
        image.savefig(file, format="png")
        image = Pillow.open(file, formats=["PNG"]).convert("RGB")
    if isinstance(image, Tensor):
        image = (image.movedim(0, -1) if image.ndim == 3 else image).detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4):
        raise ValueError(f"an image of shape {list(np.shape(image))}: give [C, H, W], C = 1 or 3")
    if array.dtype == bool or not np.issubdtype(array.dtype, np.integer):
        array = np.nan_to_num(array.astype(np.float64)).clip(0, 1) * 255 + 0.5
    array = array.clip(0, 255).astype(np.uint8)[..., :3]
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))


def histogram_of(values: Any, bins: int = 64) -> Histogram:
    """Return the histogram of the finite values of a tensor or an array."""
    tensor = torch.as_tensor(values).detach().double().flatten().cpu()
    array = tensor[tensor.isfinite()].numpy()
    counts, edges = np.histogram(array, bins=bins)
    return Histogram(edges, counts, float(array.sum()), float(array @ array))
