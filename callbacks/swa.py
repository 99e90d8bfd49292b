"""Stochastic weight averaging: the mean of the weights at the ends of the last epochs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from callbacks.support.averaging import WeightAverage
from callbacks.support.errors import CallbackError
from trainer import rng
from trainer.callback import Average

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_log = logging.getLogger(__name__)


class SWA(Average):
    """Keep the mean of the weights at the end of every epoch after `start_epoch`.

    `start_epoch`: the number of epochs before the first one that is averaged (an int), or a
    fraction of max_epochs (a float below 1). `update_bn`: recompute BatchNorm's statistics of the
    average on the training data after every averaged epoch, on at most `bn_batches` updates.
    `use_for_evaluation`: validation and test use the average once there is one.

    Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, 2018.
    """

    def __init__(
        self,
        start_epoch: float = 0.75,
        update_bn: bool = True,
        bn_batches: int | None = None,
        use_for_evaluation: bool = True,
    ) -> None:
        if start_epoch < 0 or (start_epoch > 1 and start_epoch != int(start_epoch)):
            raise CallbackError(
                f"start_epoch={start_epoch}: choose a whole number of epochs, or a fraction of "
                "trainer.max_epochs between 0 and 1"
            )
        self._start_epoch = start_epoch
        self._update_bn = update_bn
        self._bn_batches = bn_batches
        self.used_for_evaluation = use_for_evaluation
        self._average = WeightAverage(use_buffers=False)
        self.averaged = 0  # epochs

    def setup(self, trainer: Trainer) -> None:
        """Resolve `start_epoch`. Raises CallbackError for a fraction without max_epochs."""
        if not isinstance(self._start_epoch, float) or self._start_epoch >= 1:
            return
        if trainer.options.max_epochs is None:
            raise CallbackError(
                f"callbacks.{self.name}.start_epoch={self._start_epoch} is a fraction of "
                "trainer.max_epochs, which is not set: give a number of epochs"
            )
        self._start_epoch = int(self._start_epoch * trainer.options.max_epochs)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Continue a loaded average, if there is one."""
        self._average.begin(trainer.model)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Add the weights at the end of this epoch to the average."""
        if trainer.state.epoch <= self._start_epoch:
            return
        self._average.update(1 / (self.averaged + 1))
        self.averaged += 1
        if self._update_bn and norms(trainer.model):
            with self._average.exchanged(trainer.model):
                measure(trainer, self._bn_batches)
                self._average.take_buffers()

    def on_fit_end(self, trainer: Trainer) -> None:
        """Warn if no epoch was averaged."""
        if not self.averaged:
            _log.warning("callbacks.%s: the run ended before its start_epoch", self.name)

    @property
    def begun(self) -> bool:
        """Whether an epoch was averaged."""
        return self.averaged > 0

    def swap(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Return the context in which the model has the average's weights, once there is one."""
        used = self.used_for_evaluation and self.averaged
        return self._average.exchanged(trainer.model) if used else nullcontext()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the average's tensors themselves."""
        return self._average.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the average as a state dict of the model, and the number of averaged epochs."""
        return {"model": self._average.state_dict(), "averaged": self.averaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load an average."""
        self._average.load_state_dict(state["model"])
        self.averaged = state["averaged"]


def norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm modules in training mode that keep running statistics."""
    found = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    return [m for m in found if m.track_running_stats and m.training]


@torch.no_grad()
def measure(trainer: Trainer, batches: int | None) -> None:
    """Set BatchNorm's statistics to their mean over the training data.

    Like torch's `update_bn`, but without dropout and with the random state restored, so that the
    training that follows does not depend on it.
    """
    modules, state = norms(trainer.model), rng.capture()
    kept = [(m, m.training) for m in trainer.model.modules()]
    momenta = [m.momentum for m in modules]
    trainer.model.eval()
    for module in modules:
        module.reset_running_stats()
        module.momentum = None  # a mean over the batches instead of a moving one
        module.train()
    try:
        with trainer.timer.spending("evaluation"):
            _run(trainer, batches)
        _mean_over_processes(trainer, modules)
    finally:
        for module, momentum in zip(modules, momenta, strict=True):
            module.momentum = momentum
        for any_module, training in kept:
            any_module.training = training
        rng.restore(state)


def _run(trainer: Trainer, batches: int | None) -> None:
    limits = [n for n in (batches, trainer.options.limit_train_batches) if n is not None]
    trainer.train_loader.close()  # ends the workers of the last epoch
    for micro_batches in islice(trainer.draw(trainer.state.epoch), min(limits, default=None)):
        for micro_batch in micro_batches:
            with trainer.precision.autocast():
                trainer.task.prediction_step(trainer.model, micro_batch.batch)
    trainer.train_loader.close()


def _mean_over_processes(trainer: Trainer, modules: list[_BatchNorm]) -> None:
    for module in modules:
        for statistic in (module.running_mean, module.running_var):
            if statistic is not None:
                statistic.copy_(trainer.group.reduce(statistic) / trainer.group.world_size)
