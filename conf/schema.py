# ruff: noqa: RUF009 -- `option` returns a dataclasses.field, which is what belongs there
"""All keys of a configuration whose words are ours: types, defaults, limits, meanings.

Nodes that the user extends (`model`, `task`, `optimizer`, ...) are open dicts with a `_target_`,
whose arguments are held against its signature later (`trainer/targets/signatures.py`). What the
trainer takes as it is stands in `conf/schema_trainer.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from conf.errors import Problem
from conf.fields import REQUIRED, option, plain_name, plain_path
from conf.schema_trainer import StrategyConfig, TrainerConfig

MAX_WORKERS = 1024  # more than any machine has use for: starting them would take its memory
# Keys of ours beside a target's arguments, in a section and in what is nested in it.
OWN_KEYS = {
    "optimizer": ("param_groups", "params", "lr_scheduler", "optimizers"),
    "lr_scheduler": ("interval", "monitor", "warmup", "functions", "schedulers"),
}
Node = dict[str, Any]
Named = dict[str, Node | None]


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Data sets, and what the rest of the configuration needs to know of them."""

    num_classes: int | None = option(
        None, "number of classes; null = counted in the training set", at_least=1
    )
    root: str | None = option(
        None, "folder of the data, or where it is downloaded to", check=plain_path
    )
    train: Node | None = option(None, "training set", node=True)
    val: Node | None = option(None, "validation set; null = none", node=True)
    test: Node | None = option(None, "test set; null = none", node=True)
    predict: Node | None = option(None, "samples without labels; null = none", node=True)
    fold: int | None = option(
        None, "which part of train and val together is validated on, from 0", at_least=0
    )
    folds: int | None = option(None, "parts for k-fold cross-validation", at_least=2)
    cache: Literal["none", "ram", "disk", "device"] = option(
        "none", "where decoded images are kept, or, on the training device, all samples"
    )
    cache_bytes: int = option(
        4_000_000_000, "most bytes of a data set that are kept, and of cache_dir", at_least=1
    )
    cache_dir: str | None = option(
        None, "folder for cache=disk; null = .cache in data.root", check=plain_path
    )
    decode: Literal["full", "scaled"] = option(
        "full", "JPEG files whole, or large ones only as large as the first transform needs"
    )
    on_error: Literal["raise", "skip"] = option("raise", "what a sample that cannot be read does")
    max_skipped: int = option(100, "unreadable samples that `skip` puts up with", at_least=0)
    extra: dict[str, Any] = field(default_factory=dict)

    def conflicts(self) -> Iterator[Problem]:
        """Say where a fold and the number of folds, or keys of decoding, do not go together."""
        if self.decode != "full" and self.cache != "none":
            yield Problem(
                "decode",
                f"is {self.decode}, but data.cache={self.cache} keeps whole images",
                "set data.decode=full or data.cache=none",
            )
        if self.folds is not None and (self.fold is None or self.fold >= self.folds):
            found = "missing" if self.fold is None else f"is {self.fold}"
            message = f"{found}, but data.folds={self.folds} has folds 0 to {self.folds - 1}"
            yield Problem("fold", message)
        if self.folds is None and self.fold is not None:
            yield Problem("folds", "missing: how many folds there are", "such as data.folds=5")
        if str((self.train or {}).get("_target_")).startswith("data."):  # of ours
            given = {key: value for key, value in self.extra.items() if value is not None}
            yield from _sizes(given)


def _sizes(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Check the keys that our data sets share; to a user's own they may mean something else."""
    for name in ("image_size", "channels"):
        value = given.get(name, 1)
        if type(value) not in (int, list, dict) or (isinstance(value, int) and value < 1):
            yield Problem(name, f"expected an integer >= 1, got {value!r}")
    for name in ("val_fraction", "test_fraction"):
        value = given.get(name, 0)
        if type(value) not in (int, float) or not 0 <= value < 1:
            yield Problem(name, f"expected a share, >= 0 and < 1, got {value!r}")
    channels = given.get("channels")
    for name in ("mean", "std"):
        value = given.get(name)
        if type(channels) is int and isinstance(value, list) and len(value) not in (1, channels):
            message = f"has {len(value)} values for data.channels={channels}"
            yield Problem(name, message, "give one for each channel, or one for all")


@dataclass(kw_only=True, slots=True)
class TransformsConfig:
    """Named transforms, applied in the order in which they stand; null drops one."""

    train: Named = option(
        {}, "of training samples; the last ones, where they can, of batches", node=True
    )
    eval: Named = option({}, "of samples of the other sets, in the same way", node=True)
    device: Named = option({}, "of whole training batches, on the device", node=True)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class EvalLoaderConfig:
    """What differs for validation and test; null = as in training."""

    num_workers: int | Literal["auto"] | None = option(
        None, "worker processes", at_least=0, at_most=MAX_WORKERS
    )
    pin_memory: bool | None = option(None, "copy batches to page-locked memory")
    prefetch_factor: int | None = option(None, "batches each worker prepares ahead", at_least=1)
    persistent_workers: bool | None = option(None, "keep the workers from one pass to the next")
    timeout: float | None = option(None, "seconds to wait for a batch; 0 = for ever", at_least=0)
    collate_fn: Node | None = option(None, "turns a list of samples into a batch", node=True)
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = option(
        None, "how workers are started"
    )


@dataclass(kw_only=True, slots=True)
class LoaderConfig:
    """How samples become batches; the words are torch.utils.data.DataLoader's."""

    batch_size: int = option(
        128, "samples of one update, over all devices and micro-batches", at_least=1
    )
    eval_batch_size: int | None = option(
        None, "samples of an evaluation batch on one device; null = batch_size", at_least=1
    )
    shuffle: bool = option(True, "a new order each epoch, given by the seed")
    drop_last: bool = option(False, "leave out a last, shorter batch")
    sampler: Node | None = option(None, "chooses and orders the samples", node=True)
    batch_sampler: Node | None = option(None, "chooses whole batches", node=True)
    collate_fn: Node | None = option(None, "turns a list of samples into a batch", node=True)
    num_workers: int | Literal["auto"] = option(
        0,
        "worker processes; 0 = load in the main one, auto = by the machine's cores, 8 at most",
        at_least=0,
        at_most=MAX_WORKERS,
    )
    pin_memory: bool | None = option(
        None, "copy batches to page-locked memory; null = when training on a GPU"
    )
    prefetch_factor: int | None = option(
        None, "batches each worker prepares ahead; null = 2", at_least=1
    )
    persistent_workers: bool = option(True, "keep the workers from epoch to epoch")
    timeout: float = option(600.0, "seconds to wait for a worker's batch; 0 = for ever", at_least=0)
    worker_init_fn: Node | None = option(None, "called in each worker, with its number", node=True)
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = option(
        None, "how workers are started; null = the system's way"
    )
    non_blocking: bool = option(True, "copy to the device while it computes")
    prefetch_to_device: bool = option(
        True, "copy the next batch on a side stream while a GPU computes"
    )
    eval: EvalLoaderConfig = option(EvalLoaderConfig, "what differs for validation and test")

    def conflicts(self) -> Iterator[Problem]:
        """Name the keys that exclude each other."""
        if self.batch_sampler is not None and self.sampler is not None:
            yield Problem("batch_sampler", "excludes sampler: it chooses the samples itself")
        if self.batch_sampler is not None and self.drop_last:
            yield Problem("batch_sampler", "excludes drop_last=true: it makes the batches itself")


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
    report: bool = option(True, "end with pictures, `report.png`")
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
        {}, "what each key may be, as on a command line, or {values, step}"
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
