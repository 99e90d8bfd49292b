"""`data.cache`: what is kept of the data between epochs, and where."""

from __future__ import annotations

import inspect
import logging
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, Problem, raise_problems
from conf.schema import Config
from data.image_folder import ImageFolder
from data.loading.batch_forms import batch_form, defer
from data.loading.cache import ImageCache
from data.loading.kept import Kept, bytes_of, can_be_kept
from data.transforms import Pipeline
from trainer.strategies.strategy import Strategy
from trainer.targets.allow_list import locate

logger = logging.getLogger("regimen")

_SPLITS = ("train", "val", "test")


def set_cache(config: Config, split: str, dataset: Any) -> None:
    """Let a data set keep its decoded images. Raises ConfigError where a device cannot."""
    options = config.data
    if options.cache == "device" and split in _SPLITS:
        transform = getattr(dataset, "transform", None)
        raise_problems(_objections(config, split, type(dataset), transform))
    if options.cache == "none" or config.dry_run:
        return
    if isinstance(dataset, ImageFolder):
        folder = Path(options.cache_dir or Path(options.root or ".") / ".cache").expanduser()
        dataset.cache = ImageCache(options.cache, folder, options.cache_bytes)
    elif options.cache != "device":
        logger.info("data.cache: data.%s reads no image files: nothing to cache", split)


def kept(config: Config, dataset: Any, strategy: Strategy) -> Kept | None:
    """Return what keeps a data set on the device; None if it is not to be kept there."""
    if config.data.cache != "device" or config.dry_run or not can_be_kept(type(dataset)):
        return None
    return Kept(dataset, strategy.device, config.data.cache_bytes)


def kept_bytes(config: Config, sets: Mapping[str, Any]) -> int | None:
    """Return how much of a device's memory the data sets will take; None before it is known."""
    if config.data.cache != "device":
        return 0
    batches = [dataset.tensors() for dataset in sets.values() if dataset is not None]
    sizes = [None if batch is None else bytes_of(batch) for batch in batches]
    known = [size for size in sizes if size is not None and size <= config.data.cache_bytes]
    return None if None in sizes else sum(known)


def cache_problems(config: Config, pipeline: Callable[[str], Pipeline]) -> Iterable[Problem]:
    """Return what `data.cache=device` cannot keep, as far as it shows before the data are open.

    `pipeline` builds the transforms of a stage.
    """
    found: dict[str, Problem] = {}
    for split in _SPLITS if config.data.cache == "device" else ():
        node = getattr(config.data, split)
        kind = _kind(node["_target_"]) if node else None
        if kind is not None:
            left = _left(config, split, kind, pipeline)
            for problem in _objections(config, split, kind, left):
                found.setdefault(problem.key, problem)
    return found.values()


def _left(config: Config, split: str, kind: type, build: Callable[[str], Pipeline]) -> Any:
    """Return what the samples of a split go through one by one."""
    if "transform" not in inspect.signature(kind).parameters:
        return None
    try:
        pipeline = build(stage_of(split))
    except ConfigError:
        return None  # reported as such
    if in_batches(config, split, kind):
        defer(pipeline, stage_of(split))
    return pipeline


def _objections(config: Config, split: str, kind: type, transform: Any) -> Iterator[Problem]:
    instead = f"set data.cache={'ram' if issubclass(kind, ImageFolder) else 'none'}"
    if not can_be_kept(kind):
        message = f"is device, but data.{split} ({kind.__name__}) cannot be kept there"
        more = "or give the class a method tensors() that returns all samples as one batch"
        yield Problem("data.cache", message, f"{instead}, {more}")
    elif (key := own_collate(config, split)) is not None:
        message = "puts single samples together, and data.cache=device gathers whole batches"
        yield Problem(key, message, f"leave it out, or {instead}")
    elif transform is not None and not isinstance(transform, Pipeline):
        message = "takes single samples, and data.cache=device gathers whole batches"
        yield Problem(f"data.{split}.transform", message, f"use the group transforms, or {instead}")
    steps = transform.steps if isinstance(transform, Pipeline) else {}
    single = [name for name, step in steps.items() if batch_form(step) is None]
    for name in single or steps:  # those before such a step could do without
        written = getattr(steps[name], "step", steps[name])  # which a quick form stands for
        yield Problem(
            f"transforms.{stage_of(split)}.{name}",
            f"{type(written).__name__} takes single samples, and data.cache=device gathers "
            "whole batches",
            f"use a step for batches, as transforms=on_device does, or {instead}",
        )


def stage_of(split: str) -> str:
    """Return which transforms the samples of a split go through."""
    return "train" if split == "train" else "eval"


def own_collate(config: Config, split: str) -> str | None:
    """Return the key of the `collate_fn` that a split has; None without one."""
    options = config.loader
    if split != "train" and options.eval.collate_fn:
        return "loader.eval.collate_fn"
    return "loader.collate_fn" if options.collate_fn else None


def in_batches(config: Config, split: str, dataset: Any) -> bool:
    """Return whether the last transforms of a split are left to the loader, for whole batches.

    The data set (or its class) has to declare that its samples begin with what the transforms
    return.
    """
    declared = getattr(dataset, "transforms_in_batches", False)
    return bool(declared) and own_collate(config, split) is None


def _kind(path: str) -> type | None:
    """Return the class of a target, or the one to be kept that a function says it returns."""
    try:
        target = locate(path)
        returned = typing.get_type_hints(target).get("return")
    except Exception:  # reported with its arguments; or names that only a type checker knows
        return None
    if isinstance(target, type):
        return target
    union = typing.get_origin(returned) in (typing.Union, types.UnionType)
    members = typing.get_args(returned) if union else (returned,)
    return next((kind for kind in members if isinstance(kind, type) and can_be_kept(kind)), None)
