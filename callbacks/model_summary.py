"""Log a summary of the model before training."""

import sys
from typing import Any

from torch import Tensor

from regimen.callbacks.support import check_least, logger
from regimen.data.batch import rebuild
from regimen.trainer.assembly.summary import render, summarize
from regimen.trainer.callback import Callback
from regimen.trainer.files.layout import WIDTH, terminal_width
from regimen.trainer.trainer import Trainer


class ModelSummary(Callback):
    """Log the modules down to `depth` with shapes, parameters and FLOPs.

    The shapes are those of a batch of two training samples.
    """

    affects_result = False

    def __init__(self, depth: int = 1) -> None:
        check_least(0, depth=depth)
        self._depth = depth

    def on_fit_start(self, trainer: Trainer) -> None:
        """Log the table, except in a resumed run, whose log has it already."""
        if trainer.resumed:
            return
        # On every process: the forward pass of a sharded model is a collective.
        with trainer.random.isolated():
            micro_batch = next(trainer.draw(trainer.state.epoch))[0]
            trainer.train_loader.close()
        count = micro_batch.batch_slice.count
        batch = _first_two(micro_batch.batch, count)
        # Where the prediction step fails the training step is tried, which may prepare the inputs.
        for step in (trainer.task.prediction_step, trainer.task.training_step):
            summary = summarize(
                trainer.model,
                batch,
                self._depth,
                step,
                trainer.precision.autocast,
                compute=True,
                samples=min(count, 2),
            )
            if summary.problem is None:
                break
        if trainer.is_main:
            width = min(terminal_width(sys.stderr) or WIDTH, WIDTH)
            logger.info("%s", render(summary, width))


def _first_two(part: Any, count: int) -> Any:
    """Return two samples of a batch of `count`, whose tensors and lists may have an item each."""
    if isinstance(part, Tensor):
        return part[:2] if part.ndim else part
    if isinstance(part, dict):
        return {name: _first_two(value, count) for name, value in part.items()}
    if not isinstance(part, list | tuple):
        return part
    if len(part) == count:  # an item for each sample
        return part[:2]
    return rebuild(part, [_first_two(item, count) for item in part])
