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
    """Average the weights after every epoch from `start_epoch` on, each with the same weight.

    `start_epoch`: epochs trained before the first one that counts (an int), or a share of
    max_epochs (a float below 1). `update_bn`: BatchNorm's statistics of the average are measured
    on the training data, after every epoch that counts; `bn_batches` bounds that pass.
    `use_for_evaluation`: validation and test, from then on, see the average.

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
                f"start_epoch={start_epoch}: choose a whole number of epochs, or a share of "
                "trainer.max_epochs between 0 and 1"
            )
        self._start_epoch = start_epoch
        self._update_bn = update_bn
        self._bn_batches = bn_batches
        self.used_for_evaluation = use_for_evaluation
        self._average = WeightAverage(use_buffers=False)
        self.averaged = 0  # epochs

    def setup(self, trainer: Trainer) -> None:
        """Find the first epoch."""
        if not isinstance(self._start_epoch, float) or self._start_epoch >= 1:
            return
        if trainer.options.max_epochs is None:
            raise CallbackError(
                f"callbacks.{self.name}.start_epoch={self._start_epoch} is a share of "
                "trainer.max_epochs, which is not set: give a number of epochs"
            )
        self._start_epoch = int(self._start_epoch * trainer.options.max_epochs)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Take a loaded average up again."""
        self._average.begin(trainer.model)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Average the weights that this epoch ended with."""
        if trainer.state.epoch <= self._start_epoch:
            return
        self._average.update(1 / (self.averaged + 1))
        self.averaged += 1
        if self._update_bn and norms(trainer.model):
            with self._average.exchanged(trainer.model):
                measure(trainer, self._bn_batches)
                self._average.take_buffers()

    def on_fit_end(self, trainer: Trainer) -> None:
        """Say so if there was nothing to average."""
        if not self.averaged:
            _log.warning("callbacks.%s: the run ended before its start_epoch", self.name)

    def swap(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Return the context in which the model has the average's weights, once there is one."""
        used = self.used_for_evaluation and self.averaged
        return self._average.exchanged(trainer.model) if used else nullcontext()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the average's tensors themselves."""
        return self._average.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the average, in the form of the model's state, and how many epochs it is of."""
        return {"model": self._average.state_dict(), "averaged": self.averaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over an average."""
        self._average.load_state_dict(state["model"])
        self.averaged = state["averaged"]


def norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the modules that keep running statistics."""
    found = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    return [m for m in found if m.track_running_stats and m.training]


@torch.no_grad()
def measure(trainer: Trainer, batches: int | None) -> None:
    """Set BatchNorm's statistics to their mean over the training data.

    As torch's `update_bn`, but dropout stays off and no random state is touched: the training that
    goes on must not depend on it.
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
    trainer.train_loader.close()  # of the workers of the epoch that has just ended
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
