"""Log a summary of the model before training."""

import logging
import sys

from data.batch import map_tensors
from trainer.assembly.summary import render, summarize
from trainer.callback import Callback
from trainer.files.layout import WIDTH, columns_of
from trainer.trainer import Trainer

_log = logging.getLogger(__name__)


class ModelSummary(Callback):
    """Log the modules down to `depth` with shapes, parameters and FLOPs.

    The shapes are those of a batch of two training samples.
    """

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth

    def on_fit_start(self, trainer: Trainer) -> None:
        """Log the table, except in a resumed run, whose log has it already."""
        if trainer.resumed:
            return
        # On every process: the forward pass of a sharded model is a collective.
        with trainer.random.aside():
            micro_batch = next(trainer.draw(trainer.state.epoch))[0]
            trainer.train_loader.close()
        task = trainer.task
        batch = map_tensors(lambda t: t[:2] if t.ndim else t, micro_batch.batch)
        for step in (task.prediction_step, task.training_step):  # which may prepare the inputs
            autocast = trainer.precision.autocast
            summary = summarize(trainer.model, batch, self._depth, step, autocast, compute=True)
            if summary.problem is None:
                break
        if trainer.is_main:
            width = min(WIDTH, columns_of(sys.stderr) or WIDTH)
            _log.info("%s", render(summary, width))
