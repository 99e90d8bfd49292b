"""Save the model and its gradients when a run diverges."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.callback import Callback
from trainer.errors import DivergedError, StorageError
from trainer.files.atomic import replacing, write_text

if TYPE_CHECKING:
    from trainer.trainer import Trainer

REPORT, TENSORS = "divergence.txt", "divergence.pt"
_log = logging.getLogger(__name__)


class StateDump(Callback):
    """Write the model, its gradients and a table of both when a run diverges.

    `divergence.txt` has one line for each tensor: its norm, its largest magnitude and the number of
    values that are not finite. `tensors`: also write `divergence.pt`, which
    `torch.load(weights_only=True)` reads.
    """

    def __init__(self, tensors: bool = True) -> None:
        self._tensors = tensors

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Write the files after a DivergedError; a failure to write is only logged."""
        if not isinstance(error, DivergedError) or trainer.run_dir is None or not trainer.is_main:
            return
        try:
            self._write(trainer, trainer.run_dir, error)
        except StorageError as failure:
            _log.warning("%s", failure)

    def _write(self, trainer: Trainer, folder: Path, error: DivergedError) -> None:
        write_text(folder / REPORT, "\n".join(report(trainer, error)) + "\n")
        _log.info("state of the diverged model: %s", folder / REPORT)
        if self._tensors:
            with replacing(folder / TENSORS) as file:
                torch.save(content(trainer), file)


def report(trainer: Trainer, error: DivergedError) -> Iterator[str]:
    """Yield the lines of `divergence.txt`."""
    yield str(error)
    yield f"state: {trainer.state.state_dict()}"
    yield f"learning rates: {trainer.learning_rates()}"
    yield f"last values: {trainer.metrics}"
    yield f"{'norm':>12} {'largest':>12} {'not finite':>10}  tensor"
    for name, tensor in trainer.model.state_dict().items():
        if tensor.is_floating_point():
            yield line(name, tensor)
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None:
            yield line(f"{name} (gradient)", parameter.grad)


def line(name: str, tensor: Tensor) -> str:
    """Return the line of one tensor; norm and magnitude are those of its finite values."""
    finite = torch.isfinite(tensor)
    values = tensor.detach().double().where(finite, 0)
    largest = values.abs().amax().item() if values.numel() else 0.0
    lost = tensor.numel() - int(finite.sum())
    return f"{values.norm().item():12.4e} {largest:12.4e} {lost:10d}  {name}"


def content(trainer: Trainer) -> dict[str, Any]:
    """Return the contents of `divergence.pt`."""
    gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    return {
        "model": dict(trainer.model.state_dict()),
        "gradients": gradients,
        "state": trainer.state.state_dict(),
        "metrics": dict(trainer.metrics),
    }
