"""Sizes of images as configs give them."""

from collections.abc import Sequence


def height_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width) of `size`: one number for a square, or both."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width
