"""Values that `torch.load(weights_only=True)` loads: tensors and plain containers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_MAPPINGS: tuple[type, ...] = (dict, Counter, OrderedDict)
_SEQUENCES: tuple[type, ...] = (list, tuple, set)


class NotPlainError(TypeError):
    """A value of a type that cannot be loaded without running code."""


def plain(value: Any) -> Any:
    """Return `value` with subclasses of numbers and strings (numpy scalars, enums) made plain.

    Tensors are returned as they are. Raises `NotPlainError` for any other type.
    """
    if isinstance(value, torch.Tensor) or type(value) in _ATOMS:
        return value
    if type(value) in _MAPPINGS:
        return type(value)({plain(k): plain(v) for k, v in value.items()})
    if type(value) in _SEQUENCES:
        return type(value)(plain(v) for v in value)
    for base in (int, float, str):
        if isinstance(value, base):
            return base(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy scalar
        return plain(value.item())
    raise NotPlainError(f"{type(value).__module__}.{type(value).__qualname__}")


def plain_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `values` that are plain; others, such as functions, are left out."""
    kept = {}
    for key, value in values.items():
        try:
            kept[key] = plain(value)
        except NotPlainError:
            continue
    return kept
