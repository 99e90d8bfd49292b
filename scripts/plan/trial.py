"""Try what a run would do: one micro-batch of each split through model, loss and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from data.errors import DataError
from trainer.evaluation import Evaluator

if TYPE_CHECKING:
    from data.batch import MicroBatch
    from trainer.build.experiment import Experiment
    from trainer.trainer import Trainer


def first_micro_batch(trainer: Trainer) -> MicroBatch | DataError:
    """Return the first micro-batch of the training, or why it cannot be read."""
    try:
        return next(trainer.draw(0))[0]
    except DataError as error:
        return error
    finally:
        trainer.train_loader.close()


def try_out(experiment: Experiment, first: MicroBatch | DataError) -> Iterator[str]:
    """Train on `first` without a step and evaluate one batch of each other split.

    Yields what could not be tried, since it cannot be read. Raises what training would raise.
    """
    trainer = experiment.trainer
    if isinstance(first, DataError):
        yield f"train could not be read, so that the model was not tried: {first}"
        return
    trainer.wrapped.train()
    trainer.updater.try_out([first])
    for split, loader in (("val", trainer.val_loader), ("test", experiment.test_loader)):
        if loader is not None:
            yield from _evaluated(trainer, split, loader)


def _evaluated(trainer: Trainer, split: str, loader: Any) -> Iterator[str]:
    try:
        found = Evaluator(trainer, trainer.waiting).run(loader, split, nullcontext(), 1, 0)
    except DataError as error:
        yield f"{split} could not be read, and was not tried: {error}"
        return
    finally:
        loader.close()
    declared = [f"{split}/{name}" for name in trainer.task.metric_names()]
    if missing := [name for name in declared if name not in found]:
        yield f"the task declares {', '.join(missing)}, and its evaluation_step does not return it"
