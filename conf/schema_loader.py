# ruff: noqa: RUF009 -- `option` returns a dataclasses.field, which is what belongs there
"""The keys of `data`, `transforms` and `loader`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from conf.errors import Problem
from conf.fields import option, plain_path

MAX_WORKERS = 1024  # more than any machine has use for: starting them would take its memory
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
    decode: Literal["full", "scaled", "region"] = option(
        "full", "JPEG files whole; only as large, or only the part, as the first transform needs"
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
        if self.fold is None and self.folds is not None:
            yield Problem(
                "fold", f"missing: data.folds={self.folds} has folds 0 to {self.folds - 1}"
            )
        if self.folds is None and self.fold is not None:
            yield Problem("folds", "missing: how many folds there are", "such as data.folds=5")
        if self.fold is not None and self.folds is not None and self.fold >= self.folds:
            message = f"is {self.fold}, but data.folds={self.folds} has folds 0 to {self.folds - 1}"
            yield Problem("fold", message)
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

    num_workers: int | None = option(None, "worker processes", at_least=0, at_most=MAX_WORKERS)
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
    num_workers: int = option(
        0, "worker processes; 0 = load in the main one", at_least=0, at_most=MAX_WORKERS
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
