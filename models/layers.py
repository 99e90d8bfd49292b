"""Activation functions by name, and image sizes."""

from collections.abc import Sequence
from difflib import get_close_matches

from torch import nn

from models.errors import NetworkError

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


def make_activation(name: str) -> nn.Module:
    """Return a new activation module; quantization and hooks need one for each use."""
    if name not in ACTIVATIONS:
        near = get_close_matches(name, ACTIVATIONS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(ACTIVATIONS)}"
        raise NetworkError(f"unknown activation {name!r}: {hint}")
    return ACTIVATIONS[name]()


def height_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width) of `size`: one number for a square, or both."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width
