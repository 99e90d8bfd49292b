"""From a configuration to a trainer, in reading order."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from conf.check import parse
from conf.errors import ConfigError, Problem
from conf.schema import Config
from data.loading.on_device import OnDevice
from trainer.build.assembly import Assembly, Known
from trainer.build.check import check_targets
from trainer.build.data import (
    SPLITS,
    Data,
    build_data,
    count,
    eval_loader,
    overfit_samples,
    train_loader,
)
from trainer.build.statistics import data_facts
from trainer.build.strategy import build_strategy
from trainer.callback import Average, Callback
from trainer.lr_schedulers.schedule import warn_of_long_warmups
from trainer.options import Clipping, GradientNoise, TrainerOptions, horizon
from trainer.rng import seed_everything, set_switches
from trainer.strategies.strategy import Strategy
from trainer.targets.allow_list import locate
from trainer.trainer import Trainer
from trainer.update.precision import Precision


@dataclass(frozen=True, slots=True)
class Experiment:
    """What a command needs once a configuration is built."""

    config: Config
    data: Data
    trainer: Trainer
    test_loader: Any  # None where the data have no test split
    switches: dict[str, bool]
    checkpointed: list[str]  # modules whose activations are recomputed

    @property
    def threads(self) -> int:
        """Number of threads that torch uses."""
        return torch.get_num_threads()


def build(
    config: Config | Mapping[str, Any],
    strategy: Strategy | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    config_text: str = "",
) -> Experiment:
    """Build what `config` describes, from the data to the trainer; nothing is written.

    `config` may be what `compose([...]).config` holds; `strategy` (default: the one that `config`
    describes) must be set up.
    `callbacks` come before the configuration's; `config_text` is saved in checkpoints.
    Raises DataError, ConfigError, ModelError and the other errors of the rooms below.
    """
    if not isinstance(config, Config):
        config = parse(dict(config))
        check_targets(config)
    if strategy is None:
        strategy = build_strategy(config)
        strategy.setup()
    options, switches = config.trainer, _set_switches(config)
    seed_everything(config.seed)
    data = _open_data(config, strategy)
    loader, val_loader = train_loader(config, data, strategy), _val_loader(config, data, strategy)
    trainer_options = _options(config, len(loader))
    steps = trainer_options.limit_train_batches or len(loader)
    total = horizon(options.max_epochs, options.max_steps, steps)

    precision = Precision(options.precision, strategy.device.type)
    parts = Assembly(config, Known(data.num_classes, total, steps), strategy, precision)
    checkpointed = parts.checkpointed
    trainer = Trainer(
        parts.model,
        parts.task,
        parts.optimizers,
        loader,
        val_loader,
        parts.schedule,
        strategy,
        precision,
        {**(callbacks or {}), **parts.callbacks},
        trainer_options,
        # A dry run computes a single micro-batch, which is not worth a compilation.
        compiled=_compile(parts.model, False if config.dry_run else options.compile),
        config_text=config_text,
    )
    trainer.data_facts = data_facts(data.sets)
    if strategy.group.is_main:
        warn_of_long_warmups(parts.schedule, total, steps)
    # Dropout masks differ between processes; the weights, drawn above, do not.
    seed_everything(config.seed, strategy.group.rank)
    test_loader = _held_out(config, data.sets["test"], strategy, options.limit_test_batches)
    return Experiment(config, data, trainer, test_loader, switches, checkpointed)


def _set_switches(config: Config) -> dict[str, bool]:
    """Set torch's global switches; return those that the manifest records."""
    options = config.trainer
    torch.autograd.set_detect_anomaly(options.detect_anomaly)
    return set_switches(
        deterministic=options.deterministic,
        cudnn_benchmark=options.cudnn_benchmark,
        tf32=options.tf32 or options.precision == "tf32",
    )


def _val_loader(config: Config, data: Data, strategy: Strategy) -> OnDevice | None:
    """Return the loader of the validation; with `overfit_batches` it reads the training set."""
    few = overfit_samples(config, data.sets["train"])
    validated = data.sets["val"] if few is None else data.sets["train"]
    return _held_out(config, validated, strategy, config.trainer.limit_val_batches, few)


def build_split(config: Config, strategy: Strategy, split: str) -> tuple[OnDevice, int | None]:
    """Build the loader of one split for an evaluation; return it and the number of classes.

    A limit of 0 batches applied to the training run only: it is ignored here.
    """
    limits = {"val": config.trainer.limit_val_batches, "test": config.trainer.limit_test_batches}
    data = _open_data(config, strategy, (split,))
    if data.sets[split] is None:
        other = "val" if split == "test" else "test"
        hint = f"try split={other}"
        raise ConfigError(Problem(f"data.{split}", "the data have no such split", hint))
    return eval_loader(config, data.sets[split], strategy, limits[split] or None), data.num_classes


def build_evaluator(
    config: Config,
    num_classes: int | None,
    strategy: Strategy,
    answering: nn.Module | None = None,
) -> Trainer:
    """Build a trainer for evaluation and prediction, without data.

    `answering` takes the place of the model: an exported file, which has no average either.
    """
    precision = Precision(config.trainer.precision, strategy.device.type)
    parts = Assembly(config, Known(num_classes), strategy, precision)
    every = [parts.model, *parts.task.own_modules().values()]
    trainer = Trainer(
        parts.model,
        parts.task,
        torch.optim.SGD([p for m in every for p in m.parameters()], lr=0.0),  # never stepped
        [],
        strategy=strategy,
        precision=precision,
        callbacks={}
        if answering
        else {n: c for n, c in parts.callbacks.items() if isinstance(c, Average)},
        options=TrainerOptions(seed=config.seed, channels_last=config.trainer.channels_last),
        compiled=answering,
    )
    trainer.setup()
    return trainer


def _open_data(config: Config, strategy: Strategy, splits: tuple[str, ...] = SPLITS) -> Data:
    # Data may be downloaded, by one process at a time; `concurrent = True` on a class opts out.
    nodes = [node for split in splits if (node := getattr(config.data, split))]
    at_once = all(getattr(locate(node["_target_"]), "concurrent", False) for node in nodes)
    with nullcontext() if at_once else strategy.group.one_per_node():
        return build_data(config, splits)


def _held_out(
    config: Config,
    dataset: Any,
    strategy: Strategy,
    limit: int | float | None,
    samples: int | None = None,
) -> OnDevice | None:
    if dataset is None or limit == 0:
        return None
    return eval_loader(config, dataset, strategy, limit, samples)


def _options(config: Config, updates: int) -> TrainerOptions:
    options, noise = config.trainer, config.trainer.gradient_noise
    limit = options.limit_train_batches
    return TrainerOptions(
        seed=config.seed,
        max_epochs=options.max_epochs,
        max_steps=options.max_steps,
        max_time=seconds(options.max_time),
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        clipping=Clipping(
            options.clip_grad_norm,
            options.clip_grad_norm_type,
            options.clip_grad_per_group,
            options.clip_grad_value,
        ),
        gradient_noise=None
        if noise is None
        else GradientNoise(noise.eta, noise.gamma, config.seed),
        on_nonfinite="stop" if options.error_if_nonfinite else options.on_nonfinite,
        max_skipped_in_a_row=options.max_skipped_in_a_row,
        log_every_n_steps=options.log_every_n_steps,
        validate_every_n_epochs=options.validate_every_n_epochs,
        validate_every_n_steps=options.validate_every_n_steps,
        limit_train_batches=None if limit is None else count(limit, updates),
        validate_at_start=options.validate_at_start,
        channels_last=options.channels_last,
    )


def seconds(time: float | str | None) -> float | None:
    """Return a duration, given as seconds or as `hours:minutes:seconds`, in seconds."""
    if not isinstance(time, str):
        return time
    total = 0.0
    for part in time.split(":"):
        total = total * 60 + float(part)
    return total


def _compile(model: nn.Module, choice: bool | dict[str, Any]) -> nn.Module:
    if choice is False:
        return model
    # By default torch switches to dynamic shapes at the second shape: a run resumed after that
    # would use other kernels, and not be exact.
    options = {"dynamic": False} | (choice if isinstance(choice, dict) else {})
    return torch.compile(model, **options)  # type: ignore
