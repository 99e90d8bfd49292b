"""Transforms of whole batches, on the device, whose draws do not depend on how a batch is split."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from data.batch import Piece, rebuild
from data.errors import DataError, reason
from data.keys import MICRO_BATCH, UPDATE, key, preserved_rng, seed_rng
from data.transforms import acts_on_batches

_MIXES = frozenset({"MixUp", "CutMix"})
_CHOICES = frozenset({"RandomChoice", "RandomApply", "Compose"})


class BatchTransform(Protocol):
    """What `data.batch_transforms` holds, and what users may write."""

    def draw(self, samples: int, height: int, width: int, generator: Generator) -> Any:
        """Return a tuple of tensors with a row for each of `samples` images, on the CPU."""

    def __call__(self, images: Tensor, *draws: Tensor) -> Tensor:
        """Apply rows of draws to as many images (n, C, H, W)."""


Step = Callable[[Any, Any, Piece, int], tuple[Any, Any]]


class DeviceTransforms:
    """Apply named steps to the inputs of a batch, in order; null steps are dropped.

    A step is one of:
    - a `BatchTransform`: its draws are made for the whole global batch, keyed by (seed, epoch,
      update, name), and the rows of the piece at hand are applied;
    - torchvision's MixUp or CutMix, or what says `mixes_samples = True`: called with inputs and
      targets, keyed by (seed, epoch, update, micro-batch), since it pairs samples within one;
    - any function of the inputs that draws nothing.

    A batch is a tuple or list (inputs, targets, ...), a dict of these in that order, or inputs.
    """

    def __init__(self, steps: Mapping[str, Any], seed: int) -> None:
        self.seed = seed
        self.steps = {name: _step(name, step) for name, step in steps.items() if step is not None}

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __call__(self, batch: Any, piece: Piece) -> Any:
        inputs, targets = _taken(batch)
        for name, step in self.steps.items():
            try:
                inputs, targets = step(inputs, targets, piece, self.seed)
            except DataError as error:
                raise DataError(f"transforms.device.{name}: {error}") from error
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise DataError(f"transforms.device.{name} failed: {reason(error)}") from error
        return _put(batch, inputs, targets)


def _step(name: str, step: Any) -> Step:
    if hasattr(step, "draw"):
        return _drawn(step, zlib.crc32(name.encode()))
    if mixes_samples(step):
        return _mixed(step, zlib.crc32(name.encode()))
    if type(step).__module__.startswith("torchvision.") and not acts_on_batches(step):
        raise DataError(
            f"transforms.device.{name}: {type(step).__name__} would draw once for a whole batch: "
            "use its form in data.batch_transforms, or move it to transforms.train"
        )
    return _fixed(step)


def mixes_samples(step: Any) -> bool:
    """Tell whether a step mixes samples: MixUp, CutMix, a random choice of them, or by its word."""
    if getattr(step, "mixes_samples", False):
        return True
    if not type(step).__module__.startswith("torchvision.transforms.v2."):
        return False
    name = type(step).__name__
    parts = getattr(step, "transforms", ())
    return name in _MIXES or (name in _CHOICES and all(mixes_samples(part) for part in parts))


def _drawn(transform: Any, name: int) -> Step:
    def apply(inputs: Any, targets: Any, piece: Piece, seed: int) -> tuple[Any, Any]:
        generator = Generator().manual_seed(key(seed, UPDATE, piece.epoch, piece.update, name))
        draws = transform.draw(piece.total, *inputs.shape[-2:], generator)
        rows = slice(piece.start, piece.start + len(inputs))
        own = [_sent(draw[rows], inputs.device) for draw in draws]
        if getattr(transform, "masks", False):
            targets = transform.on_masks(targets, *own)
        return transform(inputs, *own), targets

    return apply


def _mixed(transform: Any, name: int) -> Step:
    def apply(inputs: Any, targets: Any, piece: Piece, seed: int) -> tuple[Any, Any]:
        place = (piece.epoch, piece.update, piece.micro_batch, piece.start)
        with preserved_rng():
            seed_rng(key(seed, MICRO_BATCH, *place, name))
            mixed_inputs, mixed_targets = transform(inputs, targets)
        return mixed_inputs, mixed_targets

    return apply


def _fixed(transform: Callable[[Any], Any]) -> Step:
    def apply(inputs: Any, targets: Any, piece: Piece, seed: int) -> tuple[Any, Any]:
        return transform(inputs), targets

    return apply


def _sent(rows: Tensor, device: torch.device) -> Tensor:
    """Send draws to the device; from pinned memory, or the host would wait for the device."""
    if device.type != "cuda":
        return rows.to(device)
    return rows.contiguous().pin_memory().to(device, non_blocking=True)


def _taken(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    else:
        parts = list(batch) if isinstance(batch, list | tuple) else [batch]
    if not parts or not isinstance(parts[0], Tensor):
        raise DataError("transforms.device: a batch must begin with a tensor of inputs")
    return parts[0], parts[1] if len(parts) > 1 else None


def _put(batch: Any, inputs: Any, targets: Any) -> Any:
    if isinstance(batch, Mapping):
        return dict(batch) | dict(zip(batch, (inputs, targets), strict=False))
    if isinstance(batch, list | tuple):
        return rebuild(batch, [inputs, targets, *batch[2:]][: len(batch)])
    return inputs
