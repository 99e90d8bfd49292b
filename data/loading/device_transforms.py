"""Transforms of whole batches on their device, independent of how an update is split.

They stand in `transforms.device`, or at the end of `transforms.train` and `transforms.eval`, whose
trailing steps for batches the loader applies. Which these are depends on the configuration alone.
"""

import copy
import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from regimen.conf.errors import lacks_memory
from regimen.data.batch import BatchSlice, rebuild
from regimen.data.batch_transforms import RandomCrop
from regimen.data.errors import DataError, reason
from regimen.data.keys import (
    LASTING,
    MICRO_BATCH,
    SAMPLE,
    Draws,
    Words,
    key,
    keys,
    of_occurrences,
    preserved_rng,
    seed_rng,
)
from regimen.data.loading.fetch import collate
from regimen.data.transforms import Pipeline, Standardize, ToFloat, acts_on_batches
from regimen.trainer.device import copy_async


class Ragged(NamedTuple):
    """Images of different sizes, which a batched step will crop or resize to one size."""

    images: list[Tensor]

    def __str__(self) -> str:
        """List some of the sizes."""
        sizes = sorted({f"{image.shape[-2]} x {image.shape[-1]}" for image in self.images})
        return ", ".join(sizes[:3])


def collate_ragged(samples: Sequence[Any]) -> Any:
    """Collate, but leave inputs (the samples' first part) of different sizes as they are."""
    first = samples[0]
    inputs = [sample[0] for sample in samples] if isinstance(first, tuple) else list(samples)
    if len({image.shape for image in inputs if isinstance(image, Tensor)}) < 2:
        return collate(samples)
    if not isinstance(first, tuple):
        return Ragged(inputs)
    return rebuild(first, [Ragged(inputs), *collate([sample[1:] for sample in samples])])


def batch_form(step: Any) -> Any:
    """Return a step that takes whole batches as such a step, or None for any other."""
    if hasattr(step, "draw") or hasattr(step, "of_epoch") or acts_on_batches(step):
        return step
    return getattr(step, "of_batch", None)


def defer(pipeline: Pipeline, stage: str) -> None:
    """Move the trailing steps that take whole batches to the pipeline's `deferred`.

    There their names begin with that of the stage, such as `train.crop`.
    """
    for name in reversed(list(pipeline.steps)):
        if (form := batch_form(pipeline.steps[name])) is None:
            break
        pipeline.deferred = {f"{stage}.{name}": form, **pipeline.deferred}
        del pipeline.steps[name]


def check_per_sample(pipeline: Pipeline, key: str) -> None:
    """Raise DataError if a step that single images cannot have would get them."""
    for name, step in pipeline.steps.items():
        if any(getattr(step, kind, False) for kind in ("of_epoch", "lasting", "masks")):
            raise DataError(
                f"{key}.{name}: {type(step).__name__} treats whole batches, and what follows, the "
                "data set or loader.collate_fn takes single samples: use torchvision's form of it, "
                "or move it to the end or to transforms.device"
            )


class DeviceTransforms:
    """Apply named steps to the inputs of a batch, in order; null steps are dropped.

    A step is one of:
    - one with `draw(draws, height, width)`, as those of `regimen.data.batch_transforms`: each
      image's draws are keyed by (seed, epoch, sample, occurrence in the epoch, name), or, with
      `lasting = True`, by (seed, sample, occurrence, name);
    - a step with `of_epoch(epoch)`, which returns the deterministic function for that epoch;
    - torchvision's MixUp or CutMix, or a step with `mixes_samples = True`: called with inputs and
      targets, keyed by (seed, epoch, update, micro-batch), since it pairs samples;
    - any deterministic function of the inputs.

    deferred: steps that come first, by their keys below `transforms` (`train.crop`).
    A batch is a tuple or list (inputs, targets, ...), a dict of these in that order, or inputs.
    """

    def __init__(
        self, steps: Mapping[str, Any], seed: int, deferred: Mapping[str, Any] | None = None
    ) -> None:
        named = {**(deferred or {}), **{f"device.{name}": step for name, step in steps.items()}}
        present = {name: step for name, step in named.items() if step is not None}
        for name, step in present.items():
            foreign = type(step).__module__.startswith("torchvision.")
            if foreign and not (mixes_samples(step) or acts_on_batches(step)):
                raise DataError(
                    f"transforms.{name}: {type(step).__name__} would draw once for a whole batch: "
                    "use its form in regimen.data.batch_transforms, or move it to transforms.train"
                )
        self.steps = {name: _Step(name, step, seed) for name, step in _fused(present).items()}

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __call__(self, batch: Any, batch_slice: BatchSlice) -> Any:
        several = isinstance(batch, list | tuple) and not isinstance(batch, Ragged)
        parts = [*batch.values()] if isinstance(batch, Mapping) else [batch]
        parts = list(batch) if several else parts
        if not parts or not isinstance(parts[0], Tensor | Ragged):
            raise DataError("transforms: a batch must begin with a tensor of inputs")
        inputs, targets = parts[0], parts[1] if len(parts) > 1 else None
        for name, step in self.steps.items():
            try:
                inputs, targets = step(inputs, targets, batch_slice)
            except DataError as error:
                raise DataError(f"transforms.{name}: {error}") from error
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                if lacks_memory(error):
                    raise
                raise DataError(f"transforms.{name} failed: {reason(error)}") from error
        if isinstance(inputs, Ragged):
            differ = f"samples cannot be put into a batch, their images differ in size ({inputs})"
            raise DataError(f"{differ}: see transforms, which may crop or resize them to one")
        parts[:2] = [inputs, targets][: len(parts)]
        if isinstance(batch, Mapping):
            return dict(zip(batch, parts, strict=True))
        return rebuild(batch, parts) if several else inputs


def _fused(steps: Mapping[str, Any]) -> dict[str, Any]:
    """Standardize what is converted to floats in one step; change what is new in its memory."""
    result = dict[str, Any]()
    before: Any = None
    for name, step in steps.items():
        last = next(reversed(result), "")
        if type(step) is Standardize and type(before) is ToFloat:
            result[name] = step.after(result.pop(last))
        elif hasattr(step, "in_place") and type(before) in (RandomCrop, Standardize):
            result[name] = copy.copy(step)
            result[name].in_place = True
        else:
            result[name] = step
        before = step
    return result


def mixes_samples(step: Any) -> bool:
    """Return whether a step mixes samples: MixUp, CutMix, a choice of them, or `mixes_samples`."""
    if isinstance(step, v2.RandomChoice | v2.RandomApply | v2.Compose):
        return all(map(mixes_samples, step.transforms))
    return isinstance(step, v2.MixUp | v2.CutMix) or getattr(step, "mixes_samples", False)


_MOST_AHEAD = 2**18  # samples whose draws of an epoch are kept, some 16 bytes each


@functools.lru_cache(maxsize=2)  # the steps of a batch share its samples' keys
def _keys(indices: Sequence[int], occurrences: Sequence[int], *parts: int) -> Words:
    own = keys(indices, *parts)
    return of_occurrences(own, occurrences) if occurrences else own


@functools.lru_cache(maxsize=2)
def _places(indices: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.asarray(indices, np.int64))


def _sent_together(rows: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Copy a step's draws to a device: those of one kind as one, since each copy is a launch."""
    alike = len({(row.dtype, row.shape) for row in rows}) == 1
    if device.type == "cpu" or not alike:
        return [copy_async(row, device) for row in rows]
    return copy_async(torch.stack(list(rows)), device).unbind()


@dataclass(eq=False)
class _Step:
    """A step by its name, keyed: a function of inputs, targets and their piece.

    The draws of a set that is not too large are those of an epoch together, in one pass. A sample's
    depend on seed, epoch, its number and occurrence alone, so that it is all the same; those of a
    batch that holds a later occurrence are drawn by themselves.
    """

    name: str
    transform: Any
    seed: int
    _form: tuple[Any, ...] = ()  # epoch and size that the table is of
    _table: list[Tensor] = field(default_factory=list)

    def __call__(self, inputs: Any, targets: Any, batch_slice: BatchSlice) -> Any:
        transform, masks = self.transform, getattr(self.transform, "masks", False)
        if mixes_samples(transform):
            place = (
                batch_slice.epoch,
                batch_slice.update,
                batch_slice.micro_batch,
                batch_slice.start,
            )
            number = zlib.crc32(self.name.removeprefix("device.").encode())
            with preserved_rng():
                seed_rng(key(self.seed, MICRO_BATCH, *place, number))
                return transform(inputs, targets)
        if isinstance(inputs, Ragged):  # one by one; perhaps they have one size then
            if masks:
                raise DataError(f"images differ in size ({inputs}), and have masks")
            results = []
            for (index, occurrence), image in zip(batch_slice.draws(), inputs.images, strict=True):
                own = replace(batch_slice, indices=(index,), occurrences=(occurrence,))
                results.append(self(image[None], None, own)[0])
            if len({result.shape for result in results}) == 1:
                return torch.cat(results), targets
            return Ragged([result[0] for result in results]), targets
        if not hasattr(transform, "draw"):
            if hasattr(transform, "of_epoch"):
                transform = transform.of_epoch(batch_slice.epoch)
            return transform(inputs), targets
        rows = _sent_together(self._rows(batch_slice, inputs.shape[-2:]), inputs.device)
        if masks:
            targets = transform.on_masks(targets, *rows)
        return transform(inputs, *rows), targets

    def _rows(self, batch_slice: BatchSlice, size: Sequence[int]) -> Sequence[Tensor]:
        """Return the draws of a batch, from those of the epoch where these are kept."""
        last = max(batch_slice.indices, default=_MOST_AHEAD)
        if last >= _MOST_AHEAD or len(batch_slice.indices) == 1 or batch_slice.occurrences:
            return self._drawn(
                batch_slice.indices, batch_slice.occurrences, batch_slice.epoch, size
            )
        if self._form != (batch_slice.epoch, *size) or last >= len(self._table[0]):
            self._table = list(
                self._drawn(range(1 << last.bit_length()), (), batch_slice.epoch, size)
            )
            self._form = (batch_slice.epoch, *size)
        these = _places(batch_slice.indices)
        return [row.index_select(0, these) for row in self._table]

    def _drawn(
        self,
        indices: Sequence[int],
        occurrences: Sequence[int],
        epoch: int,
        size: Sequence[int],
    ) -> Sequence[Tensor]:
        lasting = getattr(self.transform, "lasting", False)
        parts = (self.seed, LASTING) if lasting else (self.seed, SAMPLE, epoch)
        own = _keys(indices, occurrences, *parts) ^ np.uint64(zlib.crc32(self.name.encode()))
        found: Sequence[Tensor] = self.transform.draw(Draws(own, epoch), *size)
        return found
