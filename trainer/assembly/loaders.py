"""From open data sets to loaders: which samples, in which order, and how they are read."""

from collections.abc import Iterable
from typing import Any, Literal

from regimen.conf.fields import declared
from regimen.conf.schema import Config, EvalLoaderConfig
from regimen.data.loading.device_transforms import DeviceTransforms, collate_ragged
from regimen.data.loading.loader import DeviceCache, Loader, is_cacheable
from regimen.data.loading.workers import workers_of
from regimen.data.orders import Order, Sequential
from regimen.data.samplers import Updates, UpdateSampler, as_order, as_updates, default_order
from regimen.data.transforms import Pipeline
from regimen.trainer.assembly.data import Data, build_transforms
from regimen.trainer.assembly.parts import OFFERED, build_node
from regimen.trainer.device import pins
from regimen.trainer.options import count
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.targets.instantiate import parameters_of

# Keys of the section `loader` that are arguments of `Loader`.
_LOADER_KEYS = (*declared(EvalLoaderConfig), "worker_init_fn")


def train_loader(config: Config, data: Data, strategy: Strategy) -> Loader:
    """Build the training loader: `loader.batch_size` samples an update over all devices."""
    dataset = data.sets["train"]
    sampler = UpdateSampler(
        _order(config, dataset),
        batch_size=config.loader.batch_size,
        drop_last=config.loader.drop_last,
        gradient_accumulation_steps=config.trainer.micro_batches,
        rank=strategy.group.data_rank,
        world_size=strategy.group.data_size,
    )
    steps = build_transforms(config, "device", data.num_classes)
    return _loader(config, dataset, sampler, strategy, steps)


def _order(config: Config, dataset: Any) -> Order | Updates:
    """Return the object that chooses and orders the training samples."""
    options = config.loader
    samples = overfit_samples(config, dataset)
    if samples is not None:
        return Sequential(samples)
    if options.batch_sampler is not None:
        return as_updates(_sampler(config, dataset, "batch_sampler"), config.seed)
    if options.sampler is not None:
        return as_order(_sampler(config, dataset, "sampler"), config.seed)
    return default_order(dataset, config.seed, options.shuffle)


def _sampler(config: Config, dataset: Any, name: str) -> Any:
    """Build `loader.NAME`, with those of the arguments `OFFERED` that its signature asks for."""
    node = getattr(config.loader, name)
    available = dict.fromkeys(OFFERED, dataset)
    available["seed"] = config.seed
    available["targets"] = getattr(dataset, "targets", None)
    asked = parameters_of(node["_target_"]) or {}
    wanted = asked.keys() - node.keys()
    arguments = {argument: available[argument] for argument in available if argument in wanted}
    return build_node(node, f"loader.{name}", **arguments)


def val_loaders(config: Config, data: Data, strategy: Strategy) -> dict[str, Loader]:
    """Build the loaders of validation by stage: of the training set where a few are overfitted."""
    dataset = data.sets["train"]
    samples = overfit_samples(config, dataset)
    if samples is None:
        return stage_loaders(config, data, strategy, config.data.validations)
    limit = config.trainer.limit_val_batches
    return {"val": eval_loader(config, dataset, strategy, limit, samples)}


def stage_loaders(
    config: Config, data: Data, strategy: Strategy, stages: Iterable[str]
) -> dict[str, Loader]:
    """Build the loaders of stages of evaluation; one without data or batches has none."""
    loaders = {}
    for stage in stages:
        dataset = data.sets.get(stage)
        loader = eval_loader(config, dataset, strategy, stage_limit(config, stage))
        if loader is not None:
            loaders[stage] = loader
    return loaders


def stage_limit(config: Config, stage: str) -> int | float | None:
    """Return how many batches of a stage of evaluation are read, or their fraction; None: all."""
    if stage.partition("/")[0] == "test":
        return config.trainer.limit_test_batches
    return config.trainer.limit_val_batches


def eval_loader(
    config: Config,
    dataset: Any,
    strategy: Strategy,
    limit: int | float | None = None,
    samples: int | None = None,
) -> Any:
    """Build a loader that reads a data set (or its first `samples`) once, in order.

    `limit` is a number of batches of `loader.batch_size`, or a fraction. Each batch is split over
    the processes; no sample is repeated. None without a data set, or with a limit of 0.
    """
    if dataset is None or limit == 0:
        return None
    group = strategy.group
    samples = limited(len(dataset) if samples is None else samples, limit, config)
    sampler = UpdateSampler(
        Sequential(samples),
        batch_size=(config.loader.eval_batch_size or config.loader.batch_size) * group.data_size,
        rank=group.data_rank,
        world_size=group.data_size,
    )
    return _loader(config, dataset, sampler, strategy)


def overfit_samples(config: Config, dataset: Any) -> int | None:
    """Return the number of samples that `trainer.overfit_batches` leaves; None without it."""
    batches = config.trainer.overfit_batches
    return None if batches is None else limited(len(dataset), batches, config)


def limited(samples: int, limit: int | float | None, config: Config) -> int:
    """Return the number of samples in a number, or a fraction, of all batches."""
    size = config.loader.batch_size
    return min(samples, count(limit, -(-samples // size)) * size)


def _loader(
    config: Config,
    dataset: Any,
    sampler: UpdateSampler,
    strategy: Strategy,
    steps: dict[str, Any] | None = None,
) -> Loader:
    """`steps`: the transforms on the device; None for an evaluation."""
    options = config.loader
    arguments: dict[str, Any] = {name: getattr(options, name) for name in _LOADER_KEYS}
    if steps is None:
        for name in declared(EvalLoaderConfig):
            value = getattr(options.eval, name)
            if value is not None:
                arguments[name] = value
    for name in ("collate_fn", "worker_init_fn"):
        if arguments[name]:
            arguments[name] = build_node(arguments[name], f"loader.{name}")
    pipeline = getattr(dataset, "transform", None)
    deferred = pipeline.deferred if isinstance(pipeline, Pipeline) else {}
    if deferred:
        arguments["collate_fn"] = collate_ragged
    # Pinning would wake the accelerator, which a run on the CPU does not need.
    arguments["pin_memory"] = arguments["pin_memory"] is not False and pins(strategy.device)
    arguments["num_workers"] = workers_of(arguments["num_workers"])

    on_error: Literal["raise", "replace", "drop"] = "raise"
    if config.data.on_error == "skip":
        on_error = "drop" if steps is None else "replace"
    cache = None
    if config.data.cache == "device" and not config.dry_run and is_cacheable(type(dataset)):
        cache = DeviceCache(dataset, strategy.device, config.data.cache_bytes)
    return Loader(
        dataset,
        sampler,
        seed=config.seed,
        on_error=on_error,
        max_skipped=config.data.max_skipped,
        kept=cache,
        device=strategy.device,
        transforms=DeviceTransforms(steps or {}, config.seed, deferred),
        non_blocking=options.non_blocking,
        prefetch=options.prefetch_to_device,
        **arguments,
    )
