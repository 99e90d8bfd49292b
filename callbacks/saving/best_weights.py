"""The weights of the best checkpoint as `best.safetensors`, for other programs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoints.background import Staging
from trainer.checkpoints.weights import write_safetensors
from trainer.errors import StorageError

if TYPE_CHECKING:
    from trainer.trainer import Trainer

FILE = "best.safetensors"
_log = logging.getLogger(__name__)


class BestWeights:
    """A copy of the weights that an evaluation uses; its memory is used again by the next."""

    def __init__(self) -> None:
        self._staging = Staging()
        self._weights: Mapping[str, Any] = {}

    def take(self, trainer: Trainer) -> None:
        """Copy the weights; a collective of all processes."""
        with trainer.evaluation_weights():
            weights = trainer.strategy.model_state(trainer.model)
            # The model has an average's weights within the context only.
            self._weights = dict(self._staging.copy(weights)) if trainer.is_main else {}

    def write(self, folder: Path) -> None:
        """Write the file; a failure is a warning. Called by the writer thread."""
        self._staging.wait()
        try:
            write_safetensors(folder / FILE, self._weights)
        except StorageError as error:
            _log.warning("%s", error)
