"""From a configuration to a trainer, top to bottom, and to its loaders."""

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
from regimen.data.loading.loader import DeviceCache, Loader, is_cacheable
from regimen.data.loading.workers import workers_of
from regimen.data.orders import Order, Sequential
from regimen.data.samplers import Updates, UpdateSampler, as_order, as_updates, default_order
from regimen.data.transforms import Pipeline
from regimen.trainer.assembly.check import (
    check_targets,
    monitor_problems,
    name_problems,
    sparse_problems,
)
from regimen.trainer.assembly.data import (
    Data,
    build_transforms,
    class_names,
    data_facts,
    key_of,
    open_data,
)
from regimen.trainer.assembly.parts import (
    OFFERED,
    Assembly,
    build_node,
    build_strategy,
    with_attributes,
    with_counted_classes,
)
from regimen.trainer.assembly.summary import state_bytes
from regimen.trainer.callback import Average, Callback, named_callbacks
from regimen.trainer.components.components import Components, build_components
from regimen.trainer.components.precision import compiled_model
from regimen.trainer.components.setup import set_switches
from regimen.trainer.device import (
    empty_caches,
    is_async,
    peak_rss,
    pins,
    reset_peak_rss,
    spare_memory,
)
from regimen.trainer.errors import ResourceError, describe_value
from regimen.trainer.evaluation import check_metrics, evaluate
from regimen.trainer.options import count
from regimen.trainer.rng import seed_everything
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.targets.instantiate import parameters_of
from regimen.trainer.trainer import Trainer

logger = logging.getLogger("regimen")

# Keys of the section `loader` that are arguments of `Loader`.
_LOADER_KEYS = (*declared(EvalLoaderConfig), "worker_init_fn")


class Experiment(NamedTuple):
    """What a command needs once a configuration is built."""

    config: Config
    data: Data
    trainer: Trainer
    test_loaders: dict[str, Loader]  # by stage; empty if the data have no test split
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
    `classes` are the class names of a run that is resumed.
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
    config = with_attributes(config, data.attributes)
    config = with_counted_classes(config, data.num_classes)
    loader = train_loader(config, data, strategy)

    parts = Assembly(
        config,
        strategy,
        data.num_classes,
        batches=count(options.limit_train_batches, len(loader)),
        classes=class_names(data.sets),
    )
    # Builds the model, the first part that draws random numbers.
    checkpointed = parts.checkpointed
    # The names of metrics of single classes are known only with the data.
    raise_problems(
        [
            *name_problems(parts.task),
            *monitor_problems(config, parts.task),
            # Those of a model that could not be built before the data were open.
            *sparse_problems(parts.optimizers, parts.model, options),
        ]
    )
    parts.task.check_evaluation(parts.model, _evaluated(config, data))
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
        data_facts=data_facts(data.sets),
    )
    # Dropout masks differ between processes; the weights, drawn above, do not.
    seed_everything(config.seed, strategy.group.data_rank)
    trainer.random.keep()
    tests = _test_loaders(config, data, strategy)
    return Experiment(config, data, trainer, tests, switches, checkpointed)


def _evaluated(config: Config, data: Data) -> dict[str, Any]:
    """Return the data sets of validation and test that a run has, by key."""
    if config.trainer.overfit_batches is not None:
        stages = ["train", *config.data.tests]
    else:
        stages = [*config.data.validations, *config.data.tests]
    sets = {key_of(stage): data.sets.get(stage) for stage in stages}
    return {key: dataset for key, dataset in sets.items() if dataset is not None}


def _val_loaders(config: Config, data: Data, strategy: Strategy) -> dict[str, Loader | None]:
    """Build the loaders of validation by stage: of the training set where a few are overfitted."""
    limit = config.trainer.limit_val_batches
    samples = overfit_samples(config, data.sets["train"])
    if samples is not None:
        return {"val": eval_loader(config, data.sets["train"], strategy, limit, samples)}
    stages = config.data.validations
    return {stage: eval_loader(config, data.sets[stage], strategy, limit) for stage in stages}


def _test_loaders(config: Config, data: Data, strategy: Strategy) -> dict[str, Loader]:
    """Build the loaders of the test sets that exist, by stage."""
    loaders = {}
    for stage in config.data.tests:
        dataset = data.sets.get(stage)
        loader = eval_loader(config, dataset, strategy, config.trainer.limit_test_batches)
        if loader is not None:
            loaders[stage] = loader
    return loaders


def find_accumulation_steps(config: Config, strategy: Strategy) -> int:
    """Return the fewest `gradient_accumulation_steps`, a power of two, that memory has room for.

    Builds the experiment for a trial, which computes the gradients of its first micro-batch while
    the memory that the run needs later is reserved. On an accelerator the trial runs out of memory
    or not; on a CPU the peak of the process is compared with `trainer.memory_limit`.
    Collective: all processes try, and take the same number.
    Raises ResourceError where a single sample does not fit, where an evaluation batch does not, and
    where `trainer.compile.mode` records graphs, which allow no second micro-batch.
    """
    steps = 1
    while True:
        options = replace(config.trainer, gradient_accumulation_steps=steps)
        failure, dependent = _tried(replace(config, trainer=options), strategy)
        empty_caches()
        # Collective: if it does not fit on one process, all go on with smaller micro-batches.
        if not any(strategy.group.gather(failure)):
            break
        if steps * strategy.data_parallel_size >= config.loader.batch_size:
            raise ResourceError(
                f"trainer.gradient_accumulation_steps=auto: one sample does not fit: {failure}"
            )
        steps *= 2
        if config.trainer.records_graphs:
            raise ResourceError(
                "trainer.gradient_accumulation_steps=auto: one micro-batch does not fit, and the "
                "graphs that trainer.compile.mode records overwrite gradients that are added up: "
                "lower loader.batch_size, or set trainer.compile=true, which records none"
            )
    if strategy.group.is_main:
        remark = ""
        if dependent:
            remark = f"; the number matters, for {', '.join(dependent)} follow the split"
        logger.info("trainer.gradient_accumulation_steps=auto: %d%s", steps, remark)
    return steps


def _tried(config: Config, strategy: Strategy) -> tuple[str | None, list[str]]:
    """Try the first micro-batch; return why it does not fit, and what depends on the split."""
    seed_everything(config.seed)
    trainer = build(config, strategy).trainer
    states = [state_bytes(optimizer) or 0 for _, optimizer in trainer.optimizers.items()]
    later = sum(states) // strategy.mesh.shards + _average_bytes(trainer)
    trainer.training_model.train()
    reset_peak_rss()
    failure = None
    description = "its transforms"  # what has run out of memory, before there is a batch
    try:
        # The memory of optimizer state and averages, which the first update allocates.
        reserved = torch.empty(later, dtype=torch.uint8, device=strategy.device)
        # For what the trial does not show: other shapes, gaps between freed blocks, collectives.
        spare = torch.empty(
            spare_memory(strategy.device), dtype=torch.uint8, device=strategy.device
        )
        micro_batch = next(trainer.draw(0))[0]
        description = describe_value(micro_batch.batch)
        trainer.updater.dry_run_backward([micro_batch])
        del spare
        if is_async(strategy.device):
            _evaluate_a_batch(trainer, config)
        del reserved
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        failure = f"{description}: {str(error).partition('.')[0]}"
    trainer.train_loader.close()
    limit = config.trainer.memory_limit
    if limit is not None and not is_async(strategy.device):
        taken = (peak_rss() + later) / 2**30
        if taken > limit:
            failure = f"{description} takes {taken:.2f} GiB, trainer.memory_limit is {limit:g}"
    return failure, accumulation_sensitive_parts(trainer)


def _average_bytes(trainer: Trainer) -> int:
    """Return the bytes of the averages of weights that a run holds from its first update on."""
    averages = sum(1 for callback in trainer.callbacks.values() if isinstance(callback, Average))
    parameters = sum(p.nbytes for p in trainer.model.parameters())
    buffers = sum(b.nbytes for b in trainer.model.buffers())  # on every process, as a whole
    return averages * (parameters // trainer.strategy.mesh.shards + buffers)


def _evaluate_a_batch(trainer: Trainer, config: Config) -> None:
    """Evaluate one batch of each validation set. Raises ResourceError where it does not fit.

    More micro-batches would not help: an evaluation batch is not split into them.
    """
    size = config.loader.eval_batch_size or config.loader.batch_size
    for stage, loader in trainer.val_loaders.items():
        try:
            evaluate(trainer.components, loader, stage, 1, 0, trainer.hooks)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            raise ResourceError(
                f"trainer.gradient_accumulation_steps=auto: a batch of {size} samples of {stage} "
                "does not fit: set loader.eval_batch_size to less"
            ) from error
        finally:
            loader.close()


def accumulation_sensitive_parts(trainer: Trainer) -> list[str]:
    """Return what makes an update depend on its split into micro-batches, the exceptions of I3."""
    layers = list(trainer.model.modules())
    device_steps = trainer.train_loader.transforms.steps.values()
    dependent = []
    if any(hasattr(layer, "track_running_stats") for layer in layers):
        dependent.append("BatchNorm's statistics")
    if any("Dropout" in type(layer).__name__ and getattr(layer, "p", 1) for layer in layers):
        dependent.append("dropout masks")
    if any(mixes_samples(step.transform) for step in device_steps):
        dependent.append("mixed samples")
    return dependent


def build_split(
    config: Config, strategy: Strategy, split: str, classes: Sequence[str] | None = None
) -> tuple[Loader, int | None]:
    """Build the loader of one split for an evaluation; return it and the number of classes.

    `classes` are the run's class names by number. A limit of 0 batches is ignored here: it says
    that the training does not evaluate.
    """
    data = open_data(config, strategy, (split,), classes)
    dataset = data.sets[split]
    if dataset is None:
        others = [s for s in config.data.nodes() if s not in ("train", split)] or ["test"]
        raise ConfigError(
            f"data.{split}", "the data have no such split", f"try split={' or '.join(others)}"
        )
    limit = config.trainer.limit_val_batches
    if split.partition("/")[0] == "test":
        limit = config.trainer.limit_test_batches
    return eval_loader(config, dataset, strategy, limit or None), data.num_classes


def build_evaluator(
    config: Config,
    num_classes: int | None,
    strategy: Strategy,
    answering: nn.Module | None = None,
    classes: Sequence[str] | None = None,
) -> Components:
    """Build what evaluates and predicts: a model and its task, without data and optimizers.

    `answering` takes the place of the model: an exported file, which has no average either.
    `classes` are the names of the run.
    """
    config = with_counted_classes(config, num_classes)
    parts = Assembly(config, strategy, num_classes, classes=classes)
    averages: dict[str, Callback] = {}
    if answering is None:
        averages = {n: c for n, c in parts.callbacks.items() if isinstance(c, Average)}
    check_metrics(parts.task.metrics(), strategy)
    return build_components(
        parts.model,
        parts.task,
        strategy=strategy,
        precision=parts.precision,
        callbacks=named_callbacks(averages),
        options=TrainerConfig(seed=config.seed, channels_last=config.trainer.channels_last),
        compiled=answering,
    )


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
    batches = config.trainer.overfit_batches
    return None if batches is None else limited(len(dataset), batches, config)


def limited(samples: int, limit: int | float | None, config: Config) -> int:
    """Return the number of samples in a number, or a fraction, of all batches."""
    size = config.loader.batch_size
    return min(samples, count(limit, -(-samples // size)) * size)


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


def _loader(
    config: Config,
    dataset: Any,
    sampler: UpdateSampler,
    strategy: Strategy,
    on_error: str,  # what stands for a sample that cannot be read, if it is skipped
    steps: dict[str, Any] | None = None,  # the transforms on the device; None for an evaluation
) -> Loader:
    options = config.loader
    arguments: dict[str, Any] = {name: getattr(options, name) for name in _LOADER_KEYS}
    if steps is None:
        for name in arguments:
            value = getattr(options.eval, name, None)
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

    cache = None
    if config.data.cache == "device" and not config.dry_run and is_cacheable(type(dataset)):
        cache = DeviceCache(dataset, strategy.device, config.data.cache_bytes)
    return Loader(
        dataset,
        sampler,
        seed=config.seed,
        on_error="raise" if config.data.on_error == "raise" else on_error,  # type: ignore[arg-type]
        max_skipped=config.data.max_skipped,
        kept=cache,
        device=strategy.device,
        transforms=DeviceTransforms(steps or {}, config.seed, deferred),
        non_blocking=options.non_blocking,
        prefetch=options.prefetch_to_device,
        **arguments,
    )
