"""What differs between the states of two trainings."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list | tuple):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in pairs:
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, tree


def differences(one: Any, other: Any) -> list[str]:
    """Name the leaves that differ; a tensor of zeros is as good as none: state not begun yet."""
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    return [
        path
        for path in sorted(ours.keys() | theirs.keys())
        if not same(ours.get(path), theirs.get(path)) and "time/" not in path
    ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return not (a if isinstance(a, Tensor) else b).any()
    return bool(a == b)
