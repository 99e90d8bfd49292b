"""From a configuration to data sets and loaders."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from conf.errors import ConfigError, Problem, raise_problems
from conf.schema import Config
from data.decode import Decode
from data.fingerprint import fingerprint
from data.formats.jpeg import region_decoder
from data.image_folder import ImageFolder
from data.loading.batch_forms import check_per_sample, defer, quick_form
from data.loading.collate import collate_ragged
from data.loading.device_transforms import DeviceTransforms
from data.loading.loader import Loader
from data.loading.on_device import OnDevice
from data.orders import FirstOf, Sequential
from data.samplers import as_order, as_updates, default_order
from data.streams import Stream, as_dataset
from data.transforms import Pipeline
from data.updates import Order, Updates, UpdateSampler
from trainer.build.caches import in_batches, kept, set_cache, stage_of
from trainer.build.crops import crop_problems
from trainer.build.folds import in_folds
from trainer.build.node_kinds import wrong_object
from trainer.build.nodes import build_named, with_classes
from trainer.distributed.machine import check_workers
from trainer.strategies.strategy import Strategy
from trainer.targets.allow_list import TargetError, locate
from trainer.targets.instantiate import instantiate

logger = logging.getLogger("regimen")

SPLITS = ("train", "val", "test")
_OF_LOADER = (
    "num_workers",
    "pin_memory",
    "prefetch_factor",
    "persistent_workers",
    "timeout",
    "collate_fn",
    "worker_init_fn",
    "multiprocessing_context",
)


@dataclass(frozen=True, slots=True)
class Data:
    """The data sets of a run; `train` is None for an evaluation."""

    sets: dict[str, Any]
    num_classes: int | None

    def describe(self) -> list[dict[str, Any]]:
        """Return the facts about each set that the plan and the manifest show."""
        return [
            {
                "split": split,
                "type": type(dataset).__name__,
                "samples": len(dataset) if hasattr(dataset, "__len__") else None,
                "classes": len(classes) if (classes := getattr(dataset, "classes", None)) else None,
                "fingerprint": fingerprint(dataset),
            }
            for split, dataset in self.sets.items()
            if dataset is not None
        ]


def build_data(config: Config, splits: tuple[str, ...] = SPLITS) -> Data:
    """Open the data sets. Raises DataError and ConfigError."""
    nodes = {split: getattr(config.data, split) for split in splits}
    sets = {split: _open(config, split, node) if node else None for split, node in nodes.items()}
    if "train" in splits and sets["train"] is None:
        raise ConfigError(Problem("data.train", "is null: there is nothing to train on"))
    raise_problems(crop_problems(config, sets))
    return Data(sets, _num_classes(config, sets))


def build_pipeline(config: Config, stage: str) -> Pipeline:
    """Build the transforms of `train` or `eval` samples."""
    steps = build_transforms(config, stage, config.data.num_classes)
    quick = {name: quick_form(step) for name, step in steps.items() if step is not None}
    return Pipeline(quick, f"transforms.{stage}")


def build_transforms(config: Config, stage: str, num_classes: int | None) -> dict[str, Any]:
    """Build the transforms of a stage (train, eval, device) by name; null drops one."""
    nodes = with_classes(getattr(config.transforms, stage), num_classes)
    return build_named(nodes, f"transforms.{stage}")


def _open(config: Config, split: str, node: dict[str, Any]) -> Any:
    """Open a data set and give it its transforms.

    Trailing transforms with a batched form are left to the loader, where it can apply them.
    """
    stage = stage_of(split)
    pipeline = build_pipeline(config, stage)
    # A data set of the user's own may have no parameter for transforms.
    taken = inspect.signature(locate(node["_target_"])).parameters
    transformed = "transform" in taken and "transform" not in node
    given: dict[str, Any] = {"transform": pipeline} if transformed else {}
    if config.dry_run and "keep_index" in taken:
        given["keep_index"] = False  # a dry run leaves nothing behind
    dataset = instantiate(in_folds(config, split, node), _key_=f"data.{split}", **given)
    if dataset is None:
        return None
    if "transform" in given and in_batches(config, split, dataset):
        defer(pipeline, stage)
    check_per_sample(pipeline, f"transforms.{stage}")
    set_cache(config, split, dataset)
    if config.data.decode != "full":
        _decode_in_part(config.data.decode, split, dataset, pipeline)
    return as_dataset(dataset)


def _decode_in_part(decode: Decode, split: str, dataset: Any, pipeline: Pipeline) -> None:
    if decode == "region" and not region_decoder():
        message = "is region, which takes the package nvidia-nvimgcodec-cu12"
        hint = "pip install 'regimen[jpeg]', or set data.decode=full: the same pixels, later"
        raise ConfigError(Problem("data.decode", message, hint))
    if isinstance(dataset, ImageFolder) and pipeline.takes_files:
        dataset.decode = decode
    else:
        known = "files whose first transform is a bilinear RandomResizedCrop or Resize"
        logger.warning("warning: data.decode=%s: data.%s has no %s", decode, split, known)


def _deferred(dataset: Any) -> dict[str, Any]:
    """Return the transforms that a data set leaves to the loader, by key below `transforms`."""
    pipeline = getattr(dataset, "transform", None)
    return pipeline.deferred if isinstance(pipeline, Pipeline) else {}


def _num_classes(config: Config, sets: dict[str, Any]) -> int | None:
    declared = config.data.num_classes
    known = next((s for s in sets.values() if s is not None), None)
    classes = getattr(known, "classes", None)
    if declared is None:
        return len(classes) if classes else None
    for split, dataset in sets.items():
        targets = getattr(dataset, "targets", None)
        if targets is None or not len(targets) or getattr(targets, "ndim", 1) != 1:
            continue
        low, high = int(min(targets)), int(max(targets))
        if low < 0 or high >= declared:
            message = f"is {declared}, but the labels of data.{split} go from {low} to {high}"
            hint = f"set data.num_classes={high + 1}" if low >= 0 else "labels count from 0"
            raise ConfigError(Problem("data.num_classes", message, hint))
    return declared


def train_loader(config: Config, data: Data, strategy: Strategy) -> OnDevice:
    """Build the training loader: `loader.batch_size` samples an update over all devices."""
    options, dataset = config.loader, data.sets["train"]
    chosen = _chosen(config, dataset)
    given = options.batch_sampler is not None and config.trainer.overfit_batches is None
    sampler = UpdateSampler(
        chosen,
        batch_size=None if given else options.batch_size,
        drop_last=options.drop_last,
        gradient_accumulation_steps=config.trainer.gradient_accumulation_steps,
        rank=strategy.group.rank,
        world_size=strategy.group.world_size,
    )
    steps = build_transforms(config, "device", data.num_classes)
    loader = _loader(config, dataset, sampler, strategy, "replace")
    return _on_device(config, loader, strategy, steps)


def eval_loader(
    config: Config,
    dataset: Any,
    strategy: Strategy,
    limit: int | float | None = None,
    samples: int | None = None,
) -> OnDevice:
    """Build a loader that reads a data set (or its first `samples`) once, in order.

    `limit` is a number of batches of `loader.batch_size`, or a fraction. Each batch is split over
    the processes; no sample is repeated.
    """
    whole = Sequential(len(dataset))
    samples = limited(len(dataset) if samples is None else samples, limit, config)
    sampler = UpdateSampler(
        whole if samples == len(dataset) else FirstOf(whole, samples),
        batch_size=(config.loader.eval_batch_size or config.loader.batch_size)
        * strategy.group.world_size,
        rank=strategy.group.rank,
        world_size=strategy.group.world_size,
    )
    loader = _loader(config, dataset, sampler, strategy, "drop", evaluating=True)
    return _on_device(config, loader, strategy, {})


def overfit_samples(config: Config, dataset: Any) -> int | None:
    """Return the number of samples that `trainer.overfit_batches` leaves; None without it."""
    few = config.trainer.overfit_batches
    return None if few is None else limited(len(dataset), few, config)


def limited(samples: int, limit: int | float | None, config: Config) -> int:
    """Return the number of samples in a number, or a fraction, of all batches."""
    size = config.loader.batch_size
    return samples if limit is None else min(samples, count(limit, -(-samples // size)) * size)


def _chosen(config: Config, dataset: Any) -> Order | Updates:
    """Return the object that chooses and orders the training samples."""
    options, samples = config.loader, overfit_samples(config, dataset)
    if samples is not None:
        return FirstOf(Sequential(len(dataset)), samples)
    if options.batch_sampler is not None:
        sampler = _over(options.batch_sampler, "loader.batch_sampler", dataset, config.seed)
        return as_updates(sampler, config.seed)
    if options.sampler is not None:
        return as_order(_over(options.sampler, "loader.sampler", dataset, config.seed), config.seed)
    return default_order(dataset, config.seed, options.shuffle)


def _over(node: dict[str, Any], key: str, dataset: Any, seed: int) -> Any:
    """Build a sampler with the arguments that its signature asks for."""
    offered: dict[str, Callable[[], Any]] = {
        "dataset": lambda: dataset,
        "data_source": lambda: dataset,
        "targets": lambda: dataset.targets,
        "seed": lambda: seed,
    }
    asked = inspect.signature(locate(node["_target_"])).parameters
    given = {n: offer() for n, offer in offered.items() if n in asked and n not in node}
    made = instantiate(node, _key_=key, **given)
    if (reason := wrong_object(key, made)) is not None:
        raise TargetError(Problem(f"{key}._target_", reason))
    return made


def _on_device(
    config: Config, loader: Loader, strategy: Strategy, steps: dict[str, Any]
) -> OnDevice:
    dataset = loader.dataset
    numbered = hasattr(dataset, "__len__") and not isinstance(dataset, Stream)
    return OnDevice(
        loader,
        strategy.device,
        transforms=DeviceTransforms(
            steps, config.seed, _deferred(dataset), len(dataset) if numbered else None
        ),
        non_blocking=config.loader.non_blocking,
        prefetch=config.loader.prefetch_to_device,
    )


def _loader(
    config: Config,
    dataset: Any,
    sampler: UpdateSampler,
    strategy: Strategy,
    on_error: str,
    evaluating: bool = False,
) -> Loader:
    options = config.loader
    values: dict[str, Any] = {name: getattr(options, name) for name in _OF_LOADER}
    if evaluating:
        own = {name: getattr(options.eval, name, None) for name in values}
        values |= {name: value for name, value in own.items() if value is not None}
    for name in ("collate_fn", "worker_init_fn"):
        if values[name]:
            values[name] = instantiate(values[name], _key_=f"loader.{name}")
    if _deferred(dataset):
        values["collate_fn"] = collate_ragged
    # Pinning would create a CUDA context, which a run on the CPU does not need.
    values["pin_memory"] = values["pin_memory"] is not False and strategy.device.type == "cuda"
    check_workers(values["num_workers"])
    return Loader(
        dataset,
        sampler,
        seed=config.seed,
        on_error="raise" if config.data.on_error == "raise" else on_error,  # type: ignore[arg-type]
        max_skipped=config.data.max_skipped,
        kept=kept(config, dataset, strategy),
        **values,
    )


def count(limit: int | float, whole: int) -> int:
    """Return a limit as a count: an int as it is, a float as a fraction of `whole`, at least 1.

    A fraction is read as a decimal and rounded half up: 0.29 of 100 is 29, though the nearest
    binary float times 100 is less.
    """
    if isinstance(limit, int):
        return min(limit, whole)
    share = (Decimal(str(limit)) * whole).to_integral_value(ROUND_HALF_UP)
    return max(1, int(share))
