"""When learning rates move: after an applied update, an epoch, or a validation."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from conf.errors import Problem
from trainer.errors import CheckpointError
from trainer.lr_schedulers.curve import jump
from trainer.lr_schedulers.horizon import Interval, ScheduleError
from trainer.lr_schedulers.nodes import build_track, takes_metric, target_nodes
from trainer.lr_schedulers.track import StandIn, Track
from trainer.optimizers.optimizers import Optimizers

logger = logging.getLogger("regimen")

__all__ = [
    "LRSchedule",
    "ScheduleError",
    "build_lr_schedule",
    "curve",
    "target_nodes",
]


class LRSchedule:
    """Move the learning rates of one or several optimizers, each along its own track."""

    def __init__(
        self,
        tracks: Mapping[str, Track],
        configured: Mapping[str, list[dict[str, Any]]] | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.tracks = dict(tracks)
        self.updates = 0  # applied
        self.epochs = 0
        self._tracks = list(self.tracks.values())
        self._configured = dict(configured or {})
        self._steps_per_epoch = steps_per_epoch

    @classmethod
    def none(cls) -> LRSchedule:
        """Return the schedule that leaves learning rates alone."""
        return cls({})

    @classmethod
    def wrap(
        cls, scheduler: Any = None, interval: Interval = "step", monitor: str | None = None
    ) -> LRSchedule:
        """Take a plain torch scheduler (or nothing, or a schedule).

        `monitor` names the metric of one that follows a metric, such as ReduceLROnPlateau.
        """
        if isinstance(scheduler, LRSchedule):
            return scheduler
        if scheduler is None:
            return cls.none()
        if takes_metric(scheduler) and monitor is None:
            raise ScheduleError(
                f"{type(scheduler).__name__} follows a metric: name it with"
                ' LRSchedule.wrap(scheduler, monitor="val/loss")'
            )
        return cls({"optimizer": Track(scheduler.optimizer, scheduler, interval, None, monitor)})

    @property
    def monitors(self) -> tuple[str, ...]:
        """The metrics that are watched."""
        return tuple(dict.fromkeys(t.monitor for t in self._tracks if t.monitor is not None))

    @property
    def monitor(self) -> str | None:
        """The first of `monitors`, if there is one."""
        return next(iter(self.monitors), None)

    def after_update(self) -> None:
        """Follow an update that was applied; one that was skipped moves nothing (I10)."""
        self.updates += 1
        for track in self._tracks:
            track.after_update()

    def after_epoch(self) -> None:
        """Follow the last update of an epoch."""
        self.epochs += 1
        for track in self._tracks:
            track.after_epoch()

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        """Follow a validation, or the means of an epoch of training.

        A schedule that watches the other of the two stays where it is. Raises `ScheduleError` where
        one waits for a metric of this stage that is not there: it never would be.
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
        """List what is set up differently here than where `state` was saved."""
        saved = state["tracks"]
        found = [f"{name!r} has no schedule here" for name in saved.keys() - self.tracks.keys()]
        for name, track in self.tracks.items():
            known = name in saved
            found += track.differences(saved[name]) if known else [f"{name!r} had no schedule"]
        return found

    def load_state_dict(self, state: Mapping[str, Any], hyper_parameters: bool = True) -> None:
        """Go to where `state` was saved; load the optimizers first.

        Exactly, and with `CheckpointError` if anything is set up differently; or, with
        `hyper_parameters=False`, by the present configuration: to the same position of its curve.
        """
        try:
            updates, epochs, saved = int(state["updates"]), int(state["epochs"]), state["tracks"]
            differences = self.differences(state) if hyper_parameters else []
            if differences:
                more = f" (+{len(differences) - 1} more)" if len(differences) > 1 else ""
                raise CheckpointError(f"the lr_scheduler does not fit: {differences[0]}{more}")
            for name, track in self.tracks.items():
                if hyper_parameters:
                    track.load_state_dict(saved[name])
                else:
                    track.catch_up(
                        saved.get(name),
                        self._configured.get(name, []),
                        lambda other: _pass_by(other, updates, epochs, self._steps_per_epoch),
                    )
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise CheckpointError(f"the lr_scheduler's state is malformed: {error!r}") from None
        self.updates, self.epochs = updates, epochs


def _pass_by(track: Track, updates: int, epochs: int, steps_per_epoch: int | None) -> None:
    """Let `updates` and `epochs` go by; skipped updates are taken to be the last ones."""
    done = 0
    for update in range(1, updates + 1):
        track.after_update()
        if done < epochs and update % (steps_per_epoch or updates) == 0:
            track.after_epoch()
            done += 1
    for _ in range(epochs - done):
        track.after_epoch()


def build_lr_schedule(
    node: Mapping[str, Any] | None,
    optimizers: Optimizers,
    total_steps: int | None,
    steps_per_epoch: int | None,
    key: str = "lr_scheduler",
    guessed: bool = False,
) -> LRSchedule:
    """Build a config's `lr_scheduler` over `optimizers`, of which some may bring their own.

    In `node`, "${total_steps}" is filled with the scheduler's own horizon: what remains of the run
    after the warm-up, in updates, or in epochs with `interval: epoch`. Raises `ScheduleError`, for
    a schedule that ends before the run as well, unless its lengths are `guessed`.
    """
    schedule = _build(node, optimizers, total_steps, steps_per_epoch, key)
    _examine(node, optimizers, total_steps, steps_per_epoch, key, guessed)
    return schedule


def warn_of_long_warmups(
    schedule: LRSchedule, total_steps: int | None, steps_per_epoch: int | None
) -> None:
    """Say once that a warm-up takes all of the run: allowed, for short trials."""
    ramp = max((t.warmup.updates(steps_per_epoch) for t in schedule.tracks.values()), default=0)
    if total_steps is not None and ramp >= total_steps:
        logger.warning(
            "warning: the warm-up takes %d updates, the run ends at %d", ramp, total_steps
        )


def _examine(
    node: Mapping[str, Any] | None,
    optimizers: Optimizers,
    total_steps: int | None,
    steps_per_epoch: int | None,
    key: str,
    guessed: bool,
) -> None:
    """Look ahead for learning rates that are none, since torch looks at few arguments."""
    stand_ins = _stand_ins(optimizers)
    last = total_steps or 1000
    steps = [*range(0, last, max(1, last // 50)), last]
    try:
        schedule = _build(node, stand_ins, total_steps, steps_per_epoch, key)
        for optimizer in stand_ins.optimizers.values():
            optimizer.step()
        rates = _jumped(schedule, stand_ins, steps, steps_per_epoch)
    except (TypeError, ArithmeticError) as error:
        message = f"the schedule cannot be computed: {error}"
        raise ScheduleError(Problem(key, message)) from error
    except ValueError as error:  # OneCycleLR's, where it is asked for a step beyond its last
        if "Tried to step" not in str(error):
            raise
        if guessed:
            return
        message = f"{error}, but the run has {total_steps} updates in all"
        hint = "leave lr_scheduler.total_steps at ${total_steps}"
        raise ScheduleError(Problem(key, message, hint)) from error
    for step, at in zip(steps, rates, strict=False):
        for group, lr in at.items():
            if not 0 <= lr < math.inf:
                message = f"makes the learning rate of {group!r} {lr:g} at {step}"
                raise ScheduleError(Problem(key, message))


def _build(
    node: Mapping[str, Any] | None,
    optimizers: Optimizers,
    total_steps: int | None,
    steps_per_epoch: int | None,
    key: str,
) -> LRSchedule:
    groups = optimizers.groups()
    all_names = [group.name for group in groups]
    tracks = {}
    for name, optimizer in optimizers.items():
        own = optimizers.lr_schedulers.get(name)
        chosen = node if own is None else own
        where = key if own is None else f"{optimizers.keys[name]}.lr_scheduler"
        if chosen:
            names = [group.name for group in groups if group.optimizer_name == name]
            tracks[name] = build_track(
                chosen, optimizer, names, all_names, total_steps, steps_per_epoch, where
            )
    return LRSchedule(tracks, optimizers.configured, steps_per_epoch)


def curve(
    node: Mapping[str, Any] | None,
    optimizers: Optimizers | Mapping[str, float],
    total_steps: int,
    steps_per_epoch: int | None,
    points: int = 200,
) -> dict[str, list[tuple[int, float]]]:
    """Return (step, learning rate) of each group at about `points` steps of the run.

    Tried on stand-ins: nothing that is given is touched. A schedule that follows a metric is drawn
    as if the metric always got better. Schedulers without a formula (ChainedScheduler, a user's
    own) are walked through, which takes some microseconds a step.
    """
    steps = sorted({*range(0, total_steps, max(1, total_steps // points)), max(0, total_steps - 1)})

    def build() -> tuple[LRSchedule, Optimizers]:
        stand_ins = _stand_ins(optimizers)
        schedule = _build(node, stand_ins, total_steps, steps_per_epoch, "lr_scheduler")
        for optimizer in stand_ins.optimizers.values():
            optimizer.step()  # schedulers warn if they come first
        return schedule, stand_ins

    rates = _jumped(*build(), steps, steps_per_epoch) or _walked(*build(), steps, steps_per_epoch)
    return {name: [(s, at[name]) for s, at in zip(steps, rates, strict=True)] for name in rates[0]}


_Rates = list[dict[str, float]]  # of each group, at each of some steps


def _jumped(
    schedule: LRSchedule, optimizers: Optimizers, steps: Sequence[int], steps_per_epoch: int | None
) -> _Rates:
    rates = []
    for step in steps:
        if not all(jump(track, step, steps_per_epoch) for track in schedule.tracks.values()):
            return []
        rates.append(optimizers.learning_rates())
    return rates


def _walked(
    schedule: LRSchedule, optimizers: Optimizers, steps: Sequence[int], steps_per_epoch: int | None
) -> _Rates:
    rates = [optimizers.learning_rates()]
    for step in range(1, steps[-1] + 1):
        schedule.after_update()
        if steps_per_epoch and step % steps_per_epoch == 0:
            schedule.after_epoch()
        if step == steps[len(rates)]:
            rates.append(optimizers.learning_rates())
    return rates


def _stand_ins(optimizers: Optimizers | Mapping[str, float]) -> Optimizers:
    if not isinstance(optimizers, Optimizers):
        groups = [{"name": name, "lr": lr} for name, lr in optimizers.items()]
        alone: Optimizer = StandIn(groups, {"lr": 0.0, "momentum": 0.0})
        return Optimizers({"optimizer": alone}, {})
    names = [group.name for group in optimizers.groups()]
    copies = {}
    for name, optimizer in optimizers.items():
        configured = [{**group, "name": names.pop(0)} for group in optimizers.configured[name]]
        copies[name] = StandIn(configured, optimizer.defaults)
    return Optimizers(copies, {}, lr_schedulers=optimizers.lr_schedulers, keys=optimizers.keys)
