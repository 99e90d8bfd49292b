"""Split data sets: stratified and seeded, the same in every version."""

import functools
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from regimen.data.errors import DataError
from regimen.data.keys import SPLIT, Indices, random_state

logger = logging.getLogger(__name__)
Split = Literal["train", "val", "test"]
# What the folder or the file of a split may be called; the first that is there is taken.
NAMES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


def cut(targets: ArrayLike, wanted: int, seed: int) -> tuple[Indices, Indices]:
    """Return (rest, part): sorted indices, `wanted` of them in the part, stratified by target.

    By largest remainders; each class keeps at least one sample outside the part.
    """
    labels = np.asarray(targets)
    _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    share = sizes * (wanted / max(len(labels), 1))
    counts = np.minimum(np.floor(share).astype(np.int64), np.maximum(sizes - 1, 0))
    # A second pass only where classes of one sample leave their share to the others.
    while (missing := wanted - counts.sum()) > 0 and (counts < sizes - 1).any():
        order = np.argsort(counts - share, kind="stable")
        with_room = order[counts[order] < sizes[order] - 1]
        counts[with_room[:missing]] += 1
    part = np.zeros(len(labels), dtype=bool)
    for label in range(len(sizes)):
        members = np.flatnonzero(class_of == label)
        chosen = random_state(seed, SPLIT, label).permutation(len(members))[: counts[label]]
        part[members[chosen]] = True
    return np.flatnonzero(~part), np.flatnonzero(part)


def fold_of(
    samples: int, fold: int, folds: int, seed: int, targets: ArrayLike | None = None
) -> tuple[Indices, Indices]:
    """Return (rest, part): sorted indices of fold number `fold` of `folds`, and of all others.

    The folds of a seed have no sample in common, and all samples together; stratified by target
    where there are targets. Raises DataError for too few samples.
    """
    from sklearn.model_selection import KFold, StratifiedKFold

    if folds > samples:
        raise DataError(f"data.folds={folds} is more than the {samples} samples to be shared out")
    kind = KFold if targets is None else StratifiedKFold
    # Not the key of `cut`: the folds of what it leaves are drawn anew.
    shared = kind(folds, shuffle=True, random_state=random_state(seed, SPLIT, 4))
    labels = np.zeros(samples) if targets is None else np.asarray(targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class may have fewer samples than there are folds
        try:
            rest, part = list(shared.split(np.zeros(samples), labels))[fold]
        except ValueError as error:
            raise DataError(f"data.folds={folds}: no class has so many samples") from error
    return np.sort(rest), np.sort(part)


def train_and_val(
    targets: ArrayLike, val_size: int, seed: int, fold: int, folds: int
) -> tuple[Indices, Indices]:
    """Return the sorted indices of train and val: a cut of `val_size`, or a fold and the rest."""
    if not folds:
        return cut(targets, val_size, seed)
    labels = np.asarray(targets)
    return fold_of(len(labels), fold, folds, seed, labels)


def unlabelled_parts(
    samples: int, held_out: int, stream: int, seed: int, fold: int, folds: int
) -> dict[str, Indices]:
    """Return the samples of train, val and test, `held_out` each of the last two.

    With `folds` val is fold number `fold` of those that are not test. `stream` keys the draw.
    """
    order = random_state(seed, SPLIT, stream).permutation(samples)
    val, test, train = order[:held_out], order[held_out : 2 * held_out], order[2 * held_out :]
    if folds:
        pool = np.sort(np.concatenate([val, train]))
        rest, part = fold_of(len(pool), fold, folds, seed)
        train, val = pool[rest], pool[part]
    return {"train": train, "val": val, "test": test}


def is_cut(split: str, has_val: bool, val_fraction: float, folds: int) -> bool:
    """Return whether a split takes a part of what is there for train.

    A missing val is cut from train; with folds both are parts of train, and a val of its own is
    left aside.
    """
    return split != "test" and (folds > 0 or (not has_val and val_fraction > 0))


def rows_of_train(
    split: str, targets: ArrayLike, val_fraction: float, seed: int, fold: int, folds: int
) -> Indices:
    """Return the rows of train that `split`, train or val, takes where it `is_cut`."""
    wanted = max(1, round(val_fraction * len(np.asarray(targets))))
    rows = train_and_val(targets, wanted, seed, fold, folds)[split == "val"]
    if not len(rows):
        few = f"train has too few samples to cut a val split of val_fraction={val_fraction}"
        raise DataError(f"{few}: add one, or set data.val=null and data.val_fraction=0")
    return rows


def file_of(place: Path, split: str, suffixes: Sequence[str]) -> Path | None:
    """Return the file of a split in a folder; a single file is train's. None if there is none.

    Names are compared in lower case.
    """
    if not place.is_dir():
        return place if split == "train" and place.exists() else None
    # What is no file either, such as a pipe, is refused by name where it is read.
    there = {path.name.lower(): path for path in sorted(place.iterdir()) if not path.is_dir()}
    if split == "train":
        splits = [name for names in NAMES.values() for name in names]
        known = {f"{name}{suffix}" for name in splits for suffix in suffixes}
        tables = {name: path for name, path in there.items() if name.endswith(tuple(suffixes))}
        name_unused(place, tuple(tables[name].name for name in tables if name not in known))
    wanted = (f"{name}{suffix}" for name in NAMES[split] for suffix in suffixes)
    return next((there[name] for name in wanted if name in there), None)


@functools.cache  # told once of a folder, which each split of it looks at
def name_unused(place: Path, names: Sequence[str]) -> None:
    """Name the folders or files beside those of the splits: one may be a split that is misspelt."""
    if names:
        few = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
        known = "splits are called train, val (or valid, validation) and test"
        logger.warning("%s: not used: %s; %s", place, few, known)


def in_order(values: set[str]) -> list[str]:
    """Return names sorted, as numbers if all of them are."""
    try:
        return sorted(values, key=lambda value: (float(value), value))
    except ValueError:
        return sorted(values)


def class_names(found: set[str], num_classes: int | None, samples: int, source: str) -> list[str]:
    """Return the names of the classes: numbers count from 0, names are sorted.

    Numbers are below `num_classes`, or the number of samples: one label sizes no list of names.
    """
    if not all(name.isdecimal() for name in found):
        return in_order(found)
    highest, most = max(map(int, found)), num_classes or samples
    if highest >= most:
        bound = "data.num_classes" if num_classes else "the number of samples of train"
        why = f"class number {highest} is not below {bound}, {most}"
        raise DataError(f"{source}: {why}: mend the labels or set data.num_classes")
    return [str(number) for number in range(num_classes or highest + 1)]
