"""A description of how the samples of an update are split over devices and micro-batches."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """The numbers of the split; `samples` is the size of the training set, None for a stream."""

    batch_size: int
    devices: int
    micro_batches: int
    samples: int | None = None
    drop_last: bool = False

    @property
    def largest(self) -> int:
        """Samples of the largest micro-batch on one device."""
        size = self.batch_size if self.samples is None else min(self.batch_size, self.samples)
        return -(-size // (self.devices * self.micro_batches))

    @property
    def remainder(self) -> int:
        """Samples of an epoch's last batch, if it is short; else 0."""
        return 0 if self.samples is None else self.samples % self.batch_size

    def lines(self) -> list[str]:
        """Describe the split of an update, and what happens to the last samples of an epoch."""
        if self.samples is not None and self.samples < self.batch_size:
            few = describe(self.samples, self.devices, self.micro_batches)
            return [f"{few} (loader.batch_size={self.batch_size} exceeds the samples)"]
        lines = [describe(self.batch_size, self.devices, self.micro_batches)]
        if not self.remainder:
            return lines
        if self.drop_last:
            return [*lines, f"the last {self.remainder} samples of each epoch's order are dropped"]
        last = describe(self.remainder, self.devices, self.micro_batches)
        return [*lines, f"the last update of an epoch: {last}"]


def describe(samples: int, devices: int, micro_batches: int) -> str:
    """Return `128 = 2 devices x 4 micro-batches x 16`, or the split of an uneven number.

    Samples are split into devices x micro-batches pieces whose sizes differ by at most one, the
    larger first; micro-batches without a sample are skipped.
    """
    micro_batches = min(micro_batches, -(-samples // devices))
    pieces = devices * micro_batches
    whole, more = divmod(samples, pieces)
    grid = f"{_many(devices, 'device')} x {_many(micro_batches, 'micro-batch', 'es')}"
    if not more:
        return f"{samples} = {grid} x {whole}"
    if not whole:
        return f"{samples} = {grid}: {more} with 1 sample, {pieces - more} with none (weight 0)"
    return f"{samples} = {grid}: {more} of {whole + 1} and {pieces - more} of {whole} samples"


def _many(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}{plural}"
