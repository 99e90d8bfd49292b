"""Log a summary of the model before training."""

import sys
from typing import Any

from torch import Tensor

from regimen.callbacks.support import logger
from regimen.data.batch import rebuild
from regimen.trainer.assembly.summary import render, summarize
from regimen.trainer.callback import Callback
from regimen.trainer.files.layout import WIDTH, columns_of
from regimen.trainer.trainer import Trainer


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
        with trainer.random.isolated():
            micro_batch = next(trainer.draw(trainer.state.epoch))[0]
            trainer.train_loader.close()
        task, count = trainer.task, micro_batch.batch_slice.count
        batch, autocast = _two_of(micro_batch.batch, count), trainer.precision.autocast
        for step in (task.prediction_step, task.training_step):  # which may prepare the inputs
            given = trainer.model, batch, self._depth, step, autocast
            summary = summarize(*given, compute=True, samples=min(count, 2))
            if summary.problem is None:
                break
        if trainer.is_main:
            width = min(WIDTH, columns_of(sys.stderr) or WIDTH)
            logger.info("%s", render(summary, width))


def _two_of(part: Any, count: int) -> Any:
    """Return two samples of a batch, whose tensors and lists may have an item for each."""
    if isinstance(part, Tensor):
        return part[:2] if part.ndim else part
    if isinstance(part, list | tuple):
        whole = len(part) != count
        return rebuild(part, [_two_of(item, count) for item in part]) if whole else part[:2]
    return {k: _two_of(v, count) for k, v in part.items()} if isinstance(part, dict) else part
