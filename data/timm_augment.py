"""RandAugment as timm computes it, whose operations and strengths differ from torchvision's."""

import re
from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from regimen.conf.errors import ConfigError
from regimen.data.decode import pil_to_tensor
from regimen.data.errors import import_package

# The numbers that Pillow has for ways to interpolate.
_PILLOW = {"nearest": 0, "bilinear": 2, "bicubic": 3}
# timm ignores a part without a number.
_POLICY = re.compile(r"rand(-((m|n|mmax)\d+|(mstd|p)\d+(\.\d+)?|inc[01]))*")


class TimmRandAugment:
    """Apply timm's `rand_augment_transform` to single images of 8 bits; timm is optional.

    policy: timm's description, such as `rand-m9-mstd0.5-inc1`.
    image_size: pixels a side, of which an image is moved by 45% at most.
    mean: a value for each channel in [0, 1], the colour of the border that comes into view.
    interpolation: nearest, bilinear or bicubic.

    It draws from `random` and numpy, which are seeded for each sample. Raises ConfigError for a
    policy that timm does not know.
    """

    def __init__(
        self,
        policy: str,
        image_size: int,
        mean: Sequence[float],
        interpolation: str = "bicubic",
    ) -> None:
        timm = import_package("timm.data", "timm")
        if interpolation not in _PILLOW:
            known = ", ".join(_PILLOW)
            raise ConfigError("", f"interpolation={interpolation!r} is none of {known}")
        colour = tuple(min(255, round(255 * value)) for value in mean)
        settings: dict[str, Any] = {
            "translate_const": int(image_size * 0.45),
            "img_mean": colour if len(colour) > 1 else colour[0],
            "interpolation": _PILLOW[interpolation],
        }
        if not _POLICY.fullmatch(policy):
            raise ConfigError(
                "",
                f"policy={policy!r} is no policy of timm: `rand` and parts such as m9 (strength), "
                "n2 (operations), p0.5 (of each), mstd0.5, mmax10, inc1, joined by -",
            )
        self._augment = timm.rand_augment_transform(policy, settings)

    def __call__(self, image: Tensor | Image.Image) -> Tensor:
        """Return the augmented image, uint8 (C, H, W)."""
        if isinstance(image, Tensor):
            image = F.to_pil_image(image)
        return pil_to_tensor(self._augment(image))
