"""Several data sets as one, in given shares: which sample comes at a position is computed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from regimen.data.errors import DataError
from regimen.data.keys import ORDER, Indices, random_state
from regimen.data.orders import labels_of
from regimen.data.sources import fingerprint
from regimen.data.streams import Stream
from regimen.data.transforms import Transform, on_inputs

_LONGEST = 100_000  # samples after which the turns of the sets repeat


def faults(sets: Mapping[str, Any], weights: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield argument and reason of what does not make a mixture."""
    for name in sets:
        if "/" in name or not name:
            yield f"sets.{name}", "is no name of a set: give it one without a slash"
        elif name not in weights:
            yield "weights", f"has none for {name}"
    for name, weight in weights.items():
        if name not in sets:
            yield f"weights.{name}", f"there is no such set, only {', '.join(sets)}"
        elif isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            yield f"weights.{name}", f"expected a number above 0, got {weight!r}"
    if not sets:
        yield "sets", "is empty"


@dataclass(eq=False)
class Mixture:
    """Mix data sets, whose samples have numbers, by weight.

    sets, weights: by name. Of the first n samples of an epoch each set has its share of n to within
    one, for every n. repeat: the epoch ends when every set has been seen whole, and a smaller one
    begins again in another order; without it, it ends before any set would begin again.
    """

    sets: Mapping[str, Any]
    weights: Mapping[str, float]
    repeat: bool = True
    transform: Transform = None

    def __post_init__(self) -> None:
        sets = self.sets
        for argument, wrong in faults(sets, self.weights):
            raise DataError(f"{argument}: {wrong}")
        for name, one in sets.items():
            if isinstance(one, Stream) or not len(one):
                raise DataError(f"sets.{name}: needs samples with numbers, at least one")
        classes = {name: list(one.classes) for name, one in sets.items() if hasattr(one, "classes")}
        if any(found != next(iter(classes.values())) for found in classes.values()):
            raise DataError(f"the classes of {', '.join(classes)} are not the same")
        if classes:
            self.classes = next(iter(classes.values()))
        self.sizes = np.array([len(one) for one in sets.values()])
        self._joined = ConcatDataset[Any](sets.values())
        self.turns = turns_of([self.weights[name] for name in sets])
        known = [found for one in sets.values() if (found := labels_of(one)) is not None]
        self.targets = np.concatenate(known) if len(known) == len(sets) else None

    def __len__(self) -> int:
        return len(self._joined)

    def __getitem__(self, index: int) -> Any:
        return on_inputs(self.transform, self._joined[index])

    def order(self, seed: int, shuffle: bool) -> "MixtureOrder":
        """Return the order of an epoch: the turns of the sets, each shuffled or as it stands."""
        return MixtureOrder(self, seed, shuffle)

    def fingerprint(self) -> str:
        """Return the digests of the sets."""
        return "-".join(fingerprint(one) for one in self.sets.values())

    def explain(self) -> str:
        """Say what an epoch is."""
        order = self.order(0, False)
        seen = np.bincount(np.searchsorted(self._joined.cumulative_sizes, order(0), side="right"))
        parts = [
            f"{count:,} of {name} ({count / size:.3g} of its {size:,})"
            for name, count, size in zip(self.sets, seen, self.sizes, strict=True)
        ]
        return f"{len(order):,} samples: {', '.join(parts)}"


def turns_of(weights: list[float]) -> Indices:
    """Return whose turn it is at each position of a period.

    The earliest deadline first among those whose turn may have come: no set is a whole sample
    behind or ahead of its share (Baruah et al., Proportionate progress, 1996).
    """
    shares = [Fraction(str(weight)) for weight in weights]
    whole = [int(share * lcm(*(s.denominator for s in shares))) for share in shares]
    period = sum(whole) // (divisor := int(np.gcd.reduce(whole)))
    if period > _LONGEST:
        raise DataError(f"weights: {weights} repeat after {period:,} samples: round them")
    counts, turns = [0] * len(whole), []
    parts = [number // divisor for number in whole]
    for position in range(period):
        ready = [i for i, n in enumerate(parts) if counts[i] * period // n <= position]
        turn = min(ready, key=lambda i: -(-(counts[i] + 1) * period // parts[i]))
        counts[turn] += 1
        turns.append(turn)
    return np.array(turns, np.int64)


@dataclass(frozen=True, slots=True)
class MixtureOrder:
    """The samples of an epoch of a mixture, as a function of (seed, epoch)."""

    mixture: Mixture
    seed: int
    shuffle: bool = True

    def __len__(self) -> int:
        turns, sizes = self.mixture.turns, self.mixture.sizes
        ends = list[int]()
        for number, size in enumerate(sizes.tolist()):
            own = np.flatnonzero(turns == number)
            last = size - 1 if self.mixture.repeat else size
            rounds, rest = divmod(last, len(own))
            ends.append(rounds * len(turns) + int(own[rest]) + self.mixture.repeat)
        return max(ends) if self.mixture.repeat else min(ends)

    def __call__(self, epoch: int) -> Indices:
        """Return the epoch's samples, numbered through all sets."""
        turns, first = np.resize(self.mixture.turns, len(self)), 0
        found = np.empty(len(turns), np.int64)
        for number, size in enumerate(self.mixture.sizes.tolist()):
            places = np.flatnonzero(turns == number)
            for again in range(-(-len(places) // size)):
                part = places[again * size : (again + 1) * size]
                order = np.arange(size)
                if self.shuffle:
                    order = random_state(self.seed, ORDER, epoch, number, again).permutation(size)
                found[part] = first + order[: len(part)]
            first += size
        return found
