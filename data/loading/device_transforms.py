"""Transforms of whole batches on their device, independent of how an update is split.

They stand in `transforms.device`, or at the end of `transforms.train` and `transforms.eval`, whose
trailing steps for batches the loader applies. Which these are depends on the configuration alone.
"""

import copy
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import Piece, rebuild, sent
from data.batch_transforms import RandomErasing
from data.errors import DataError, reason
from data.keys import (
    LASTING,
    MICRO_BATCH,
    SAMPLE,
    Draws,
    key,
    keys,
    preserved_rng,
    seed_rng,
)
from data.loading.fetch import Ragged
from data.transforms import Pipeline, Standardize, ToFloat, acts_on_batches

_MIXES = frozenset({"MixUp", "CutMix"})
_CHOICES = frozenset({"RandomChoice", "RandomApply", "Compose"})
Step = Callable[[Any, Any, Piece], tuple[Any, Any]]


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
        once = getattr(step, "lasting", False) or getattr(step, "masks", False)
        if hasattr(step, "of_epoch") or (hasattr(step, "draw") and once):
            raise DataError(
                f"{key}.{name}: {type(step).__name__} treats whole batches, and what follows, the "
                "data set or loader.collate_fn takes single samples: use torchvision's form of it, "
                "or move it to the end or to transforms.device"
            )


class DeviceTransforms:
    """Apply named steps to the inputs of a batch, in order; null steps are dropped.

    A step is one of:
    - one with `draw(draws, height, width)`, as those of `data.batch_transforms`: each image's draws
      are keyed by (seed, epoch, sample, name), or, with `lasting = True`, by (seed, sample, name);
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
        self.steps = {name: _step(name, step, seed) for name, step in _fused(present).items()}

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __call__(self, batch: Any, piece: Piece) -> Any:
        inputs, targets = _taken(batch)
        for name, step in self.steps.items():
            try:
                inputs, targets = step(inputs, targets, piece)
            except DataError as error:
                raise DataError(f"transforms.{name}: {error}") from error
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise DataError(f"transforms.{name} failed: {reason(error)}") from error
        if isinstance(inputs, Ragged):
            raise DataError(
                "samples cannot be put into a batch, their images differ in size "
                f"({inputs.sizes()}): see transforms, which may crop or resize them to one"
            )
        return _put(batch, inputs, targets)


def _fused(steps: Mapping[str, Any]) -> dict[str, Any]:
    """Standardize what is converted to floats in one step, and erase boxes of the result itself."""
    result: dict[str, Any] = {}
    before: Any = None
    for name, step in steps.items():
        last = next(reversed(result), "")
        if type(step) is Standardize and type(before) is ToFloat:
            result[name] = step.after(result.pop(last))
        elif type(step) is RandomErasing and type(before) is Standardize:
            result[name] = copy.copy(step)
            result[name].in_place = True
        else:
            result[name] = step
        before = step
    return result


def _step(name: str, step: Any, seed: int) -> Step:
    if hasattr(step, "draw"):
        return functools.partial(_draw, _Ahead(step, zlib.crc32(name.encode()), seed))
    if mixes_samples(step):
        number = zlib.crc32(name.removeprefix("device.").encode())
        return functools.partial(_mix, step, number, seed)
    if type(step).__module__.startswith("torchvision.") and not acts_on_batches(step):
        raise DataError(
            f"transforms.{name}: {type(step).__name__} would draw once for a whole batch: "
            "use its form in data.batch_transforms, or move it to transforms.train"
        )
    return functools.partial(_apply, step)


def mixes_samples(step: Any) -> bool:
    """Return whether a step mixes samples: MixUp, CutMix, a choice of them, or `mixes_samples`."""
    if getattr(step, "mixes_samples", False):
        return True
    if not type(step).__module__.startswith("torchvision.transforms.v2."):
        return False
    name = type(step).__name__
    parts = getattr(step, "transforms", ())
    return name in _MIXES or (name in _CHOICES and all(mixes_samples(part) for part in parts))


_MOST_AHEAD = 2**18  # samples whose draws of an epoch are kept, some 16 bytes each
_keys = functools.lru_cache(maxsize=2)(keys)  # the steps of a batch share its samples' keys


@functools.lru_cache(maxsize=2)
def _places(indices: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.asarray(indices, np.int64))


class _Ahead:
    """A step's draws: of a set that is not too large those of an epoch together, in one pass.

    A sample's draws depend on seed, epoch and its number alone, so that it is all the same.
    """

    def __init__(self, transform: Any, name: int, seed: int) -> None:
        self.transform, self._name, self._seed = transform, np.uint64(name), seed
        self._form: tuple[Any, ...] = ()  # epoch and size that the table is of
        self._table: list[Tensor] = []

    def drawn(self, indices: Sequence[int], epoch: int, size: Sequence[int]) -> Sequence[Tensor]:
        """Draw for samples of one size in an epoch."""
        lasting = getattr(self.transform, "lasting", False)
        parts = (self._seed, LASTING) if lasting else (self._seed, SAMPLE, epoch)
        found: Sequence[Tensor] = self.transform.draw(
            Draws(_keys(indices, *parts) ^ self._name, epoch), *size
        )
        return found

    def rows(self, indices: Sequence[int], epoch: int, size: Sequence[int]) -> Sequence[Tensor]:
        """Return the draws of a batch, from those of the epoch where these are kept."""
        if (last := max(indices, default=_MOST_AHEAD)) >= _MOST_AHEAD:
            return self.drawn(indices, epoch, size)
        if self._form != (epoch, *size) or last >= len(self._table[0]):
            self._table = list(self.drawn(range(1 << last.bit_length()), epoch, size))
            self._form = (epoch, *size)
        these = _places(indices)
        return [row[these] for row in self._table]


def _draw(ahead: _Ahead, inputs: Any, targets: Any, piece: Piece) -> tuple[Any, Any]:
    transform, epoch = ahead.transform, piece.epoch
    masks = getattr(transform, "masks", False)

    if not isinstance(inputs, Ragged):
        drawn = ahead.rows(piece.indices, epoch, inputs.shape[-2:])
        rows = [sent(row, inputs.device) for row in drawn]
        if masks:
            targets = transform.on_masks(targets, *rows)
        return transform(inputs, *rows), targets
    if masks:
        raise DataError(f"images differ in size ({inputs.sizes()}), and have masks")
    results = []
    for index, image in zip(piece.indices, inputs.images, strict=True):
        drawn = ahead.drawn((index,), epoch, image.shape[-2:])
        results.append(transform(image[None], *(sent(row, image.device) for row in drawn)))
    return _joined(results), targets


def _mix(
    transform: Any, name: int, seed: int, inputs: Any, targets: Any, piece: Piece
) -> tuple[Any, Any]:
    place = (piece.epoch, piece.update, piece.micro_batch, piece.start)
    with preserved_rng():
        seed_rng(key(seed, MICRO_BATCH, *place, name))
        mixed_inputs, mixed_targets = transform(inputs, targets)
    return mixed_inputs, mixed_targets


def _apply(transform: Any, inputs: Any, targets: Any, piece: Piece) -> tuple[Any, Any]:
    function = transform.of_epoch(piece.epoch) if hasattr(transform, "of_epoch") else transform
    if isinstance(inputs, Ragged):
        return _joined([function(image[None]) for image in inputs.images]), targets
    return function(inputs), targets


def _joined(batches: list[Tensor]) -> Tensor | Ragged:
    """Concatenate batches of one image, if they have one size."""
    if len({batch.shape for batch in batches}) == 1:
        return torch.cat(batches)
    return Ragged([batch[0] for batch in batches])


def _taken(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Ragged):
        return batch, None
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    else:
        parts = list(batch) if isinstance(batch, list | tuple) else [batch]
    if not parts or not isinstance(parts[0], Tensor | Ragged):
        raise DataError("transforms: a batch must begin with a tensor of inputs")
    return parts[0], parts[1] if len(parts) > 1 else None


def _put(batch: Any, inputs: Any, targets: Any) -> Any:
    if isinstance(batch, Mapping):
        return dict(batch) | dict(zip(batch, (inputs, targets), strict=False))
    if isinstance(batch, list | tuple) and not isinstance(batch, Ragged):
        return rebuild(batch, [inputs, targets, *batch[2:]][: len(batch)])
    return inputs
