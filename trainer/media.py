"""What a run shows besides scalars: images, histograms and curves, as plain numpy arrays."""

import io
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Image = NDArray[np.uint8]  # [height, width, 3], RGB
Floats = NDArray[np.float64]


class Histogram(NamedTuple):
    """How many of the finite values lie between two edges each."""

    edges: Floats  # [bins + 1]
    counts: NDArray[np.int64]  # [bins]
    total: float  # sum of the values
    squares: float  # sum of their squares


class PRCurve(NamedTuple):
    """Counts of a binary decision at rising thresholds; all arrays are [thresholds]."""

    thresholds: Floats
    true_positives: Floats
    false_positives: Floats
    true_negatives: Floats
    false_negatives: Floats

    @property
    def precision(self) -> Floats:
        """The share of positive predictions that are right; 1 where there are none."""
        predicted = self.true_positives + self.false_positives
        return np.where(predicted > 0, self.true_positives / np.maximum(predicted, 1), 1.0)

    @property
    def recall(self) -> Floats:
        """The share of positive samples that are predicted as such; 0 where there are none."""
        return self.true_positives / np.maximum(self.true_positives + self.false_negatives, 1)


Media = Image | Histogram | PRCurve | str  # a text is Markdown


def as_image(image: Any) -> Image:
    """Return an image, or a figure of matplotlib's, as uint8 [height, width, 3].

    A tensor has the shape [C, H, W] or [H, W], anything else (numpy, PIL) [H, W, C] or [H, W], with
    C = 1, 3 or 4. Floating-point values are from 0 to 1, others from 0 to 255. Raises ValueError.
    Waits for the device of a tensor.
    """
    if hasattr(image, "savefig"):
        array = _drawn(image)
    elif isinstance(image, Tensor):
        array = _on_host(image)
    else:
        array = np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4):
        raise ValueError(f"an image of shape {list(array.shape)}: give [C, H, W], C = 1 or 3")
    if not np.issubdtype(array.dtype, np.integer):
        array = np.nan_to_num(array.astype(np.float64)).clip(0, 1) * 255 + 0.5
    colors = array.clip(0, 255).astype(np.uint8)[..., :3]
    return np.ascontiguousarray(np.broadcast_to(colors, (*colors.shape[:2], 3)))


def _drawn(figure: Any) -> NDArray[Any]:
    from PIL import Image as Pillow  # which a run without figures does not need

    file = io.BytesIO()
    figure.savefig(file, format="png")
    return np.asarray(Pillow.open(file, formats=["PNG"]).convert("RGB"))


def _on_host(image: Tensor) -> NDArray[Any]:
    """Return an image [C, H, W] or [H, W] as an array [H, W, C] or [H, W]; waits for its device."""
    if image.ndim == 3:
        image = image.movedim(0, -1)
    image = image.detach().cpu()
    if image.is_floating_point():
        image = image.float()  # numpy has no bfloat16
    return image.numpy()


def histogram_of(values: Any, bins: int = 64) -> Histogram:
    """Return the histogram of the finite values of a tensor or an array.

    Waits for the device of a tensor.
    """
    # Converted on the host: not every device has float64.
    tensor = torch.as_tensor(values).detach().flatten().cpu().double()
    finite = tensor[tensor.isfinite()].numpy()
    counts, edges = np.histogram(finite, bins=bins)
    return Histogram(edges, counts, float(finite.sum()), float(finite @ finite))
