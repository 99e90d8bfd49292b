"""Transforms of whole batches on their device, independent of how an update is split.

They are the steps of `transforms.device`, and the trailing steps of `transforms.train` and
`transforms.eval` that take batches. Which steps these are depends on the configuration alone.
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
    FIXED_SAMPLE,
    MICRO_BATCH,
    SAMPLE,
    Draws,
    Words,
    key,
    keys,
    occurrence_keys,
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
    """Collate samples, but keep inputs (a sample's first part) of different sizes as `Ragged`."""
    first = samples[0]
    has_parts = isinstance(first, tuple)
    inputs = [sample[0] for sample in samples] if has_parts else list(samples)
    shapes = {image.shape for image in inputs if isinstance(image, Tensor)}
    if len(shapes) < 2:
        return collate(samples)
    if not has_parts:
        return Ragged(inputs)
    others = collate([sample[1:] for sample in samples])
    return rebuild(first, [Ragged(inputs), *others])


def batch_form(step: Any) -> Any:
    """Return the form of a step that takes whole batches (often the step itself), or None."""
    if hasattr(step, "draw") or hasattr(step, "of_epoch") or acts_on_batches(step):
        return step
    return getattr(step, "of_batch", None)


def defer(pipeline: Pipeline, stage: str) -> None:
    """Move the trailing steps that take whole batches to the pipeline's `deferred`.

    Their names there begin with the stage, such as `train.crop`.
    """
    for name in reversed(list(pipeline.steps)):
        form = batch_form(pipeline.steps[name])
        if form is None:
            break
        pipeline.deferred = {f"{stage}.{name}": form, **pipeline.deferred}
        del pipeline.steps[name]


def check_per_sample(pipeline: Pipeline, key: str) -> None:
    """Raise DataError if a step that needs whole batches would get single samples."""
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

    Raises DataError for a step that would draw once for all images of a batch.
    """

    def __init__(
        self, steps: Mapping[str, Any], seed: int, deferred: Mapping[str, Any] | None = None
    ) -> None:
        named = dict(deferred or {})
        named |= {f"device.{name}": step for name, step in steps.items()}
        present = {name: step for name, step in named.items() if step is not None}
        for name, step in present.items():
            is_torchvisions = type(step).__module__.startswith("torchvision.")
            if is_torchvisions and not (mixes_samples(step) or acts_on_batches(step)):
                raise DataError(
                    f"transforms.{name}: {type(step).__name__} would draw once for a whole batch: "
                    "use its form in regimen.data.batch_transforms, or move it to transforms.train"
                )
        self.steps = {name: _Step(name, step, seed) for name, step in _fuse(present).items()}

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __call__(self, batch: Any, batch_slice: BatchSlice) -> Any:
        if isinstance(batch, Mapping):
            parts = list(batch.values())
        elif isinstance(batch, list | tuple) and not isinstance(batch, Ragged):
            parts = list(batch)
        else:
            return self._apply(batch, None, batch_slice)[0]
        if not parts:
            raise DataError(_NO_INPUTS)
        targets = parts[1] if len(parts) > 1 else None
        inputs, targets = self._apply(parts[0], targets, batch_slice)
        parts[:2] = [inputs, targets][: len(parts)]
        if isinstance(batch, Mapping):
            return dict(zip(batch, parts, strict=True))
        return rebuild(batch, parts)

    def _apply(self, inputs: Any, targets: Any, batch_slice: BatchSlice) -> tuple[Any, Any]:
        if not isinstance(inputs, Tensor | Ragged):
            raise DataError(_NO_INPUTS)
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
            raise DataError(
                "samples cannot be put into a batch, their images differ in size "
                f"({inputs}): see transforms, which may crop or resize them to one"
            )
        return inputs, targets


_NO_INPUTS = "transforms: a batch must begin with a tensor of inputs"


def _fuse(steps: Mapping[str, Any]) -> dict[str, Any]:
    """Join ToFloat and Standardize; let a step write to images that the step before has made."""
    result = dict[str, Any]()
    before: Any = None
    for name, step in steps.items():
        if type(step) is Standardize and type(before) is ToFloat:
            _, to_float = result.popitem()
            result[name] = step.after(to_float)
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


_MAX_TABLE = 2**18  # samples whose draws of an epoch are kept, some 16 bytes each


@functools.lru_cache(maxsize=2)  # the steps of a batch share its samples' keys
def _sample_keys(indices: Sequence[int], occurrences: Sequence[int], *parts: int) -> Words:
    sample_keys = keys(indices, *parts)
    return occurrence_keys(sample_keys, occurrences) if occurrences else sample_keys


@functools.lru_cache(maxsize=2)
def _index_tensor(indices: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.asarray(indices, np.int64))


def _to_device(rows: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Copy a step's draws to a device: rows of one dtype in one copy, since each is a launch."""
    forms = {(row.dtype, row.shape) for row in rows}
    if device.type == "cpu" or len(forms) != 1:
        return [copy_async(row, device) for row in rows]
    return copy_async(torch.stack(list(rows)), device).unbind()


@dataclass(eq=False)
class _Step:
    """A step under its name: a function of inputs, targets and their slice.

    If the data set is not too large, the draws of all samples of an epoch are made in one pass, and
    a batch takes its rows of that table. The result is the same: a sample's draws depend on seed,
    epoch, index and occurrence alone. The table is of first occurrences; a batch that holds a later
    one is drawn by itself.
    """

    name: str
    transform: Any
    seed: int
    _table_key: tuple[Any, ...] = ()  # epoch, height and width
    _table: list[Tensor] = field(default_factory=list)

    def __call__(self, inputs: Any, targets: Any, batch_slice: BatchSlice) -> tuple[Any, Any]:
        transform = self.transform
        if mixes_samples(transform):
            return self._mix(inputs, targets, batch_slice)
        if isinstance(inputs, Ragged):
            return self._apply_to_each(inputs, batch_slice), targets
        if hasattr(transform, "draw"):
            draws = _to_device(self._draws(batch_slice, inputs.shape[-2:]), inputs.device)
            if getattr(transform, "masks", False):
                targets = transform.on_masks(targets, *draws)
            return transform(inputs, *draws), targets
        if hasattr(transform, "of_epoch"):
            transform = transform.of_epoch(batch_slice.epoch)
        return transform(inputs), targets

    def _mix(self, inputs: Any, targets: Any, batch_slice: BatchSlice) -> tuple[Any, Any]:
        name_hash = zlib.crc32(self.name.removeprefix("device.").encode())
        mix_key = key(
            self.seed,
            MICRO_BATCH,
            batch_slice.epoch,
            batch_slice.update,
            batch_slice.micro_batch,
            batch_slice.start,
            name_hash,
        )
        with preserved_rng():
            seed_rng(mix_key)
            mixed, mixed_targets = self.transform(inputs, targets)
        return mixed, mixed_targets

    def _apply_to_each(self, inputs: Ragged, batch_slice: BatchSlice) -> Any:
        """Apply the step to one image after the other; join them if they then have one size."""
        if getattr(self.transform, "masks", False):
            raise DataError(f"images differ in size ({inputs}), and have masks")
        results = []
        for (index, occurrence), image in zip(batch_slice.draws(), inputs.images, strict=True):
            sample = replace(batch_slice, indices=(index,), occurrences=(occurrence,))
            result, _ = self(image[None], None, sample)
            results.append(result)
        if len({result.shape for result in results}) == 1:
            return torch.cat(results)
        return Ragged([result[0] for result in results])

    def _draws(self, batch_slice: BatchSlice, size: Sequence[int]) -> Sequence[Tensor]:
        """Return the draws of a batch, from the epoch's table if there is one."""
        indices = batch_slice.indices
        epoch = batch_slice.epoch
        last = max(indices, default=_MAX_TABLE)
        if last >= _MAX_TABLE or len(indices) == 1 or batch_slice.occurrences:
            return self._draw(indices, batch_slice.occurrences, epoch, size)

        table_key = (epoch, *size)
        if self._table_key != table_key or last >= len(self._table[0]):
            # The next power of two: the table grows a few times, whatever the order of the samples.
            samples = range(1 << last.bit_length())
            self._table = list(self._draw(samples, (), epoch, size))
            self._table_key = table_key
        rows = _index_tensor(indices)
        return [column.index_select(0, rows) for column in self._table]

    def _draw(
        self, indices: Sequence[int], occurrences: Sequence[int], epoch: int, size: Sequence[int]
    ) -> Sequence[Tensor]:
        if getattr(self.transform, "lasting", False):
            sample_keys = _sample_keys(indices, occurrences, self.seed, FIXED_SAMPLE)
        else:
            sample_keys = _sample_keys(indices, occurrences, self.seed, SAMPLE, epoch)
        step_keys = sample_keys ^ np.uint64(zlib.crc32(self.name.encode()))
        draws: Sequence[Tensor] = self.transform.draw(Draws(step_keys, epoch), *size)
        return draws
