"""Several data sets as one, mixed by weight.

Which sample stands at a position is computed from (seed, epoch) and the position alone, as in the
order of a single data set: it depends on no worker, process or batch, and a resume replays nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from regimen.data.errors import DataError
from regimen.data.keys import ORDER, Indices, random_state
from regimen.data.orders import labels_of
from regimen.data.sources import fingerprint
from regimen.data.streams import Stream
from regimen.data.transforms import Transform, on_inputs

_LONGEST_PERIOD = 100_000  # samples after which the sequence of sets may repeat, at most


def argument_errors(
    sets: Mapping[str, Any], weights: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield (argument, reason) for each argument that makes no mixture."""
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

    sets, weights: by name. Of the first n samples of an epoch each set has its proportional share
    to within one sample, for every n.
    repeat: the epoch ends when every set has been seen whole, and a smaller one begins again in
    another order. Without it, the epoch ends before any set would begin again.
    """

    sets: Mapping[str, Any]
    weights: Mapping[str, float]
    repeat: bool = True
    transform: Transform = None

    def __post_init__(self) -> None:
        for argument, wrong in argument_errors(self.sets, self.weights):
            raise DataError(f"{argument}: {wrong}")
        for name, dataset in self.sets.items():
            if isinstance(dataset, Stream) or not len(dataset):
                raise DataError(f"sets.{name}: needs samples with numbers, at least one")

        datasets = list(self.sets.values())
        self._set_classes()
        self.sizes = np.array([len(dataset) for dataset in datasets])
        self._joined = ConcatDataset[Any](datasets)
        self.slots = slot_sequence([self.weights[name] for name in self.sets])
        labels: list[Any] = [labels_of(dataset) for dataset in datasets]
        self.targets: Indices | None = None
        if all(part is not None for part in labels):
            self.targets = np.concatenate(labels)

    def _set_classes(self) -> None:
        """Set `classes` to those of the sets; not at all if no set has classes."""
        classes = {}
        for name, dataset in self.sets.items():
            if hasattr(dataset, "classes"):
                classes[name] = list(dataset.classes)
        if not classes:
            return
        self.classes = next(iter(classes.values()))
        if any(names != self.classes for names in classes.values()):
            raise DataError(f"the classes of {', '.join(classes)} are not the same")

    def __len__(self) -> int:
        return len(self._joined)

    def __getitem__(self, index: int) -> Any:
        return on_inputs(self.transform, self._joined[index])

    def order(self, seed: int, shuffle: bool) -> "MixtureOrder":
        """Return the order of an epoch, with each set shuffled or as it stands."""
        return MixtureOrder(self, seed, shuffle)

    def fingerprint(self) -> str:
        """Return the digests of the sets."""
        return "-".join(map(fingerprint, self.sets.values()))

    def explain(self) -> str:
        """Describe an epoch: how many samples of which set."""
        samples = self.order(0, False)(0)
        set_of = np.searchsorted(self._joined.cumulative_sizes, samples, side="right")
        parts = []
        counts = np.bincount(set_of, minlength=len(self.sets))  # a set may have no sample
        for name, count, size in zip(self.sets, counts, self.sizes, strict=True):
            passes = round(count / size, 2)
            parts.append(f"{count:,} of {name} ({passes:,} x its {size:,})")
        return f"{len(samples):,} samples: {', '.join(parts)}"


def slot_sequence(weights: Sequence[float]) -> Indices:
    """Return the number of the set at each position of a period; the sequence repeats.

    The j-th sample of a set with `share` of `period` places has a window of positions, from
    floor(j * period / share) to ceil((j + 1) * period / share): taken within it, the set is never a
    whole sample ahead of its share or behind. Taking the earliest deadline among the open windows
    keeps every window (Baruah et al., Proportionate progress, 1996).
    """
    # Fractions of the decimal text: 0.1 is a tenth, not the float next to it.
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    integers = [int(fraction * denominator) for fraction in fractions]
    divisor = gcd(*integers)
    shares = [number // divisor for number in integers]
    period = sum(shares)
    if period > _LONGEST_PERIOD:
        raise DataError(f"weights: {weights} repeat after {period:,} samples: round them")

    counts = [0] * len(shares)
    slots = []
    for position in range(period):
        open_sets = [i for i, share in enumerate(shares) if counts[i] * period // share <= position]
        chosen = min(open_sets, key=lambda i: -(-(counts[i] + 1) * period // shares[i]))
        counts[chosen] += 1
        slots.append(chosen)
    return np.array(slots, np.int64)


@dataclass(frozen=True, slots=True)
class MixtureOrder:
    """The samples of an epoch of a mixture, as a pure function of (seed, epoch)."""

    mixture: Mixture
    seed: int
    shuffle: bool = True

    def __len__(self) -> int:
        repeat = self.mixture.repeat
        slots = self.mixture.slots
        ends = []
        # Python integers, on the host: nothing waits for a device.
        for number, size in enumerate(self.mixture.sizes.tolist()):
            positions = np.flatnonzero(slots == number)  # of the set within a period
            # With `repeat` the epoch ends behind the set's last sample, else before the first that
            # would be its second time.
            sample = size - 1 if repeat else size
            periods, rest = divmod(sample, len(positions))
            position = periods * len(slots) + positions[rest]
            ends.append(int(position + 1 if repeat else position))
        return max(ends) if repeat else min(ends)

    def __call__(self, epoch: int) -> Indices:
        """Return the epoch's samples, numbered through all sets."""
        slots = np.resize(self.mixture.slots, len(self))
        samples = np.empty(len(slots), np.int64)
        offset = 0  # of the set's samples among those of all sets
        # Sizes as python integers, which keys are hashed from.
        for number, size in enumerate(self.mixture.sizes.tolist()):
            positions = np.flatnonzero(slots == number)
            for start in range(0, len(positions), size):
                part = positions[start : start + size]
                order = np.arange(size)
                if self.shuffle:
                    # Each time that the set begins again it has another order.
                    state = random_state(self.seed, ORDER, epoch, number, start // size)
                    order = state.permutation(size)
                samples[part] = offset + order[: len(part)]
            offset += size
        return samples
