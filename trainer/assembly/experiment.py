"""From a configuration to an experiment, top to bottom; or to what evaluates a finished one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError, raise_problems
from regimen.conf.schema import Config
from regimen.conf.schema_trainer import TrainerConfig
from regimen.data.loading.loader import Loader
from regimen.trainer.assembly.check import (
    check_targets,
    monitor_problems,
    name_problems,
    sparse_problems,
)
from regimen.trainer.assembly.data import Data, class_names, data_facts, key_of, open_data
from regimen.trainer.assembly.loaders import (
    eval_loader,
    stage_limit,
    stage_loaders,
    train_loader,
    val_loaders,
)
from regimen.trainer.assembly.parts import (
    Assembly,
    build_strategy,
    with_attributes,
    with_counted_classes,
)
from regimen.trainer.callback import Average, Callback, named_callbacks
from regimen.trainer.components.components import Components, build_components
from regimen.trainer.components.precision import compiled_model
from regimen.trainer.components.setup import set_switches
from regimen.trainer.evaluation import check_metrics
from regimen.trainer.options import count
from regimen.trainer.rng import seed_everything
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.trainer import Trainer


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
    parts.task.check_training(parts.model, data.sets["train"])
    parts.task.check_evaluation(parts.model, _evaluated_sets(config, data))
    trainer = Trainer(
        parts.model,
        parts.task,
        parts.optimizers,
        loader,
        val_loaders(config, data, strategy),
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
    tests = stage_loaders(config, data, strategy, config.data.tests)
    return Experiment(config, data, trainer, tests, switches, checkpointed)


def _evaluated_sets(config: Config, data: Data) -> dict[str, Any]:
    """Return the data sets of validation and test that a run has, by key."""
    stages = [*config.data.validations, *config.data.tests]
    if config.trainer.overfit_batches is not None:
        stages = ["train", *config.data.tests]
    sets = {key_of(stage): data.sets.get(stage) for stage in stages}
    return {key: dataset for key, dataset in sets.items() if dataset is not None}


def build_split(
    config: Config, strategy: Strategy, split: str, classes: Sequence[str] | None = None
) -> tuple[Loader, int | None]:
    """Build the loader of one split for an evaluation; return it and the number of classes.

    `classes` are the run's class names by number. A limit of 0 batches is ignored here: it says
    that the training does not evaluate.
    """
    data = open_data(config, strategy, (split,), classes)
    if data.sets[split] is None:
        others = [s for s in config.data.nodes() if s not in ("train", split)] or ["test"]
        raise ConfigError(
            f"data.{split}", "the data have no such split", f"try split={' or '.join(others)}"
        )
    limit = stage_limit(config, split) or None
    return eval_loader(config, data.sets[split], strategy, limit), data.num_classes


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
