"""From data sets to the loaders of a run: which samples, in which order, on which device."""

from __future__ import annotations

from typing import Any

from conf.errors import Problem
from conf.schema import Config
from data.loading.device_transforms import DeviceTransforms
from data.loading.fetch import collate_ragged
from data.loading.loader import Loader
from data.orders import FirstOf, Sequential, as_order, as_updates, default_order
from data.updates import Order, Updates, UpdateSampler
from trainer.assembly.data import Data, build_transforms, deferred_of, kept
from trainer.assembly.parts import wrong_class
from trainer.options import count
from trainer.strategies.strategy import Strategy, check_workers
from trainer.targets.allow_list import TargetError
from trainer.targets.instantiate import instantiate
from trainer.targets.signatures import parameters_of

# Arguments that a sampler is given if its signature asks for them.
OFFERED = ("dataset", "data_source", "targets", "seed")
_OF_LOADER = (
    *("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "timeout"),
    *("collate_fn", "worker_init_fn", "multiprocessing_context"),
)


def train_loader(config: Config, data: Data, strategy: Strategy) -> Loader:
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
    return _loader(config, dataset, sampler, strategy, "replace", steps)


def eval_loader(
    config: Config,
    dataset: Any,
    strategy: Strategy,
    limit: int | float | None = None,
    samples: int | None = None,
) -> Loader:
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
    return _loader(config, dataset, sampler, strategy, "drop")


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
    for name, made_of in (("batch_sampler", as_updates), ("sampler", as_order)):
        if (node := getattr(options, name)) is None:
            continue
        asked = [n for n in parameters_of(node["_target_"]) or {} if n in OFFERED and n not in node]
        given = dict.fromkeys(asked, dataset)
        given |= {"seed": config.seed} if "seed" in asked else {}
        given |= {"targets": dataset.targets} if "targets" in asked else {}
        sampler = instantiate(node, _key_=f"loader.{name}", **given)
        if (reason := wrong_class(f"loader.{name}", type(sampler))) is not None:
            raise TargetError(Problem(f"loader.{name}._target_", reason))
        return made_of(sampler, config.seed)
    return default_order(dataset, config.seed, options.shuffle)


def _loader(
    config: Config,
    dataset: Any,
    sampler: UpdateSampler,
    strategy: Strategy,
    on_error: str,  # what stands for a sample that cannot be read, if it is skipped
    steps: dict[str, Any] | None = None,  # on the device: of training
) -> Loader:
    options, deferred = config.loader, deferred_of(dataset)
    values: dict[str, Any] = {name: getattr(options, name) for name in _OF_LOADER}
    if steps is None:
        own = {name: getattr(options.eval, name, None) for name in values}
        values |= {name: value for name, value in own.items() if value is not None}
    for name in ("collate_fn", "worker_init_fn"):
        if values[name]:
            values[name] = instantiate(values[name], _key_=f"loader.{name}")
    if deferred:
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
        device=strategy.device,
        transforms=DeviceTransforms(steps or {}, config.seed, deferred),
        non_blocking=options.non_blocking,
        prefetch=options.prefetch_to_device,
        **values,
    )
