"""The learning rate range test."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from regimen.callbacks.support import logger, require
from regimen.trainer.callback import Callback
from regimen.trainer.files.atomic import write_json
from regimen.trainer.trainer import Trainer


@dataclass(eq=False)
class LRFinder(Callback):
    """Raise the learning rate from `min_lr` to `max_lr` over `updates`, then end the run.

    The run also ends when the smoothed loss exceeds `stop_factor` times its minimum.
    `lr_finder.json` in the run directory holds the curve and a suggestion: the rate at which the
    loss falls fastest. Groups keep the ratios of their rates; the largest rate is reported. The
    schedule has no effect.

    Smith, Cyclical Learning Rates for Training Neural Networks, 2017, section 3.3.
    """

    min_lr: float = 1e-6
    max_lr: float = 1.0
    updates: int = 100
    stop_factor: float = 4.0
    smoothing: float = 0.8
    keeps_weights = False
    persistent = ("rates", "losses", "ratios")

    def __post_init__(self) -> None:
        require(
            0 < self.min_lr < self.max_lr < math.inf,
            f"min_lr={self.min_lr}, max_lr={self.max_lr}: choose 0 < min_lr < max_lr",
        )
        require(
            self.updates >= 2 and 0 <= self.smoothing < 1 and self.stop_factor > 1,
            "choose updates >= 2, 0 <= smoothing < 1 and stop_factor > 1",
        )
        self.rates = list[float]()
        self.losses = list[float]()
        self.ratios = list[float]()  # of the groups' rates to the largest

    def setup(self, trainer: Trainer) -> None:
        """Raise CallbackError unless the loss of every update is logged."""
        require(
            trainer.options.log_every_n_steps == 1,
            f"callbacks.{self.name} needs trainer.log_every_n_steps=1",
        )

    def on_fit_start(self, trainer: Trainer) -> None:
        """Set the smallest rate; a resumed test goes on."""
        if not self.ratios:
            rates = list(trainer.learning_rates().values())
            largest = max(rates)
            if largest > 0:
                self.ratios = [rate / largest for rate in rates]
            else:
                self.ratios = [1.0] * len(rates)
        self.on_update_end(trainer)
        self._stop_if_done(trainer)

    def on_update_end(self, trainer: Trainer) -> None:
        """Set the rate of the next update, after the schedule has set its own."""
        rate = self._rate(trainer.state.updates)
        for group, ratio in zip(trainer.optimizers.groups(), self.ratios, strict=True):
            group.options["lr"] = rate * ratio

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Record the loss of an update and its learning rate."""
        if "train/loss" in scalars:
            self.rates.append(self._rate(trainer.state.updates - 1))
            self.losses.append(scalars["train/loss"])
            self._stop_if_done(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Write the report."""
        if trainer.run_dir is None or not trainer.is_main or not self.rates:
            return
        suggestion = self.suggestion()
        path = trainer.run_dir / "lr_finder.json"
        write_json(path, {"suggestion": suggestion, "lr": self.rates, "loss": self.losses})
        text = "nothing: the loss never fell" if suggestion is None else f"{suggestion:.4g}"
        logger.info("learning rate range test: suggests %s (%s)", text, path)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Write the report: the run may have diverged at the largest rates."""
        self.on_fit_end(trainer)

    def suggestion(self) -> float | None:
        """Return the rate at which the smoothed loss falls fastest; None if it never falls."""
        smoothed = self._smoothed()
        changes = []  # of the loss by an update, and the rate of that update
        for before, after, rate in zip(smoothed, smoothed[1:], self.rates, strict=False):
            changes.append((after - before, rate))
        largest_fall, best_rate = min(changes, default=(0.0, 0.0))
        return best_rate if largest_fall < 0 else None

    def _rate(self, update: int) -> float:
        share = min(1.0, update / (self.updates - 1))
        return float(self.min_lr * (self.max_lr / self.min_lr) ** share)

    def _stop_if_done(self, trainer: Trainer) -> None:
        smoothed = self._smoothed()
        if not smoothed:
            return
        has_exploded = not smoothed[-1] <= self.stop_factor * min(smoothed)  # or is NaN
        if has_exploded or trainer.state.updates >= self.updates:
            trainer.state.request_stop("the learning rate range test is done")

    def _smoothed(self) -> list[float]:
        """Return the exponential moving averages of the losses, with bias correction."""
        decay = self.smoothing
        average = 0.0
        weight = 0.0
        result = []
        for loss in self.losses:
            average = decay * average + (1 - decay) * loss
            weight = decay * weight + 1 - decay
            result.append(average / weight)
        return result
