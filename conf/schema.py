# ruff: noqa: RUF009 -- `option` returns a dataclasses.field, which is what belongs there
"""All keys of a configuration whose words are ours: types, defaults, limits, meanings.

Nodes that the user extends (`model`, `task`, `optimizer`, ...) are open dicts with a `_target_`,
whose arguments are held against its signature later (`trainer/targets/signatures.py`).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from conf.fields import REQUIRED, option, plain_name, plain_path
from conf.schema_loader import (
    DataConfig,
    EvalLoaderConfig,
    LoaderConfig,
    Named,
    Node,
    TransformsConfig,
)
from conf.schema_strategy import StrategyConfig
from conf.schema_trainer import GradientNoiseConfig, TrainerConfig

__all__ = [
    "Config",
    "DataConfig",
    "EvalLoaderConfig",
    "GradientNoiseConfig",
    "LoaderConfig",
    "LrSchedulerWords",
    "OptimizerWords",
    "StrategyConfig",
    "SweepConfig",
    "TrainerConfig",
    "TransformsConfig",
]


@dataclass(kw_only=True, slots=True)
class OptimizerWords:
    """Keys that nearly every optimizer has; checked wherever they occur in `optimizer`."""

    lr: float | None = option(None, "learning rate", at_least=0)
    weight_decay: float | None = option(None, "weight decay", at_least=0)
    param_groups: dict[str, Any] | list[Any] | None = option(
        None, "ordered rules: which parameters get other hyper-parameters"
    )
    optimizers: dict[str, dict[str, Any] | None] | None = option(
        None, "several optimizers by name, instead of one"
    )
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class LrSchedulerWords:
    """Keys of `lr_scheduler` that are not the target's."""

    interval: Literal["step", "epoch"] = option("step", "when it advances")
    monitor: str | None = option(None, "metric that a plateau scheduler watches")
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class TrialConfig:
    """The trial of a study that a job is; a search tells each of its jobs."""

    storage: str = option(REQUIRED, "where the study is stored")
    study: str = option(REQUIRED, "its name")
    number: int = option(REQUIRED, "of the trial", at_least=0)


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """What `train -m` does with its jobs; from `n_trials` on, a search (`sweep=optuna`)."""

    jobs: int | None = option(
        None, "how many run at a time; null = 1 here, all on a cluster", at_least=1, at_most=1024
    )
    jobs_per_device: int = option(1, "how many of them share a GPU", at_least=1)
    fail_fast: bool = option(False, "start no further job once one has failed")
    retries: int = option(
        0, "further starts of a job lost to a signal or to a lack of memory", at_least=0
    )
    launcher: Literal["local", "submitit", "ray"] = option(
        "local", "where jobs run: here, on a SLURM cluster, on a Ray cluster"
    )
    launcher_options: dict[str, Any] = option(
        {}, "what submitit's executor, or a Ray task, is asked for"
    )
    group_by: str | list[str] | None = option(
        None, "swept keys, such as seed, over which mean and deviation are taken"
    )
    report: bool = option(True, "end with pictures and a page, `report.html`")
    n_trials: int = option(20, "jobs of the study, by whoever runs them", at_least=1)
    sampler: Literal["tpe", "random", "cmaes", "grid", "qmc"] = option(
        "tpe", "how the next values are chosen"
    )
    sampler_options: dict[str, Any] = option({}, "arguments of Optuna's sampler")
    pruner: Literal["median", "asha", "hyperband"] | None = option(
        None, "which jobs end early, by their validations; null: none"
    )
    pruner_options: dict[str, Any] = option({}, "arguments of Optuna's pruner")
    params: dict[str, str | dict[str, Any]] = option(
        {}, "what each key may be, as on a command line, or {values, step, when}"
    )
    enqueue: list[dict[str, Any]] = option([], "values to begin with: a job for each entry")
    storage: str | None = option(
        None, "the study: a database's URL, an SQLite file (.db) or a journal", check=plain_path
    )
    trial: TrialConfig | None = option(None, "set by a search for each of its jobs")


@dataclass(kw_only=True, slots=True)
class Config:
    """The whole configuration."""

    name: str = option(REQUIRED, "of the run, which goes to `runs/NAME/TIME`", check=plain_name)
    seed: int = option(0, "of order, augmentation and weights", at_least=0, at_most=2**32 - 1)
    run_dir: str | None = option(None, "put the run exactly here", check=plain_path)
    resume: str | None = option(None, "auto, or the path of a run or checkpoint", check=plain_path)
    resume_policy: Literal["error", "keep", "override"] = option(
        "error", "what a changed config does on resume: refuse, use the old values, use the new"
    )
    dry_run: bool | None = option(
        False,
        "check and build all, try one micro-batch of each split, print the plan, train nothing",
    )
    model: Node = option(REQUIRED, "the network", node=True)
    data: DataConfig = option(REQUIRED, "the data sets")
    transforms: TransformsConfig = option(TransformsConfig, "what is done to samples and batches")
    loader: LoaderConfig = option(LoaderConfig, "how samples become batches")
    task: Node = option(REQUIRED, "what a step computes: loss and metrics", node=True)
    optimizer: Node = option(REQUIRED, "a torch optimizer, or several", words=OptimizerWords)
    lr_scheduler: Node | None = option(None, "the learning rate's course", words=LrSchedulerWords)
    trainer: TrainerConfig = option(TrainerConfig, "the loop")
    strategy: StrategyConfig = option(StrategyConfig, "the devices")
    callbacks: Named = option({}, "named, called in this order; null drops one", node=True)
    sweep: SweepConfig | None = option(None, "many jobs (train -m)")
