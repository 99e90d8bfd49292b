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
class SweepConfig:
    """What `train -m` does with its jobs; the last three are of a search (`sweep=optuna`)."""

    fail_fast: bool = option(False, "start no further job once one has failed")
    group_by: str | list[str] | None = option(
        None, "swept keys, such as seed, over which mean and deviation are taken"
    )
    n_trials: int = option(20, "jobs", at_least=1)
    sampler: Literal["tpe", "random"] = option("tpe", "how the next values are chosen")
    params: dict[str, str] = option(
        {}, "what each key may be, as on a command line: interval(0.01,0.1), choice(a,b)"
    )


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
