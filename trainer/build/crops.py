"""Crops that are larger than the images they are taken from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from conf.errors import Problem
from conf.schema import Config
from trainer.build.caches import stage_of

_OURS = ("data.transforms.", "data.batch_transforms.", "torchvision.transforms.")
_CROP = "RandomCrop"
_TO_SIZE = ("Resize", "RandomResizedCrop", "CenterCrop")
_OF_ONE_SIZE = (
    "ColorJitter",
    "Identity",
    "Normalize",
    "RandomAffine",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomVerticalFlip",
    "Standardize",
    "ToDtype",
    "ToFloat",
    "ToImage",
)

Size = tuple[int, int]  # height and width


def crop_problems(config: Config, sets: Mapping[str, Any]) -> Iterable[Problem]:
    """Name each random crop that does not fit into the images that reach it.

    As far as their size is known: that of images in memory, before any step that is not known here.
    """
    found: dict[str, Problem] = {}
    for split, dataset in sets.items():
        size = _size_of(dataset)
        for stage in ("train", "device") if stage_of(split) == "train" else ("eval",):
            for name, node in getattr(config.transforms, stage).items():
                key = f"transforms.{stage}.{name}"
                if size and node and (problem := _problem(key, node, size, split)):
                    found.setdefault(problem.key, problem)
                size = _after(node, size) if node else size
    return found.values()


def _size_of(dataset: Any) -> Size | None:
    told = getattr(dataset, "input_form", None)
    return _pair(told().get("size") if callable(told) else None)


def _problem(key: str, node: Mapping[str, Any], size: Size, split: str) -> Problem | None:
    wanted = _pair(node.get("size"))
    if _kind(node) != _CROP or wanted is None or node.get("pad_if_needed"):
        return None
    padded = _padded(node.get("padding"), size)
    if padded is None or all(side <= room for side, room in zip(wanted, padded, strict=True)):
        return None
    more = "" if padded == size else f", padded to {_shown(padded)}"
    message = f"{_shown(wanted)} is larger than the images of data.{split}: {_shown(size)}{more}"
    return Problem(f"{key}.size", message, "a smaller size, more padding, or larger images")


def _after(node: Mapping[str, Any], size: Size | None) -> Size | None:
    """Return the size of images after a step; None if it is not known."""
    kind, given = _kind(node), node.get("size")
    if kind in _OF_ONE_SIZE:
        return size
    if kind == "Resize" and not (isinstance(given, list) and len(given) == 2):
        square = size is not None and size[0] == size[1]  # else the shorter side gets the size
        return _pair(given) if square and "max_size" not in node else None
    return _pair(given) if kind in (_CROP, *_TO_SIZE) else None


def _kind(node: Mapping[str, Any]) -> str | None:
    """Return the name of a step's class; None for other classes than these libraries'."""
    target = str(node.get("_target_"))
    known = target.startswith(_OURS) and "_args_" not in node
    return target.rpartition(".")[2] if known else None


def _padded(padding: Any, size: Size) -> Size | None:
    """Return the size with a padding: of all sides, [left/right, top/bottom], or each of them."""
    sides = [padding or 0] if isinstance(padding, int | None) else list(padding)
    if len(sides) not in (1, 2, 4) or not all(isinstance(side, int) for side in sides):
        return None
    left, top, right, bottom = (sides * 4)[:4]
    return size[0] + top + bottom, size[1] + left + right


def _pair(size: Any) -> Size | None:
    sides: Sequence[Any] = size if isinstance(size, list | tuple) else [size]
    if not all(type(side) is int for side in sides) or len(sides) not in (1, 2):
        return None
    return sides[0], sides[-1]


def _shown(size: Size) -> str:
    return f"{size[0]} x {size[1]}"
