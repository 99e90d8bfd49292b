"""Split data sets: stratified and seeded, the same in every version."""

import numpy as np
import numpy.typing as npt

from data.keys import SPLIT, random_state
from data.updates import Indices


def stratified_counts(class_sizes: npt.NDArray[np.int64], wanted: int) -> npt.NDArray[np.int64]:
    """Distribute `wanted` samples over classes in proportion to their sizes.

    By largest remainders; each class keeps at least one sample outside the part.
    """
    share = class_sizes * (wanted / max(int(class_sizes.sum()), 1))
    whole = np.floor(share).astype(np.int64)
    counts: npt.NDArray[np.int64] = np.minimum(whole, np.maximum(class_sizes - 1, 0))
    for label in np.argsort(counts - share, kind="stable"):
        if counts.sum() >= wanted:
            break
        if counts[label] < class_sizes[label] - 1:
            counts[label] += 1
    return counts


def cut(targets: npt.ArrayLike, wanted: int, seed: int) -> tuple[Indices, Indices]:
    """Return (rest, part): sorted indices, `wanted` of them in the part, stratified by target."""
    labels = np.asarray(targets)
    classes, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    counts = stratified_counts(sizes.astype(np.int64), wanted)
    part = np.zeros(len(labels), dtype=bool)
    for label in range(len(classes)):
        members = np.flatnonzero(class_of == label)
        chosen = random_state(seed, SPLIT, label).permutation(len(members))[: counts[label]]
        part[members[chosen]] = True
    return np.flatnonzero(~part), np.flatnonzero(part)
