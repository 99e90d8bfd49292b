# ruff: noqa: RUF009 -- `option` returns a dataclasses.field, which is what belongs there
"""All keys of a configuration whose words are ours: types, defaults, limits, meanings.

Nodes that the user extends (`model`, `task`, `optimizer`, ...) are open dicts with a `_target_`,
whose arguments are held against its signature later (`trainer/targets/instantiate.py`). What the
trainer takes as it is stands in `conf/schema_trainer.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from regimen.conf.errors import Problem
from regimen.conf.fields import (
    REQUIRED,
    count,
    natural,
    node,
    option,
    path,
    plain_name,
    plain_words,
)
from regimen.conf.schema_trainer import STRATEGIES, StrategyConfig, TrainerConfig, strategy_node

MAX_WORKERS = 1024  # more than any machine has use for: starting them would take its memory
# Keys of ours beside a target's arguments, in a section and in what is nested in it.
OWN_KEYS = {
    "optimizer": ("param_groups", "params", "lr_scheduler", "optimizers", "lr_per_samples"),
    "lr_scheduler": ("interval", "monitor", "warmup", "functions", "schedulers"),
}
# The least values of keys that our data sets have.
_LEAST = {
    **dict.fromkeys(("image_size", "channels", "context", "length", "most", "scenes"), 1),
    **dict.fromkeys(("latent_dim", "buffer", "train_length", "val_length"), 1),
    **dict.fromkeys(("split_seed", "val_size"), 0),
}
Values = dict[str, Any]  # a section, or all of a configuration, as plain containers
Node = dict[str, Any]
Named = dict[str, Node | None]
Workers = int | Literal["auto"]
Start = Literal["fork", "spawn", "forkserver"]  # of worker processes
_workers = partial(option, limits={">=": 0, "<=": MAX_WORKERS})


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Data sets, and what the rest of the configuration needs to know of them."""

    num_classes: int | None = count(None, "classes; null = counted in the training set")
    root: str | None = path(
        None, "folder of the data, or where it is downloaded to", affects_result=False
    )
    shared: Values = option({}, "arguments of all data sets; a set's own wins")
    train: Node | None = node(None, "training set")
    val: Node | None = node(
        None, "validation set, or several by name; null = none", named_nodes=True
    )
    test: Node | None = node(
        None, "test set, or several by name; null = none", named_nodes=True, affects_result=False
    )
    predict: Node | None = node(None, "samples without labels; null = none", affects_result=False)
    fold: int | None = natural(None, "which part of train and val is validated on, from 0")
    folds: int | None = option(None, "parts for k-fold cross-validation", limits={">=": 2})
    cache: Literal["none", "ram", "disk", "device"] = option(
        "none",
        "where decoded images are kept, or, on the training device, all samples",
        affects_result=False,
    )
    cache_bytes: int = count(
        4_000_000_000, "most bytes kept of a data set, and in cache_dir", affects_result=False
    )
    cache_dir: str | None = path(
        None, "folder for cache=disk; null = .cache in data.root", affects_result=False
    )
    decode: Literal["full", "scaled"] = option(
        "full", "JPEG files whole, or large ones only as large as the first transform needs"
    )
    on_error: Literal["raise", "skip"] = option("raise", "what a sample that cannot be read does")
    max_skipped: int = natural(100, "unreadable samples that `skip` puts up with")
    extra: Values = field(default_factory=dict)

    @property
    def validations(self) -> dict[str, Node]:
        """The validation sets by stage: `val`, or `val/NAME` of each where there are several."""
        return _by_stage("val", self.val)

    @property
    def tests(self) -> dict[str, Node]:
        """The test sets by stage: `test`, or `test/NAME` of each where there are several."""
        return _by_stage("test", self.test)

    def nodes(self) -> dict[str, Node]:
        """Return the sets that a run reads, by stage: train, those of validation, test."""
        sets = {"train": self.train, **self.validations, **self.tests}
        return {stage: node for stage, node in sets.items() if node}

    def conflicts(self) -> Iterator[Problem]:
        """Yield the keys of folds and of decoding that do not go together, and wrong values."""
        if self.shared:
            message = "is merged into the data sets where a configuration is composed"
            yield Problem("shared", message, "give it to `compose`, or write it into each set")
        if self.decode != "full" and self.cache != "none":
            message = f"is {self.decode}, but data.cache={self.cache} keeps whole images"
            yield Problem("decode", message, "set data.decode=full or data.cache=none")
        if self.folds is None:
            if self.fold is not None:
                yield Problem("folds", "missing: how many folds there are", "such as data.folds=5")
        elif self.fold is None:
            message = f"missing, but data.folds={self.folds} has folds 0 to {self.folds - 1}"
            yield Problem("fold", message)
        elif self.fold >= self.folds:
            message = f"is {self.fold}, but data.folds={self.folds} has folds 0 to {self.folds - 1}"
            yield Problem("fold", message)
        # To a user's data sets the keys below may mean something else.
        if str((self.train or {}).get("_target_")).startswith("regimen.data."):
            given = {key: value for key, value in self.extra.items() if value is not None}
            yield from _wrong_numbers(given)
            yield from _wrong_normalization(given)


def _wrong_numbers(given: Values) -> Iterator[Problem]:
    """Yield sizes and fractions of our data sets that are out of range."""
    for name, least in _LEAST.items():
        value = given.get(name, least)
        if type(value) not in (int, list, dict) or (isinstance(value, int) and value < least):
            yield Problem(name, f"expected an integer >= {least}, got {value!r}")
    for name in ("val_fraction", "test_fraction"):
        value = given.get(name, 0)
        if type(value) not in (int, float) or not 0 <= value < 1:
            yield Problem(name, f"expected a share, >= 0 and < 1, got {value!r}")


def _wrong_normalization(given: Values) -> Iterator[Problem]:
    """Yield a range, a mean or a std of our data sets that cannot be used."""
    limits = given.get("range", [0, 1])
    if not isinstance(limits, dict):
        is_numbers = isinstance(limits, list) and {*map(type, limits)} <= {int, float}
        if not is_numbers or len(limits) != 2 or not limits[0] < limits[1]:
            message = f"expected [black, white], two rising numbers, got {limits!r}"
            yield Problem("range", message)
    channels = given.get("channels")
    if type(channels) is not int:
        return
    for name in ("mean", "std"):
        value = given.get(name)
        if isinstance(value, list) and len(value) not in (1, channels):
            message = f"has {len(value)} values for data.channels={channels}"
            yield Problem(name, message, "give one for each channel, or one for all")


def _by_stage(split: str, node: Node | None) -> dict[str, Node]:
    """Return one data set, or several by name, by the stage of each."""
    if node is None:
        return {}
    if "_target_" in node:
        return {split: node}
    return {f"{split}/{name}": named for name, named in node.items()}


@dataclass(kw_only=True, slots=True)
class TransformsConfig:
    """Named transforms, applied in the order in which they stand; null drops one."""

    train: Named = node({}, "of training samples; the last ones, where they can, of batches")
    eval: Named = node({}, "of samples of the other sets, in the same way")
    device: Named = node({}, "of whole training batches, on the device")
    extra: Values = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class EvalLoaderConfig:
    """What differs for validation and test; null = as in training."""

    num_workers: Workers | None = _workers(None, "worker processes")
    pin_memory: bool | None = option(None, "copy batches to page-locked memory")
    prefetch_factor: int | None = count(None, "batches each worker prepares ahead")
    persistent_workers: bool | None = option(None, "keep the workers from one pass to the next")
    timeout: float | None = natural(None, "seconds to wait for a batch; 0 = for ever")
    collate_fn: Node | None = node(None, "turns a list of samples into a batch")
    multiprocessing_context: Start | None = option(None, "how workers are started")


@dataclass(kw_only=True, slots=True)
class LoaderConfig:
    """How samples become batches; the words are torch.utils.data.DataLoader's."""

    batch_size: int = count(128, "samples of one update, over all devices and micro-batches")
    eval_batch_size: int | None = count(
        None, "in evaluation, on one device; null = batch_size", affects_result=False
    )
    shuffle: bool = option(True, "a new order each epoch, given by the seed")
    drop_last: bool = option(False, "leave out a last, shorter batch")
    sampler: Node | None = node(None, "chooses and orders the samples")
    batch_sampler: Node | None = node(None, "chooses whole batches")
    collate_fn: Node | None = node(None, "turns a list of samples into a batch")
    num_workers: Workers = _workers(
        0, "processes that load; auto = the machine's cores, 8 at most", affects_result=False
    )
    pin_memory: bool | None = option(
        None, "copy batches to page-locked memory; null = for a GPU", affects_result=False
    )
    prefetch_factor: int | None = count(
        None, "batches each worker prepares ahead; null = 2", affects_result=False
    )
    persistent_workers: bool = option(
        True, "keep the workers from epoch to epoch", affects_result=False
    )
    timeout: float = natural(
        600.0, "seconds to wait for a worker's batch; 0 = for ever", affects_result=False
    )
    worker_init_fn: Node | None = node(None, "called in each worker, with its number")
    multiprocessing_context: Start | None = option(
        None, "how workers start; null = the usual way", affects_result=False
    )
    non_blocking: bool = option(True, "copy to the device while it computes", affects_result=False)
    prefetch_to_device: bool = option(
        True, "copy the next batch while a GPU computes", affects_result=False
    )
    eval: EvalLoaderConfig = option(
        EvalLoaderConfig, "what differs for validation and test", affects_result=False
    )

    def conflicts(self) -> Iterator[Problem]:
        """Name the keys that exclude each other."""
        if self.batch_sampler is not None and self.sampler is not None:
            yield Problem("batch_sampler", "excludes sampler: it chooses the samples itself")
        if self.batch_sampler is not None and self.drop_last:
            yield Problem("batch_sampler", "excludes drop_last=true: it makes the batches itself")


@dataclass(kw_only=True, slots=True)
class OptimizerKeys:
    """Keys that nearly every optimizer has; checked wherever they occur in `optimizer`."""

    lr: float | None = natural(None, "learning rate")
    lr_per_samples: int | None = count(
        None, "lr is given for so many samples an update, and scaled to loader.batch_size"
    )
    weight_decay: float | None = natural(None, "weight decay")
    param_groups: Values | None = option(None, "rules: other values for some parameters")
    optimizers: "dict[str, OptimizerKeys | None] | None" = option(
        None, "several optimizers by name, instead of one"
    )
    extra: Values = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class LrSchedulerKeys:
    """Keys of `lr_scheduler` that are not the target's."""

    interval: Literal["step", "epoch"] = option("step", "when it advances")
    monitor: str | None = option(None, "metric that a plateau scheduler watches")
    extra: Values = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class TrialConfig:
    """The trial of a study that a job is; a search tells each of its jobs."""

    storage: str = option(REQUIRED, "where the study is stored")
    study: str = option(REQUIRED, "its name")
    number: int = natural(REQUIRED, "of the trial")


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """What `train -m` does with its jobs; from `n_trials` on, a search (`sweep=optuna`)."""

    jobs: int | None = option(
        None, "jobs at a time; null = 1, on a cluster all", limits={">=": 1, "<=": 1024}
    )
    jobs_per_device: int = count(1, "how many of them share a GPU")
    fail_fast: bool = option(False, "start no further job once one has failed")
    retries: int = natural(0, "further starts of a job lost to a signal or to a lack of memory")
    launcher: Literal["local", "submitit", "ray"] = option("local", "jobs here, on SLURM or on Ray")
    launcher_options: Values = option({}, "what submitit's executor, or a Ray task, is asked for")
    group_by: str | list[str] | None = option(None, "swept keys to average over, such as seed")
    report: bool = option(True, "end with pictures, `report.png`")
    n_trials: int = count(20, "jobs of the study, by whoever runs them")
    sampler: Literal["tpe", "random", "cmaes", "grid", "qmc"] = option(
        "tpe", "how the next values are chosen"
    )
    sampler_options: Values = option({}, "arguments of Optuna's sampler")
    pruner: Literal["median", "asha", "hyperband"] | None = option(
        None, "which jobs end early, by their validations; null: none"
    )
    pruner_options: Values = option({}, "arguments of Optuna's pruner")
    params: dict[str, str] = option({}, "what varies: values as on a command line")
    enqueue: list[Values] = option([], "values to begin with: a job for each entry")
    storage: str | None = path(None, "a database's URL, an SQLite file (.db) or a journal")
    trial: TrialConfig | None = option(None, "set by a search for each of its jobs")


# Shipped callbacks, by name, that watch a run and do not change it.
_OBSERVERS = (
    "progress",
    "tensorboard",
    "checkpoint",
    "model_summary",
    "lr_monitor",
    "throughput",
    "memory",
    "profiler",
    "mlflow",
    "wandb",
    "csv",
    "mirror",
)


@dataclass(kw_only=True, slots=True)
class Config:
    """The whole configuration."""

    name: str = option(
        REQUIRED,
        "of the run, which goes to `runs/NAME/TIME`",
        check=plain_name,
        affects_result=False,
    )
    seed: int = option(0, "of order, augmentation and weights", limits={">=": 0, "<=": 2**32 - 1})
    tags: list[str] = option(
        [],
        "free words about the run: in its manifest, trackers, `regimen runs`",
        check=plain_words,
        affects_result=False,
    )
    run_dir: str | None = path(None, "put the run exactly here", of_start=True)
    resume: str | None = path(
        None,
        "auto, or the path of a run or checkpoint",
        of_start=True,
        hint="resume=auto goes on with the run of run_dir, or else the newest unfinished one; "
        "resume=PATH with that run or checkpoint",
    )
    resume_policy: Literal["error", "keep", "override"] = option(
        "error",
        "what a changed config does on resume: refuse, use the old values, use the new",
        of_start=True,
    )
    dry_run: bool | None = option(
        False,
        "check and build all, try a micro-batch of each split, print the plan, train nothing",
        of_start=True,
    )
    model: Node = node(REQUIRED, "the network")
    data: DataConfig = option(REQUIRED, "the data sets")
    transforms: TransformsConfig = option(TransformsConfig, "what is done to samples and batches")
    loader: LoaderConfig = option(LoaderConfig, "how samples become batches")
    task: Node = node(REQUIRED, "what a step computes: loss and metrics")
    optimizer: Node = option(REQUIRED, "a torch optimizer, or several", nested_schema=OptimizerKeys)
    lr_scheduler: Node | None = option(
        None, "the learning rate's course", nested_schema=LrSchedulerKeys
    )
    trainer: TrainerConfig = option(TrainerConfig, "the loop")
    strategy: Node = option(
        {"_target_": STRATEGIES["single"]},
        "the devices",
        nested_schema=StrategyConfig,
        affects_result=False,
    )
    callbacks: Named = node(
        {}, "named, called in this order; null drops one", harmless_entries=_OBSERVERS
    )
    sweep: SweepConfig | None = option(None, "many jobs (train -m)", of_start=True)

    def __post_init__(self) -> None:
        """Take the short name of a strategy for its class, as older runs have stored it."""
        self.strategy = strategy_node(self.strategy)

    def conflicts(self) -> Iterator[Problem]:
        """Name the keys of different sections that exclude each other."""
        if self.loader.batch_sampler is None:
            return
        optimizers = {"optimizer": self.optimizer}
        for name, inner in (self.optimizer.get("optimizers") or {}).items():
            optimizers[f"optimizer.optimizers.{name}"] = inner or {}
        for key, values in optimizers.items():
            if values.get("lr_per_samples") is not None:
                message = "scales by loader.batch_size, but loader.batch_sampler makes the batches"
                yield Problem(f"{key}.lr_per_samples", message, "give the rate itself: lr")
