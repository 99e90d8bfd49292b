"""From a configuration to data sets and loaders."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from conf.errors import ConfigError, Problem
from conf.schema import Config
from data.errors import DataError
from data.loader import Loader
from data.orders import FirstOf, Sequential, Shuffled
from data.sampler import Order, UpdateSampler
from data.transforms import Pipeline
from trainer.instantiate import instantiate
from trainer.strategy import Strategy
from trainer.targets import locate

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, slots=True)
class Data:
    """The data sets of a run; `train` is None when only an evaluation is built."""

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
            }
            for split, dataset in self.sets.items()
            if dataset is not None
        ]


def build_data(config: Config, splits: tuple[str, ...] = SPLITS) -> Data:
    """Open the data sets; raises DataError and ConfigError before a model is built."""
    nodes = {split: getattr(config.data, split) for split in splits}
    sets = {
        split: _open(node, f"data.{split}", _pipeline(config, split)) if node else None
        for split, node in nodes.items()
    }
    if "train" in splits and sets["train"] is None:
        raise DataError("data.train is null: there is nothing to train on")
    return Data(sets, _num_classes(config, sets))


def _pipeline(config: Config, split: str) -> Pipeline:
    stage = "train" if split == "train" else "eval"
    nodes = getattr(config.transforms, stage)
    return Pipeline(
        {
            name: instantiate(node, _key_=f"transforms.{stage}.{name}") if node else None
            for name, node in nodes.items()
        }
    )


def _open(node: dict[str, Any], key: str, pipeline: Pipeline) -> Any:
    # A data set of the user's own may do without our transforms: it then has no such parameter.
    takes_transform = "transform" in inspect.signature(locate(node["_target_"])).parameters
    given = {"transform": pipeline} if takes_transform and "transform" not in node else {}
    return instantiate(node, _key_=key, **given)


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
            raise ConfigError(
                [
                    Problem(
                        "data.num_classes",
                        f"is {declared}, but the labels of data.{split} go from {low} to {high}",
                        hint=f"set data.num_classes={high + 1}"
                        if low >= 0
                        else "labels count from 0",
                    )
                ]
            )
    return declared


def train_loader(config: Config, dataset: Any, strategy: Strategy) -> Loader:
    """Build the loader of updates: `loader.batch_size` samples over all devices."""
    options = config.loader
    sampler = UpdateSampler(
        _order(config, dataset),
        batch_size=options.batch_size,
        drop_last=options.drop_last,
        gradient_accumulation_steps=config.trainer.gradient_accumulation_steps,
        rank=strategy.rank,
        world_size=strategy.world_size,
    )
    return _loader(config, dataset, sampler, "replace")


def eval_loader(config: Config, dataset: Any, strategy: Strategy) -> Loader:
    """Build the loader that reads a data set once, in order, shared among the processes."""
    size = (config.loader.eval_batch_size or config.loader.batch_size) * strategy.world_size
    sampler = UpdateSampler(
        Sequential(len(dataset)),
        batch_size=size,
        rank=strategy.rank,
        world_size=strategy.world_size,
    )
    return _loader(config, dataset, sampler, "drop", evaluating=True)


def _order(config: Config, dataset: Any) -> Order:
    whole = (
        Shuffled(len(dataset), config.seed) if config.loader.shuffle else Sequential(len(dataset))
    )
    few = config.trainer.overfit_batches
    if few is None:
        return whole
    batches = -(-len(dataset) // config.loader.batch_size)
    return FirstOf(Sequential(len(dataset)), count(few, batches) * config.loader.batch_size)


def _loader(
    config: Config, dataset: Any, sampler: UpdateSampler, on_error: str, evaluating: bool = False
) -> Loader:
    options = config.loader
    values: dict[str, Any] = {
        name: getattr(options, name)
        for name in (
            "num_workers",
            "pin_memory",
            "prefetch_factor",
            "persistent_workers",
            "timeout",
            "collate_fn",
            "multiprocessing_context",
        )
    }
    if evaluating:
        own = {name: getattr(options.eval, name) for name in values}
        values |= {name: value for name, value in own.items() if value is not None}
    if values["collate_fn"]:
        values["collate_fn"] = instantiate(values["collate_fn"], _key_="loader.collate_fn")
    values["pin_memory"] = True if values["pin_memory"] is None else values["pin_memory"]
    return Loader(
        dataset,
        sampler,
        seed=config.seed,
        on_error="raise" if config.data.on_error == "raise" else on_error,  # type: ignore[arg-type]
        max_skipped=config.data.max_skipped,
        **values,
    )


def count(limit: int | float, whole: int) -> int:
    """Return a limit as a number: an int is one, a float a fraction of `whole`, at least 1."""
    return min(limit, whole) if isinstance(limit, int) else max(1, int(limit * whole))
