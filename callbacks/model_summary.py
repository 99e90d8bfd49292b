"""Log a summary of the model before training."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from data.batch import map_tensors
from trainer import rng
from trainer.callback import Callback
from trainer.files.layout import WIDTH, columns_of
from trainer.summary.model import render, summarize

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_log = logging.getLogger(__name__)


class ModelSummary(Callback):
    """Log the modules down to `depth` with shapes, parameters and FLOPs.

    The shapes are those of a batch of two training samples, which are loaded without a change of
    the random state.
    """

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth

    def on_fit_start(self, trainer: Trainer) -> None:
        """Log the table, except in a resumed run, whose log has it already."""
        if trainer.resumed:
            return
        # On every process: the forward pass of a sharded model is a collective.
        summary = summarize(
            trainer.model,
            example(trainer),
            self._depth,
            lambda model, batch: _predict(trainer, model, batch),
            trainer.precision.autocast,
            compute=True,
        )
        if trainer.is_main:
            width = min(WIDTH, columns_of(sys.stderr) or WIDTH)
            _log.info("%s", render(summary, width))


def example(trainer: Trainer) -> Any:
    """Return a training batch of two samples."""
    state = rng.capture()
    micro_batch = next(trainer.draw(trainer.state.epoch))[0]
    trainer.train_loader.close()
    rng.restore(state)
    return map_tensors(lambda t: t[:2] if t.ndim else t, micro_batch.batch)


def _predict(trainer: Trainer, model: nn.Module, batch: Any) -> Any:
    return trainer.task.prediction_step(model, batch)
