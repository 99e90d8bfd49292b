"""The learning rate schedule, which is stepped after updates, epochs and validations."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from conf.errors import Problem
from trainer.errors import CheckpointError
from trainer.lr_schedulers.horizon import Interval, ScheduleError
from trainer.lr_schedulers.nodes import build_track, takes_metric
from trainer.lr_schedulers.track import Track
from trainer.optimizers.optimizers import Optimizers

logger = logging.getLogger("regimen")


class LRSchedule:
    """Set the learning rates of one or several optimizers, each by its own track."""

    def __init__(self, tracks: Mapping[str, Track]) -> None:
        self.tracks = dict(tracks)
        self.updates = 0  # applied
        self.epochs = 0
        self._tracks = list(self.tracks.values())

    @classmethod
    def none(cls) -> LRSchedule:
        """Return the schedule that changes no learning rate."""
        return cls({})

    @classmethod
    def wrap(
        cls, scheduler: Any = None, interval: Interval = "step", monitor: str | None = None
    ) -> LRSchedule:
        """Wrap a plain torch scheduler (or None, or a schedule), which is stepped directly.

        `monitor` is the metric of a scheduler that needs one, such as ReduceLROnPlateau.
        """
        if isinstance(scheduler, LRSchedule):
            return scheduler
        if scheduler is None:
            return cls.none()
        if takes_metric(scheduler) and monitor is None:
            raise ScheduleError(
                f"{type(scheduler).__name__} monitors a metric: name it with"
                ' LRSchedule.wrap(scheduler, monitor="val/loss")'
            )
        track = Track(scheduler.optimizer, scheduler, interval, monitor)
        return cls({"optimizer": track})

    @property
    def monitors(self) -> tuple[str, ...]:
        """The metrics that are monitored."""
        return tuple(dict.fromkeys(t.monitor for t in self._tracks if t.monitor is not None))

    def after_update(self) -> bool:
        """Step after an applied update; a skipped update changes nothing (I10).

        Returns whether a hyper-parameter has changed; groups are written to only then.
        """
        self.updates += 1
        moved = False
        for track in self._tracks:
            moved |= track.after_update(self.updates, self.epochs)
        return moved

    def after_epoch(self) -> None:
        """Step after the last update of an epoch."""
        self.epochs += 1
        for track in self._tracks:
            track.move(self.updates, self.epochs)

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        """Step after a validation, or with the training metrics of an epoch.

        A track that monitors the other of the two is not stepped. Raises `ScheduleError` if a
        monitored metric of this stage is missing.
        """
        stages = {name.partition("/")[0] for name in metrics}
        for track in self._tracks:
            watched = track.watched
            if watched and watched.partition("/")[0] in stages and watched not in metrics:
                known = ", ".join(metrics)
                message = f"{track.monitor}: no such metric; there are: {known}"
                raise ScheduleError(Problem("lr_scheduler.monitor", message))
            track.after_validation(metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return counters, positions and settings: plain values only."""
        return {
            "updates": self.updates,
            "epochs": self.epochs,
            "tracks": {name: track.state_dict() for name, track in self.tracks.items()},
        }

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """Return the settings that differ from those of `state`."""
        saved = state["tracks"]
        found = [f"{name!r} has no schedule here" for name in saved.keys() - self.tracks.keys()]
        for name, track in self.tracks.items():
            known = name in saved
            found += track.differences(saved[name]) if known else [f"{name!r} had no schedule"]
        return found

    def load_state_dict(self, state: Mapping[str, Any], hyper_parameters: bool = True) -> None:
        """Load `state`; the optimizers must be loaded first.

        The state is restored exactly, with `CheckpointError` if any setting differs. With
        `hyper_parameters=False` the settings of this schedule are used, at the saved position.
        """
        try:
            updates, epochs, saved = int(state["updates"]), int(state["epochs"]), state["tracks"]
            differences = self.differences(state) if hyper_parameters else []
            if differences:
                more = f" (+{len(differences) - 1} more)" if len(differences) > 1 else ""
                raise CheckpointError(f"the lr_scheduler does not fit: {differences[0]}{more}")
            for name, track in self.tracks.items():
                if hyper_parameters:
                    track.load_state_dict(saved[name], updates, epochs)
                else:
                    track.catch_up(saved.get(name), updates, epochs)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise CheckpointError(f"the lr_scheduler's state is malformed: {error!r}") from None
        self.updates, self.epochs = updates, epochs

    def preview(self, step: int) -> dict[str, float]:
        """Return each group's learning rate after `step` updates.

        For a schedule with a metric it is assumed that the metric always improves. Steps far ahead
        are computed by torch's closed form, or if there is none by stepping the scheduler, which
        takes some microseconds for each step.
        """
        return {
            name: lr
            for track in self._tracks
            for name, lr in zip(track.group_names, track.preview(step), strict=True)
        }


def build_lr_schedule(
    node: Mapping[str, Any] | None,
    optimizers: Optimizers,
    total_steps: int | None,
    steps_per_epoch: int | None,
    key: str = "lr_scheduler",
    guessed: bool = False,
) -> LRSchedule:
    """Build the schedule of an `lr_scheduler` node over `optimizers`.

    An optimizer with an `lr_scheduler` of its own uses that one. "${total_steps}" is replaced by
    the scheduler's own horizon: the rest of the run after the warm-up, in updates, or in epochs
    with `interval: epoch`. Raises `ScheduleError`, also for a schedule that ends before the run,
    unless the lengths are `guessed`.
    """
    groups = optimizers.groups()
    all_names = [group.name for group in groups]
    tracks = {}
    for name, optimizer in optimizers.items():
        own = optimizers.lr_schedulers.get(name)
        chosen = node if own is None else own
        where = key if own is None else f"{optimizers.keys[name]}.lr_scheduler"
        if chosen:
            tracks[name] = build_track(
                chosen,
                optimizer,
                optimizers.configured[name],
                [group.name for group in groups if group.optimizer_name == name],
                all_names,
                total_steps,
                steps_per_epoch,
                where,
            )
    schedule = LRSchedule(tracks)
    _examine(schedule, total_steps, key, guessed)
    return schedule


def warn_of_long_warmups(
    schedule: LRSchedule, total_steps: int | None, steps_per_epoch: int | None
) -> None:
    """Warn if a warm-up takes the whole run, which is allowed for short trials."""
    ramp = max((t.warmup.updates(steps_per_epoch) for t in schedule.tracks.values()), default=0)
    if total_steps is not None and ramp >= total_steps:
        logger.warning(
            "warning: the warm-up takes %d updates, the run ends at %d", ramp, total_steps
        )


def _examine(schedule: LRSchedule, total_steps: int | None, key: str, guessed: bool) -> None:
    """Check the learning rates of the whole run, since torch validates few arguments."""
    last = total_steps or 1000
    try:
        for step in [*range(0, last, max(1, last // 50)), last]:
            for group, lr in schedule.preview(step).items():
                if not math.isfinite(lr):
                    raise ArithmeticError(f"the learning rate of {group!r} is {lr:g} at {step}")
                if lr < 0:
                    message = f"makes the learning rate of {group!r} {lr:g} at {step}"
                    raise ScheduleError(Problem(key, message))
    except (TypeError, ArithmeticError) as error:
        message = f"the schedule cannot be computed: {error}"
        raise ScheduleError(Problem(key, message)) from error
    except ValueError as error:  # raised by OneCycleLR beyond its last step
        if "Tried to step" not in str(error):
            raise
        if guessed:
            return
        message = f"{error}, but the run has {total_steps} updates in all"
        hint = "set lr_scheduler.total_steps to ${total_steps}"
        raise ScheduleError(Problem(key, message, hint)) from error


def curve(
    schedule: LRSchedule, optimizers: Optimizers, total_steps: int, points: int = 200
) -> dict[str, list[tuple[int, float]]]:
    """Return (step, learning rate) of each group at about `points` steps of the run."""
    steps = sorted({*range(0, total_steps, max(1, total_steps // points)), max(0, total_steps - 1)})
    rates = [optimizers.learning_rates() | schedule.preview(step) for step in steps]
    return {name: [(s, at[name]) for s, at in zip(steps, rates, strict=True)] for name in rates[0]}
