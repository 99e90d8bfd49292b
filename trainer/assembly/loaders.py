"""From data sets to the loaders of a run: which samples, in which order, on which device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conf.errors import Problem
from conf.schema import Config
from data.loading.collate import collate_ragged
from data.loading.device_transforms import DeviceTransforms
from data.loading.loader import Loader
from data.loading.on_device import OnDevice
from data.orders import FirstOf, Sequential
from data.samplers import as_order, as_updates, default_order
from data.updates import Order, Updates, UpdateSampler
from trainer.assembly.data import Data, build_transforms, deferred_of, kept
from trainer.assembly.parts import wrong_class
from trainer.options import count
from trainer.strategies.strategy import Strategy, check_workers
from trainer.targets.allow_list import TargetError
from trainer.targets.instantiate import instantiate
from trainer.targets.signatures import parameters_of

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
    asked = parameters_of(node["_target_"]) or {}
    given = {n: offer() for n, offer in offered.items() if n in asked and n not in node}
    made = instantiate(node, _key_=key, **given)
    if (reason := wrong_class(key, type(made))) is not None:
        raise TargetError(Problem(f"{key}._target_", reason))
    return made


def _on_device(
    config: Config, loader: Loader, strategy: Strategy, steps: dict[str, Any]
) -> OnDevice:
    return OnDevice(
        loader,
        strategy.device,
        transforms=DeviceTransforms(steps, config.seed, deferred_of(loader.dataset)),
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
    if deferred_of(dataset):
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
