"""From a configuration to a trainer, in reading order; and its loaders."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError, lacks_memory, raise_problems
from regimen.conf.fields import declared
from regimen.conf.schema import Config, EvalLoaderConfig
from regimen.conf.schema_trainer import TrainerConfig
from regimen.data.loading.device_transforms import DeviceTransforms, collate_ragged, mixes_samples
from regimen.data.loading.loader import DeviceCache, Loader, can_be_kept
from regimen.data.loading.workers import workers_of
from regimen.data.orders import Order, Sequential
from regimen.data.samplers import Updates, UpdateSampler, as_order, as_updates, default_order
from regimen.data.transforms import Pipeline
from regimen.trainer.assembly.check import check_targets, monitor_problems, name_problems
from regimen.trainer.assembly.data import (
    Data,
    build_transforms,
    class_names,
    data_facts,
    open_data,
)
from regimen.trainer.assembly.parts import (
    OFFERED,
    Assembly,
    build_node,
    build_strategy,
    with_counted_classes,
)
from regimen.trainer.assembly.summary import state_bytes
from regimen.trainer.callback import Average, Callback
from regimen.trainer.device import (
    empty_caches,
    is_async,
    peak_rss,
    pins,
    reset_peak_rss,
    spare_memory,
)
from regimen.trainer.errors import ResourceError, describe_value
from regimen.trainer.evaluation import evaluate
from regimen.trainer.options import count, horizon
from regimen.trainer.rng import seed_everything, set_switches
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.targets.instantiate import parameters_of
from regimen.trainer.trainer import Trainer
from regimen.trainer.update.precision import compiled_model

logger = logging.getLogger("regimen")

_OF_LOADER = (*declared(EvalLoaderConfig), "worker_init_fn")


class Experiment(NamedTuple):
    """What a command needs once a configuration is built."""

    config: Config
    data: Data
    trainer: Trainer
    test_loaders: dict[str, Loader]  # by stage; empty where the data have no test split
    switches: dict[str, bool]
    checkpointed: list[str]  # modules whose activations are recomputed


def build(
    config: Config | Mapping[str, Any],
    strategy: Strategy | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    config_text: str = "",
    classes: Sequence[str] | None = None,
) -> Experiment:
    """Build what `config` describes, from the data to the trainer; nothing is written.

    `config` may be what `compose([...]).config` holds; `strategy` (default: the configuration's)
    must be set up. `callbacks` come before its own; `config_text` is saved in checkpoints.
    `classes` are the names of a run that is gone on with.
    Raises DataError, ConfigError, ModelError and the other errors of the rooms below.
    """
    if not isinstance(config, Config):
        config = parse(dict(config))
        check_targets(config)
    if strategy is None:
        strategy = build_strategy(config)
        strategy.setup()
    options = config.trainer
    torch.autograd.set_detect_anomaly(options.detect_anomaly)
    switches = set_switches(options)
    seed_everything(config.seed)
    data = open_data(config, strategy, classes=classes)
    config = with_counted_classes(config, data.num_classes)
    loader = train_loader(config, data, strategy)
    steps = count(options.limit_train_batches, len(loader))

    lengths = horizon(options, steps), steps
    names = class_names(data.sets)
    parts = Assembly(config, strategy, data.num_classes, *lengths, names)
    checkpointed = parts.checkpointed
    # Metrics of classes have their names only now.
    raise_problems([*name_problems(parts.task), *monitor_problems(config, parts.task)])
    trainer = Trainer(
        parts.model,
        parts.task,
        parts.optimizers,
        loader,
        _val_loaders(config, data, strategy),
        parts.schedule,
        strategy,
        parts.precision,
        {**(callbacks or {}), **parts.callbacks},
        replace(
            options,
            seed=config.seed,
            on_nonfinite="stop" if options.error_if_nonfinite else options.on_nonfinite,
            limit_val_batches=None,  # the loader has no more
        ),
        # Not for the one batch of a dry run.
        compiled=compiled_model(parts.model, not config.dry_run and options.compile, parts.regions),
        config_text=config_text,
        verbose=False,  # the configuration names what shows the progress
    )
    trainer.data_facts = data_facts(data.sets)
    # Dropout masks differ between processes; the weights, drawn above, do not.
    seed_everything(config.seed, strategy.group.data_rank)
    trainer.random.keep()
    tests = _test_loaders(config, data, strategy)
    return Experiment(config, data, trainer, tests, switches, checkpointed)


def _val_loaders(config: Config, data: Data, strategy: Strategy) -> dict[str, Loader | None]:
    """Build the loaders of validation by stage: of the training set where a few are overfitted."""
    few, limit = overfit_samples(config, data.sets["train"]), config.trainer.limit_val_batches
    own = {stage: data.sets[stage] for stage in config.data.validations}
    sets = own if few is None else {"val": data.sets["train"]}
    return {stage: eval_loader(config, one, strategy, limit, few) for stage, one in sets.items()}


def _test_loaders(config: Config, data: Data, strategy: Strategy) -> dict[str, Loader]:
    """Build the loaders of the test sets by stage, of those that there are."""
    limit = config.trainer.limit_test_batches
    sets = {stage: data.sets.get(stage) for stage in config.data.tests}
    made = {stage: eval_loader(config, one, strategy, limit) for stage, one in sets.items()}
    return {stage: loader for stage, loader in made.items() if loader is not None}


def fitting_steps(config: Config, strategy: Strategy) -> int:
    """Return the fewest `gradient_accumulation_steps`, a power of two, that memory has room for.

    An experiment that is built for the trial alone computes the gradients of its first micro-batch,
    beside what the run holds later: on an accelerator they fit, or it is out of memory; on a CPU
    the peak of the process is held against `trainer.memory_limit`. Raises ResourceError where a
    single sample does not fit, where an evaluation batch does not, and where graphs that are
    recorded allow no second micro-batch.
    """
    steps, group = 1, strategy.group
    while True:
        options = replace(config.trainer, gradient_accumulation_steps=steps)
        lacking, coupled = _tried(replace(config, trainer=options), strategy)
        empty_caches()
        if not any(group.gather(lacking)):
            break
        if steps * strategy.data_parallel_size >= config.loader.batch_size:
            raise ResourceError(
                f"trainer.gradient_accumulation_steps=auto: one sample does not fit: {lacking}"
            )
        steps *= 2
        if config.trainer.records_graphs:
            raise ResourceError(
                "trainer.gradient_accumulation_steps=auto: one micro-batch does not fit, and the "
                "graphs that trainer.compile.mode records overwrite gradients that are added up: "
                "lower loader.batch_size, or set trainer.compile=true, which records none"
            )
    if group.is_main:
        matters = f"; the number matters, for {', '.join(coupled)} follow the split" * bool(coupled)
        logger.info("trainer.gradient_accumulation_steps=auto: %d%s", steps, matters)
    return steps


def _tried(config: Config, strategy: Strategy) -> tuple[str | None, list[str]]:
    """Return what the first micro-batch lacks, and what depends on the split."""
    seed_everything(config.seed)
    trainer = build(config, strategy).trainer
    states = [state_bytes(optimizer) or 0 for _, optimizer in trainer.optimizers.items()]
    limit, shards = config.trainer.memory_limit, strategy.mesh.shards
    later = sum(states) // shards + _average_bytes(trainer)
    trainer.wrapped.train()
    reset_peak_rss()
    lacking, what = None, "its transforms"
    try:
        held = torch.empty(later, dtype=torch.uint8, device=strategy.device)
        # For what no trial shows: other shapes, the gaps between freed blocks, collectives.
        spare = torch.empty(
            spare_memory(strategy.device), dtype=torch.uint8, device=strategy.device
        )
        micro_batch = next(trainer.draw(0))[0]
        what = describe_value(micro_batch.batch)
        trainer.updater.dry_run_backward([micro_batch])
        del spare
        if is_async(strategy.device):
            _evaluate_a_batch(trainer, config)
        del held
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        lacking = f"{what}: {str(error).partition('.')[0]}"
    trainer.train_loader.close()
    if limit is not None and not is_async(strategy.device):
        taken = (peak_rss() + later) / 2**30
        if taken > limit:
            lacking = f"{what} takes {taken:.2f} GiB, trainer.memory_limit is {limit:g}"
    return lacking, follows_split(trainer)


def _average_bytes(trainer: Trainer) -> int:
    """Return the bytes of the averages of weights that a run holds from its first update on."""
    shards = trainer.strategy.mesh.shards
    parameters = sum(p.nbytes for p in trainer.model.parameters()) // shards
    one = parameters + sum(b.nbytes for b in trainer.model.buffers())
    return one * sum(1 for callback in trainer.callbacks.values() if isinstance(callback, Average))


def _evaluate_a_batch(trainer: Trainer, config: Config) -> None:
    """Evaluate one batch of each validation set. Raises ResourceError where it does not fit.

    It is not split into micro-batches, so that more of them would not help.
    """
    size = config.loader.eval_batch_size or config.loader.batch_size
    for stage, loader in trainer.val_loaders.items():
        try:
            evaluate(trainer, loader, stage, 1, 0)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            raise ResourceError(
                f"trainer.gradient_accumulation_steps=auto: a batch of {size} samples of {stage} "
                "does not fit: set loader.eval_batch_size to less"
            ) from error
        finally:
            loader.close()


def follows_split(trainer: Trainer) -> list[str]:
    """Return what makes an update depend on its split into micro-batches, the exceptions of I3."""
    layers = list(trainer.model.modules())
    mixing = trainer.train_loader.transforms.steps.values()
    coupling = {
        "BatchNorm's statistics": any(hasattr(m, "running_mean") for m in layers),
        "dropout masks": any("Dropout" in type(m).__name__ and getattr(m, "p", 1) for m in layers),
        "mixed samples": any(mixes_samples(step.transform) for step in mixing),
    }
    return [name for name, found in coupling.items() if found]


def build_split(
    config: Config, strategy: Strategy, split: str, classes: Sequence[str] | None = None
) -> tuple[Loader, int | None]:
    """Build the loader of one split for an evaluation; return it and the number of classes.

    `classes` are the names of the run, which give the numbers. A limit of 0 batches applied to the
    training run only: it is ignored here.
    """
    data, options = open_data(config, strategy, (split,), classes), config.trainer
    if data.sets[split] is None:
        others = [s for s in config.data.nodes() if s not in ("train", split)] or ["test"]
        hint = f"try split={' or '.join(others)}"
        raise ConfigError(f"data.{split}", "the data have no such split", hint)
    is_test = split.partition("/")[0] == "test"
    limit = options.limit_test_batches if is_test else options.limit_val_batches
    return eval_loader(config, data.sets[split], strategy, limit or None), data.num_classes


def build_evaluator(
    config: Config,
    num_classes: int | None,
    strategy: Strategy,
    answering: nn.Module | None = None,
    classes: Sequence[str] | None = None,
) -> Trainer:
    """Build a trainer for evaluation and prediction, without data.

    `answering` takes the place of the model: an exported file, which has no average either.
    `classes` are the names of the run.
    """
    config = with_counted_classes(config, num_classes)
    parts = Assembly(config, strategy, num_classes, classes=classes)
    every = [parts.model, *parts.task.own_modules().values()]
    callbacks = {} if answering else parts.callbacks
    trainer = Trainer(
        parts.model,
        parts.task,
        torch.optim.SGD([p for m in every for p in m.parameters()], lr=0.0),  # never stepped
        [],
        strategy=strategy,
        precision=parts.precision,
        callbacks={n: c for n, c in callbacks.items() if isinstance(c, Average)},
        options=TrainerConfig(seed=config.seed, channels_last=config.trainer.channels_last),
        compiled=answering,
    )
    trainer.setup()
    return trainer


def train_loader(config: Config, data: Data, strategy: Strategy) -> Loader:
    """Build the training loader: `loader.batch_size` samples an update over all devices."""
    options, dataset = config.loader, data.sets["train"]
    sampler = UpdateSampler(
        _chosen(config, dataset),
        batch_size=options.batch_size,
        drop_last=options.drop_last,
        gradient_accumulation_steps=config.trainer.micro_batches,
        rank=strategy.group.data_rank,
        world_size=strategy.group.data_size,
    )
    steps = build_transforms(config, "device", data.num_classes)
    return _loader(config, dataset, sampler, strategy, "replace", steps)


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
    return _loader(config, dataset, sampler, strategy, "drop")


def overfit_samples(config: Config, dataset: Any) -> int | None:
    """Return the number of samples that `trainer.overfit_batches` leaves; None without it."""
    few = config.trainer.overfit_batches
    return None if few is None else limited(len(dataset), few, config)


def limited(samples: int, limit: int | float | None, config: Config) -> int:
    """Return the number of samples in a number, or a fraction, of all batches."""
    size = config.loader.batch_size
    return min(samples, count(limit, -(-samples // size)) * size)


def _chosen(config: Config, dataset: Any) -> Order | Updates:
    """Return the object that chooses and orders the training samples."""
    options, samples = config.loader, overfit_samples(config, dataset)
    if samples is not None:
        return Sequential(samples)
    for name, made_of in (("batch_sampler", as_updates), ("sampler", as_order)):
        if (node := getattr(options, name)) is None:
            continue
        known = {"seed": config.seed, "targets": getattr(dataset, "targets", None)}
        asked = [n for n in parameters_of(node["_target_"]) or {} if n in OFFERED and n not in node]
        given = {n: known.get(n, dataset) for n in asked}
        return made_of(build_node(node, f"loader.{name}", **given), config.seed)
    return default_order(dataset, config.seed, options.shuffle)


def _loader(
    config: Config,
    dataset: Any,
    sampler: UpdateSampler,
    strategy: Strategy,
    on_error: str,  # what stands for a sample that cannot be read, if it is skipped
    steps: dict[str, Any] | None = None,  # on the device: of training
) -> Loader:
    options, pipeline = config.loader, getattr(dataset, "transform", None)
    deferred = pipeline.deferred if isinstance(pipeline, Pipeline) else {}
    keeps = config.data.cache == "device" and not config.dry_run and can_be_kept(type(dataset))
    values: dict[str, Any] = {name: getattr(options, name) for name in _OF_LOADER}
    if steps is None:
        own = {name: getattr(options.eval, name, None) for name in values}
        values |= {name: value for name, value in own.items() if value is not None}
    for name in ("collate_fn", "worker_init_fn"):
        if values[name]:
            values[name] = build_node(values[name], f"loader.{name}")
    if deferred:
        values["collate_fn"] = collate_ragged
    # Pinning would wake the accelerator, which a run on the CPU does not need.
    values["pin_memory"] = values["pin_memory"] is not False and pins(strategy.device)
    values["num_workers"] = workers_of(values["num_workers"])
    return Loader(
        dataset,
        sampler,
        seed=config.seed,
        on_error="raise" if config.data.on_error == "raise" else on_error,  # type: ignore[arg-type]
        max_skipped=config.data.max_skipped,
        kept=DeviceCache(dataset, strategy.device, config.data.cache_bytes) if keeps else None,
        device=strategy.device,
        transforms=DeviceTransforms(steps or {}, config.seed, deferred),
        non_blocking=options.non_blocking,
        prefetch=options.prefetch_to_device,
        **values,
    )
