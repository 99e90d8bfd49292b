"""Split data sets: stratified and seeded, the same in every version."""

import functools
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from regimen.conf.errors import truncated_list
from regimen.data.errors import DataError
from regimen.data.keys import SPLIT, Indices, random_state

logger = logging.getLogger(__name__)
Split = Literal["train", "val", "test"]
T = TypeVar("T")
_CLASS_NUMBER = re.compile("0|[1-9][0-9]{0,4000}")  # `07`, and other scripts' digits, are names
# Names of a split's folder, file or table; the first that exists is taken. MNLI has two of each.
NAMES = {
    "train": ("train",),
    "val": ("val", "valid", "validation", "dev", "validation_matched", "dev_matched"),
    "test": ("test", "test_matched"),
}


def stratified_split(targets: ArrayLike, part_size: int, seed: int) -> tuple[Indices, Indices]:
    """Return (rest, part): sorted indices, `part_size` of them in the part, stratified by target.

    The classes share the part by the largest remainder method: each gets the whole part of its
    proportional share, and the samples that are left go to the largest fractions. Each class keeps
    at least one sample outside the part.
    """
    labels = np.asarray(targets)
    _, class_of, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
    proportional = class_sizes * (part_size / max(len(labels), 1))
    limits = class_sizes - 1
    counts = np.minimum(np.floor(proportional).astype(np.int64), np.maximum(limits, 0))
    missing = part_size - counts.sum()
    # More than one pass is only needed if small classes leave their share to the others.
    while missing > 0 and (counts < limits).any():
        by_remainder = np.argsort(counts - proportional, kind="stable")
        has_room = (counts < limits)[by_remainder]
        counts[by_remainder[has_room][:missing]] += 1
        missing = part_size - counts.sum()

    in_part = np.zeros(len(labels), dtype=bool)
    for label, count in enumerate(counts):
        members = np.flatnonzero(class_of == label)
        shuffled = random_state(seed, SPLIT, label).permutation(len(members))
        in_part[members[shuffled[:count]]] = True
    return np.flatnonzero(~in_part), np.flatnonzero(in_part)


def fold_of(
    samples: int, fold: int, folds: int, seed: int, targets: ArrayLike | None = None
) -> tuple[Indices, Indices]:
    """Return (rest, part): sorted indices outside fold number `fold` of `folds`, and in it.

    The folds of a seed are disjoint and cover all samples. They are stratified if there are
    targets. Raises DataError for too few samples.
    """
    from sklearn.model_selection import KFold, StratifiedKFold

    if folds > samples:
        raise DataError(f"data.folds={folds} is more than the {samples} samples to be shared out")
    splitter_class = KFold if targets is None else StratifiedKFold
    # A key of its own, so that folds do not follow a stratified cut of the same samples. (That of
    # class 4 has the same key. It stays: with other folds a run would be another experiment.)
    splitter = splitter_class(folds, shuffle=True, random_state=random_state(seed, SPLIT, 4))
    labels = np.zeros(samples) if targets is None else np.asarray(targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class may have fewer samples than there are folds
        try:
            rest, part = list(splitter.split(np.zeros(samples), labels))[fold]
        except ValueError as error:
            raise DataError(f"data.folds={folds}: no class has so many samples") from error
    return np.sort(rest), np.sort(part)


def train_and_val(
    targets: ArrayLike, val_size: int, seed: int, fold: int, folds: int
) -> tuple[Indices, Indices]:
    """Return the sorted indices of train and val: a cut of `val_size`, or a fold and the rest."""
    if not folds:
        return stratified_split(targets, val_size, seed)
    labels = np.asarray(targets)
    return fold_of(len(labels), fold, folds, seed, labels)


def unlabelled_parts(
    samples: int, held_out: int, stream: int, seed: int, fold: int, folds: int
) -> dict[str, Indices]:
    """Return the samples of train, val and test; val and test have `held_out` samples each.

    With `folds`, val is fold number `fold` of the samples outside the test set. `stream` keys the
    draw, a different one for each data set.
    """
    order = random_state(seed, SPLIT, stream).permutation(samples)
    val = order[:held_out]
    test = order[held_out : 2 * held_out]
    train = order[2 * held_out :]
    if folds:
        pool = np.sort(np.concatenate([val, train]))
        rest, part = fold_of(len(pool), fold, folds, seed)
        train = pool[rest]
        val = pool[part]
    return {"train": train, "val": val, "test": test}


def is_part_of_train(split: str, has_val: bool, val_fraction: float, folds: int) -> bool:
    """Return whether a split is a part of the samples stored for train.

    With folds, train and val both are, and a separate val is ignored. Without, they are if no val
    is stored, and val is cut from train.
    """
    return split != "test" and (folds > 0 or (not has_val and val_fraction > 0))


def source_of_split(
    find: Callable[[str], T | None], split: str, val_fraction: float, folds: int
) -> tuple[T | None, bool]:
    """Return what a split is read from, and whether that is train, of which the split is a part.

    find: returns the file, folder or table of train, val or test, or None.
    """
    has_val = not folds and find("val") is not None
    if is_part_of_train(split, has_val, val_fraction, folds):
        train = find("train")
        if train is not None:
            return train, True
    return find(split), False


def rows_of_train(
    split: str, targets: ArrayLike, val_fraction: float, seed: int, fold: int, folds: int
) -> Indices:
    """Return the rows of train that `split`, train or val, has if it is a part of train."""
    val_size = max(1, round(val_fraction * len(np.asarray(targets))))
    train, val = train_and_val(targets, val_size, seed, fold, folds)
    rows = val if split == "val" else train
    if not len(rows):
        raise DataError(
            f"train has too few samples to cut a val split of val_fraction={val_fraction}: "
            "add one, or set data.val=null and data.val_fraction=0"
        )
    return rows


def part_of_train(
    split: str, items: Sequence[T], val_fraction: float, seed: int, fold: int, folds: int
) -> list[T]:
    """Return those of train's items that `split` has, as `rows_of_train`, not stratified."""
    one_class = np.zeros(len(items))
    rows = rows_of_train(split, one_class, val_fraction, seed, fold, folds)
    return [items[row] for row in rows]


def split_file(place: Path, split: str, suffixes: Sequence[str]) -> Path | None:
    """Return the file of a split in a folder, or None; a single file belongs to train.

    Names are compared in lower case. When train is opened, files with these suffixes that belong
    to no split are logged.
    """
    if not place.is_dir():
        return place if split == "train" and place.exists() else None

    # Pipes and devices stay in: opening one raises an error that names it (`check_regular`).
    files = {path.name.lower(): path for path in sorted(place.iterdir()) if not path.is_dir()}
    if split == "train":
        split_names = [name for names in NAMES.values() for name in names]
        expected = {name + suffix for name in split_names for suffix in suffixes}
        unused = [
            path.name
            for name, path in files.items()
            if name.endswith(tuple(suffixes)) and name not in expected
        ]
        warn_unused(place, tuple(unused))

    for name in NAMES[split]:
        for suffix in suffixes:
            if name + suffix in files:
                return files[name + suffix]
    return None


@functools.cache  # each split of a folder calls this; it is logged once
def warn_unused(place: Path, names: Sequence[str]) -> None:
    """Log folders or files beside those of the splits: one may be a split that is misspelt."""
    if not names:
        return
    logger.warning(
        "%s: not used: %s; splits are called train, val (or valid, validation, dev) and test",
        place,
        truncated_list(names, 5),
    )


def sort_names(values: set[str]) -> list[str]:
    """Return names sorted, as numbers if all of them are."""
    try:
        return sorted(values, key=lambda value: (float(value), value))
    except ValueError:
        return sorted(values)


def class_names(labels: set[str], num_classes: int | None, samples: int, source: str) -> list[str]:
    """Return the names of the classes, from the labels of train as texts.

    Names are sorted. Numbers count from 0 to the highest, and have to be below `num_classes`, or
    below the number of samples: so a single wrong label does not make a list of a billion names.
    Raises DataError.
    """
    if not all(map(_CLASS_NUMBER.fullmatch, labels)):
        return sort_names(labels)
    highest = max(map(int, labels))
    limit = num_classes or samples
    if highest >= limit:
        bound = "data.num_classes" if num_classes else "the number of samples of train"
        raise DataError(
            f"{source}: class number {highest} is not below {bound}, {limit}: "
            "mend the labels or set data.num_classes"
        )
    return [str(number) for number in range(num_classes or highest + 1)]
