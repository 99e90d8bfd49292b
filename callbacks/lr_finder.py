"""The learning rate range test."""

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
        given = f"min_lr={self.min_lr}, max_lr={self.max_lr}"
        require(0 < self.min_lr < self.max_lr, f"{given}: choose 0 < min_lr < max_lr")
        sound = self.updates >= 2 and 0 <= self.smoothing < 1 and self.stop_factor > 1
        require(sound, "choose updates >= 2, 0 <= smoothing < 1 and stop_factor > 1")
        self.rates = list[float]()
        self.losses = list[float]()
        self.ratios = list[float]()  # of the groups' rates to the largest

    def setup(self, trainer: Trainer) -> None:
        """Raise CallbackError unless the loss of every update is logged."""
        every = trainer.options.log_every_n_steps == 1
        require(every, f"callbacks.{self.name} needs trainer.log_every_n_steps=1")

    def on_fit_start(self, trainer: Trainer) -> None:
        """Set the smallest rate; a resumed test goes on."""
        if not self.ratios:
            rates = list(trainer.learning_rates().values())
            self.ratios = [rate / max(rates) if max(rates) > 0 else 1.0 for rate in rates]
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
        found, path = self.suggestion(), trainer.run_dir / "lr_finder.json"
        write_json(path, {"suggestion": found, "lr": self.rates, "loss": self.losses})
        told = "nothing: the loss never fell" if found is None else f"{found:.4g}"
        logger.info("learning rate range test: suggests %s (%s)", told, path)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Write the report: the run may have diverged at the largest rates."""
        self.on_fit_end(trainer)

    def suggestion(self) -> float | None:
        """Return the rate at which the smoothed loss falls fastest; None if it never falls."""
        smooth = self._smoothed()
        steps = zip(smooth, smooth[1:], self.rates, strict=False)
        slope, rate = min(((b - a, rate) for a, b, rate in steps), default=(0.0, None))
        return rate if slope < 0 else None

    def _rate(self, update: int) -> float:
        share = min(1.0, update / (self.updates - 1))
        return float(self.min_lr * (self.max_lr / self.min_lr) ** share)

    def _stop_if_done(self, trainer: Trainer) -> None:
        smooth = self._smoothed()
        exploded = bool(smooth) and not smooth[-1] <= self.stop_factor * min(smooth)
        if exploded or (smooth and trainer.state.updates >= self.updates):
            trainer.state.request_stop("the learning rate range test is done")

    def _smoothed(self) -> list[float]:
        """Return the exponential moving averages of the losses, with bias correction."""
        average, weight, result = 0.0, 0.0, []
        for loss in self.losses:
            average = self.smoothing * average + (1 - self.smoothing) * loss
            weight = self.smoothing * weight + 1 - self.smoothing
            result.append(average / weight)
        return result
