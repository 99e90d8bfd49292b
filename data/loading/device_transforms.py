"""Transforms of batches on their device, independent of how an update is split."""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data import batch_transforms
from data.batch import Piece, rebuild
from data.batch_transforms import RandomCrop, RandomErasing, RandomHorizontalFlip
from data.errors import DataError, reason
from data.keys import (
    DRAWS_VERSION,
    LASTING,
    MICRO_BATCH,
    SAMPLE,
    Draws,
    Words,
    key,
    keys,
    preserved_rng,
    seed_rng,
)
from data.loading import standardized
from data.loading.collate import Ragged
from data.loading.draw_table import LARGEST, DrawTable
from data.loading.standardized import StandardizedFlip, StandardizedFloats
from data.transforms import Standardize, ToFloat, acts_on_batches

_MIXES = frozenset({"MixUp", "CutMix"})
_CHOICES = frozenset({"RandomChoice", "RandomApply", "Compose"})


class BatchTransform(Protocol):
    """A batched transform: those of `data.batch_transforms`, and users' own."""

    def draw(self, draws: Draws, height: int, width: int) -> Any:
        """Return a tuple of tensors with a row for each of `len(draws)` images, on the CPU."""

    def __call__(self, images: Tensor, *rows: Tensor) -> Tensor:
        """Apply rows of draws to as many images (n, C, H, W)."""


class _Place:
    """A batch's piece, and the keys of samples."""

    def __init__(self, piece: Piece, seed: int) -> None:
        self.piece = piece
        self.seed = seed

    def keys(self, indices: Any) -> Words:
        """Return the keys of samples in this epoch."""
        return keys(indices, self.seed, SAMPLE, self.piece.epoch)

    def lasting(self, indices: Any) -> Words:
        """Return the keys of draws that are the same in all epochs."""
        return keys(indices, self.seed, LASTING)

    @functools.cached_property
    def own(self) -> Tensor:
        """The numbers of the batch's samples."""
        return torch.from_numpy(np.array(self.piece.indices))

    @functools.cached_property
    def largest(self) -> int:
        """The largest of these numbers: a sampler may go beyond a data set's length."""
        return max(self.piece.indices)


Step = Callable[[Any, Any, _Place], tuple[Any, Any]]


class DeviceTransforms:
    """Apply named steps to the inputs of a batch, in order; null steps are dropped.

    A step is one of:
    - a `BatchTransform`: each image's draws are keyed by (seed, epoch, sample, name), or, with
      `lasting = True`, by (seed, sample, name);
    - a step with `of_epoch(epoch)`, which returns the deterministic function for that epoch;
    - torchvision's MixUp or CutMix, or a step with `mixes_samples = True`: called with inputs and
      targets, keyed by (seed, epoch, update, micro-batch), since it pairs samples;
    - any deterministic function of the inputs.

    deferred: steps that come first, by their keys below `transforms` (`train.crop`).
    samples: of the data set; if given, draws are computed for a whole epoch (`DrawTable`).
    A batch is a tuple or list (inputs, targets, ...), a dict of these in that order, or inputs.
    """

    def __init__(
        self,
        steps: Mapping[str, Any],
        seed: int,
        deferred: Mapping[str, Any] | None = None,
        samples: int | None = None,
    ) -> None:
        self.seed = seed
        named = {**(deferred or {}), **{f"device.{name}": step for name, step in steps.items()}}
        present = {name: step for name, step in named.items() if step is not None}
        in_tables = samples if samples is not None and samples <= LARGEST else 0
        fused = _fused(present)
        self.steps = {name: _step(name, step, in_tables) for name, step in fused.items()}
        # Version of the draws, or None if no step draws for each sample.
        self.draws = (
            DRAWS_VERSION if any(hasattr(step, "draw") for step in present.values()) else None
        )

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __call__(self, batch: Any, piece: Piece) -> Any:
        inputs, targets = _taken(batch)
        place = _Place(piece, self.seed)
        for name, step in self.steps.items():
            try:
                inputs, targets = step(inputs, targets, place)
            except DataError as error:
                raise DataError(f"transforms.{name}: {error}") from error
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise DataError(f"transforms.{name} failed: {reason(error)}") from error
        if isinstance(inputs, Ragged):
            raise DataError(
                "samples cannot be put into a batch, their images differ in size "
                f"({_sizes(inputs)}): see transforms, which may crop or resize them to one"
            )
        return _put(batch, inputs, targets)


def _fused(steps: dict[str, Any]) -> dict[str, Any]:
    """Fuse each conversion to floats with the standardization after it and a flip before it.

    The flip's name stays, by which it draws.
    A crop and a standardization return new tensors, which the step after them may change.
    """
    result: dict[str, Any] = {}
    for (name, step), before in zip(steps.items(), [None, *steps.values()], strict=False):
        last = next(reversed(result), None)
        if type(step) is Standardize and last is not None and type(result[last]) is ToFloat:
            step = StandardizedFloats(result.pop(last), step)
            flip = next(reversed(result), None)
            if flip is not None and _only_flips(result[flip]):
                name, step = flip, StandardizedFlip(result.pop(flip), step)
        elif _may_overwrite(step) and type(before) in (RandomCrop, Standardize):
            step = step.overwriting()
        result[name] = step
    return result


def _may_overwrite(step: Any) -> bool:
    ours = type(step).__module__ == batch_transforms.__name__
    return ours and isinstance(step, RandomErasing | RandomHorizontalFlip)


def _only_flips(step: Any) -> bool:
    own = type(step).__module__ == batch_transforms.__name__
    return own and isinstance(step, RandomHorizontalFlip) and not (step.masks or step.overwrites)


def _step(name: str, step: Any, in_tables: int) -> Step:
    if hasattr(step, "draw"):
        return _drawn(step, zlib.crc32(name.encode()), in_tables)
    if hasattr(step, "of_epoch"):
        return _of_epoch(step.of_epoch)
    if mixes_samples(step):
        return _mixed(step, zlib.crc32(name.removeprefix("device.").encode()))
    if type(step).__module__.startswith("torchvision.") and not acts_on_batches(step):
        raise DataError(
            f"transforms.{name}: {type(step).__name__} would draw once for a whole batch: "
            "use its form in data.batch_transforms, or move it to transforms.train"
        )
    return _fixed(step)


def mixes_samples(step: Any) -> bool:
    """Return whether a step mixes samples: MixUp, CutMix, a choice of them, or `mixes_samples`."""
    if getattr(step, "mixes_samples", False):
        return True
    if not type(step).__module__.startswith("torchvision.transforms.v2."):
        return False
    name = type(step).__name__
    parts = getattr(step, "transforms", ())
    return name in _MIXES or (name in _CHOICES and all(mixes_samples(part) for part in parts))


def _drawn(transform: Any, name: int, in_tables: int) -> Step:
    masks, lasting = getattr(transform, "masks", False), getattr(transform, "lasting", False)
    # A user's own may draw much for each image, such as noise.
    ours = type(transform).__module__ in (batch_transforms.__name__, standardized.__name__)
    table = DrawTable(transform.draw, in_tables) if in_tables and ours else None

    def drawn_for(images: Tensor, indices: Any, place: _Place) -> Sequence[Tensor]:
        def own(wanted: Any) -> Words:
            return (place.lasting(wanted) if lasting else place.keys(wanted)) ^ np.uint64(name)

        epoch, (height, width) = place.piece.epoch, images.shape[-2:]
        whole = indices is place.piece.indices and place.largest < in_tables
        if table is not None and whole:
            rows = table.rows(place.own, own, epoch, (height, width))
            if rows is not None:
                return rows
        drawn: Sequence[Tensor] = transform.draw(Draws(own(indices), epoch), height, width)
        return drawn

    def one_size(images: Tensor, targets: Any, indices: Any, place: _Place) -> tuple[Tensor, Any]:
        rows = [sent(draw, images.device) for draw in drawn_for(images, indices, place)]
        if masks:
            targets = transform.on_masks(targets, *rows)
        return transform(images, *rows), targets

    def apply(inputs: Any, targets: Any, place: _Place) -> tuple[Any, Any]:
        indices = place.piece.indices
        if not isinstance(inputs, Ragged):
            return one_size(inputs, targets, indices, place)
        if masks:
            raise DataError(f"images differ in size ({_sizes(inputs)}), and have masks")
        each = zip(indices, inputs.images, strict=True)
        return _joined([one_size(image[None], None, [i], place)[0] for i, image in each]), targets

    return apply


def _joined(batches: list[Tensor]) -> Tensor | Ragged:
    """Concatenate batches of one image, if they have one size."""
    if len({batch.shape for batch in batches}) == 1:
        return torch.cat(batches)
    return Ragged([batch[0] for batch in batches])


def _sizes(ragged: Ragged, most: int = 3) -> str:
    sizes = sorted({tuple(image.shape[-2:]) for image in ragged.images})
    listed = ", ".join(f"{height} x {width}" for height, width in sizes[:most])
    return listed if len(sizes) <= most else f"{listed}, ..."


def _mixed(transform: Any, name: int) -> Step:
    def apply(inputs: Any, targets: Any, place: _Place) -> tuple[Any, Any]:
        piece = place.piece
        numbers = (piece.epoch, piece.update, piece.micro_batch, piece.start, name)
        with preserved_rng():
            seed_rng(key(place.seed, MICRO_BATCH, *numbers))
            mixed_inputs, mixed_targets = transform(inputs, targets)
        return mixed_inputs, mixed_targets

    return apply


def _fixed(transform: Callable[[Any], Any]) -> Step:
    def apply(inputs: Any, targets: Any, place: _Place) -> tuple[Any, Any]:
        if isinstance(inputs, Ragged):
            return _joined([transform(image[None]) for image in inputs.images]), targets
        return transform(inputs), targets

    return apply


def _of_epoch(of_epoch: Callable[[int], Callable[[Any], Any]]) -> Step:
    def apply(inputs: Any, targets: Any, place: _Place) -> tuple[Any, Any]:
        return _fixed(of_epoch(place.piece.epoch))(inputs, targets, place)

    return apply


def sent(rows: Tensor, device: torch.device) -> Tensor:
    """Copy rows of numbers to the device, from pinned memory so that the host does not wait."""
    if device.type == rows.device.type:
        return rows
    if device.type != "cuda":
        return rows.to(device)
    return rows.contiguous().pin_memory().to(device, non_blocking=True)


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
    if isinstance(batch, Ragged):
        return inputs
    if isinstance(batch, Mapping):
        return dict(batch) | dict(zip(batch, (inputs, targets), strict=False))
    if isinstance(batch, list | tuple):
        return rebuild(batch, [inputs, targets, *batch[2:]][: len(batch)])
    return inputs
