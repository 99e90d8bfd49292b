"""Stochastic weight averaging: the mean of the weights at the ends of the last epochs."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.swa_utils import get_swa_multi_avg_fn

from regimen.callbacks.ema import RunningAverage
from regimen.callbacks.support import check_least, logger, steps_of
from regimen.trainer.trainer import Trainer


@dataclass(eq=False)
class SWA(RunningAverage):
    """Keep the mean of the weights at the end of every epoch after `start_epoch`.

    `start_epoch`: the number of epochs before the first one that is averaged (an int), or a
    share of max_epochs (a float up to 1). `update_bn`: recompute BatchNorm's statistics of the
    average on the training data after every averaged epoch, on at most `bn_batches` updates.
    `use_for_evaluation`: validation and test use the average once there is one.

    Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, 2018.
    """

    start_epoch: float = 0.75
    update_bn: bool = True
    bn_batches: int | None = None
    use_for_evaluation: bool = True
    persistent = ("averaged",)

    def __post_init__(self) -> None:
        super().__init__(self.use_for_evaluation, use_buffers=False)
        steps_of("start_epoch", self.start_epoch, 1)
        check_least(bn_batches=self.bn_batches)
        self.averaged = 0  # epochs

    @property
    def begun(self) -> bool:
        """Whether an epoch was averaged."""
        return self.averaged > 0

    def setup(self, trainer: Trainer) -> None:
        """Resolve `start_epoch`. Raises CallbackError for a share without max_epochs."""
        key = f"callbacks.{self.name}.start_epoch"
        self._epochs_before = steps_of(key, self.start_epoch, trainer.options.max_epochs)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Add the weights at the end of this epoch to the average."""
        if trainer.state.epoch <= self._epochs_before:
            return
        self.update(get_swa_multi_avg_fn(), self.averaged)  # type: ignore[no-untyped-call]
        self.averaged += 1
        if self.update_bn:
            with self.exchanged(trainer.model), trainer.timer.spending("evaluation"):
                _recompute_norms(trainer, self.bn_batches)
                self.take_buffers()

    def on_fit_end(self, trainer: Trainer) -> None:
        """Warn if no epoch was averaged."""
        if not self.averaged:
            logger.warning("callbacks.%s: the run ended before its start_epoch", self.name)


@torch.no_grad()
def _recompute_norms(trainer: Trainer, batches: int | None) -> None:
    """Set BatchNorm's statistics to their mean over the training data.

    As torch's `update_bn`, but without dropout, and over all processes: a collective.
    """
    model = trainer.model
    modes = [(module, module.training) for module in model.modules()]
    norms: list[Any] = []
    for module, is_training in modes:
        if is_training and getattr(module, "track_running_stats", False):
            norms.append(module)
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    calls = Counter[Any]()

    def average_over_batches(norm: Any, _: Any) -> None:
        # BatchNorm with a momentum of None does the same, but waits for the device to read its
        # counter.
        calls[norm] += 1
        norm.momentum = 1 / calls[norm]

    model.eval()
    for norm in norms:
        norm.train().reset_running_stats()
    hooks = [norm.register_forward_pre_hook(average_over_batches) for norm in norms]
    limits = [n for n in (batches, trainer.steps_per_epoch) if n is not None]
    updates = trainer.draw(trainer.state.epoch, stop=min(limits, default=None))
    try:
        trainer.train_loader.close()  # end the workers of the last epoch
        for micro_batches in updates:
            for micro_batch in micro_batches:
                with trainer.precision.autocast():
                    trainer.task.prediction_step(model, micro_batch.batch)
        trainer.train_loader.close()
        for norm in norms:
            # A collective: the mean over the processes, each of which saw its own batches.
            for statistic in (norm.running_mean, norm.running_var):
                statistic.copy_(trainer.group.reduce(statistic) / trainer.group.data_size)
    finally:
        for norm, momentum, hook in zip(norms, momenta, hooks, strict=True):
            norm.momentum = momentum
            hook.remove()
        for module, is_training in modes:
            module.training = is_training
