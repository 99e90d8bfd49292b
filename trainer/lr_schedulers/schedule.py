"""The learning rate schedule, which is stepped after updates, epochs and validations."""

import copy
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

from torch import Tensor
from torch.optim import lr_scheduler as torch_schedulers

from regimen.conf.errors import truncated_list
from regimen.trainer.checkpoints.archive import plain_part
from regimen.trainer.errors import CheckpointError, describe_value
from regimen.trainer.optimizers.optimizers import Optimizers
from regimen.trainer.optimizers.param_groups import refuse
from regimen.trainer.optimizers.state import State, type_name
from regimen.trainer.state import epoch_metric

Interval = Literal["step", "epoch"]

# The state of torch's ReduceLROnPlateau, in contrast to its settings.
_PLATEAU_MEMORY = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
# Entries of torch's schedulers that are lists over the parameter groups.
_BY_GROUP = ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
# torch's schedulers whose arguments are numbers of updates, as its documentation says.
_BY_UPDATES = (torch_schedulers.OneCycleLR, torch_schedulers.CyclicLR)
# Arguments that are the length of the run: after it the rate rises again, or torch raises.
_WHOLE = {
    torch_schedulers.OneCycleLR: "total_steps",
    torch_schedulers.CosineAnnealingLR: "T_max",
    torch_schedulers.PolynomialLR: "total_iters",
}
# And those that are a part of it.
_PARTS = {
    torch_schedulers.ConstantLR: "total_iters",
    torch_schedulers.LinearLR: "total_iters",
    torch_schedulers.StepLR: "step_size",
}


class Warmup(NamedTuple):
    """Raise learning rates over `ticks` from `start_factor` times their first value to it.

    The factor at tick t is s + (1 - s) t / ticks (linear) or s ** (1 - t / ticks) (exponential).
    """

    ticks: int = 0
    every: str = "step"  # the unit of `ticks`, or "epoch"
    start_factor: float = 0.01
    shape: str = "linear"

    def factor(self, tick: int) -> float:
        """Return the factor of the learning rate at `tick`; 1 from `ticks` on."""
        if tick >= self.ticks:
            return 1.0
        if self.shape == "exponential":
            return float(self.start_factor ** (1 - tick / self.ticks))
        return self.start_factor + (1 - self.start_factor) * tick / self.ticks

    def updates(self, steps_per_epoch: int | None) -> int:
        """Return the number of updates of the warm-up."""
        return self.ticks * (steps_per_epoch or 1) if self.every == "epoch" else self.ticks


class Track:
    """Set the learning rates of one optimizer: by the warm-up, then by a torch scheduler.

    The warm-up ends at the scheduler's first value, so it can precede any scheduler; the
    scheduler's steps start after it. The position of a track follows from the run's updates and
    epochs. `settings` are the arguments that the track was built from; a scheduler of the caller's
    has none. Raises `ConfigError` for a `monitor` without need, or a scheduler without one.
    """

    def __init__(
        self,
        scheduler: Any,
        interval: Interval = "step",
        monitor: str | None = None,
        warmup: Warmup | None = None,
        group_names: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        follows = "metrics" in inspect.signature(scheduler.step).parameters
        if follows and not monitor:
            hint = None if settings else 'LRSchedule.wrap(scheduler, monitor="val/loss")'
            refuse("", "must be the metric that the scheduler monitors, such as val/loss", hint)
        if monitor and not follows:
            refuse("", f"{type(scheduler).__name__} does not monitor a metric")
        self.groups = scheduler.optimizer.param_groups
        self.scheduler = scheduler
        self.monitor = monitor
        # The metric by its name for a whole epoch or a validation.
        self.watched = None if monitor is None else epoch_metric(monitor)
        self.warmup = warmup or Warmup()
        self.settings = dict(settings or {})
        self.group_names = list(group_names) or [
            str(group.get("name", i)) for i, group in enumerate(self.groups)
        ]
        self.interval = interval
        self._by_step = interval == "step"
        self._warmup_epochs = 0  # the epochs that were complete when the warm-up ended
        self._at = self._position(0, 0)
        # What the scheduler begins with: a tensor is changed in place later.
        self._first = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
            for group in self.groups
        ]
        self._start = self.rates()
        self._warm()

    def rates(self) -> list[float]:
        """Return the learning rates of the groups now."""
        return [float(group["lr"]) for group in self.groups]

    def _position(self, updates: int, epochs: int) -> int:
        # The scheduler's steps so far; -n if the warm-up has n ticks left.
        if not self.warmup.ticks:
            return updates if self._by_step else epochs
        passed = (epochs if self.warmup.every == "epoch" else updates) - self.warmup.ticks
        if passed <= 0:
            self._warmup_epochs = epochs
        return passed if self._by_step or passed <= 0 else epochs - self._warmup_epochs

    def move(self, updates: int, epochs: int) -> None:
        """Take the next step, if it is due after this number of updates and epochs."""
        position = self._position(updates, epochs)
        if position != self._at:
            self._at = position
            if position <= 0:
                self._warm()
            elif self.monitor is None:
                self.scheduler.step()

    def after_validation(self, value: float) -> None:
        """Step the scheduler by its metric, which does not count during the warm-up."""
        if self._at >= 0:
            self.scheduler.step(value)

    def _warm(self) -> None:
        # During the warm-up, the learning rates are a fraction of the scheduler's first.
        if self.warmup.ticks and self._at <= 0:
            factor = self.warmup.factor(self.warmup.ticks + self._at)
            for group, start in zip(self.groups, self._start, strict=True):
                _put(group, "lr", start * factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, and the scheduler's state without functions: plain values."""
        return {
            "type": type_name(self.scheduler),
            "settings": self.settings,
            "groups": list(self.group_names),
            "warmup_epochs": self._warmup_epochs,
            "scheduler": plain_part(self.scheduler.state_dict()),
            "start": list(self._start),
            "lr": self.rates(),
        }

    def differences(self, state: State) -> Iterator[str]:
        """Yield the settings that differ from those of `state`."""
        own = type_name(self.scheduler)
        here, there = {"type": own, **self.settings}, {"type": state["type"], **state["settings"]}
        for key in here | there:
            if here.get(key) != there.get(key):
                yield f"lr_scheduler.{key} is {here.get(key)!r}, it was {there.get(key)!r}"
        for name in self.group_names:
            if name not in state["groups"]:
                yield f"group {name!r} had no schedule"
        # Only of torch's schedulers it is known which of their lists are by group.
        if not (self.settings and own.startswith("torch.")) and self.group_names != state["groups"]:
            yield "the parameter groups, or their order, have changed"

    def load_state_dict(self, state: State, updates: int, epochs: int) -> None:
        """Restore `state` exactly; the optimizer's state has the hyper-parameters."""
        self._warmup_epochs = int(state["warmup_epochs"])
        self._at = self._position(updates, epochs)
        order = [state["groups"].index(name) for name in self.group_names]
        self._start = [state["start"][i] for i in order]
        self.scheduler.load_state_dict(_reordered(state["scheduler"], order))

    def catch_up(
        self, state: State | None, updates: int, epochs: int, per_epoch: int | None
    ) -> None:
        """Move to the same updates and epochs in the schedule that is configured here.

        `state` is that of the earlier schedule, if there was one. A plateau scheduler keeps its
        history, and the reduced rates of groups with the same initial rate; an object of the user
        is restored exactly. Any other is stepped from its first values, not from warmed or loaded
        ones.
        """
        if not self.settings:
            if state is not None:
                self.load_state_dict(state, updates, epochs)
            return
        by_epoch = self.warmup.every == "epoch"
        self._warmup_epochs = self.warmup.ticks // (1 if by_epoch else per_epoch or 2**62)
        self._at = self._position(updates, epochs)
        if self.monitor is None:
            for group, first in zip(self.groups, self._first, strict=True):
                for key in first.keys() - {"params"}:
                    if key == "lr" or key not in self.scheduler.optimizer.defaults:
                        _put(group, key, first[key])
            # torch misses steps of the optimizer in between.
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                for _ in range(self._at):
                    self.scheduler.step()
        else:
            reached = {}
            if state is not None and state["type"] == type_name(self.scheduler):
                memory = {key: state["scheduler"][key] for key in _PLATEAU_MEMORY}
                self.scheduler.load_state_dict({**self.scheduler.state_dict(), **memory})
                begun = zip(state["groups"], state["start"], strict=True)
                reached = dict(zip(begun, state["lr"], strict=True))
            for group, name, start in zip(self.groups, self.group_names, self._start, strict=True):
                _put(group, "lr", reached.get((name, start), start))
        if self._at < 0:
            self._warm()


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def _reordered(state: State, order: Sequence[int]) -> dict[str, Any]:
    # Of a scheduler and of those inside it: lists by position follow the groups.
    found = dict(state)
    for key, value in state.items():
        if key == "_schedulers":
            found[key] = [_reordered(inner, order) for inner in value]
        elif key in _BY_GROUP and isinstance(value, list) and len(value) == len(order):
            found[key] = [value[i] for i in order]
    return found


def _is_in_updates(scheduler: Any) -> bool:
    """Return whether a scheduler, or one inside it, has arguments in updates."""
    inside = getattr(scheduler, "_schedulers", [])
    return isinstance(scheduler, _BY_UPDATES) or any(map(_is_in_updates, inside))


def _lengths(scheduler: Any, start: int = 0) -> Iterator[tuple[str, int, int, bool]]:
    """Yield lengths that a scheduler was given: name, first step, value, whether of the whole run.

    Of schedulers one after the other the last one ends with the run.
    """
    inside = list(getattr(scheduler, "_schedulers", []))
    if isinstance(scheduler, torch_schedulers.SequentialLR):
        inside = inside[-1:]
        start += scheduler._milestones[-1]
    for one in inside:
        yield from _lengths(one, start)
    for names, is_whole in ((_WHOLE, True), (_PARTS, False)):
        name = names.get(type(scheduler))
        if name is not None:
            value = getattr(scheduler, name)
            yield f"{type(scheduler).__name__}.{name}", start, value, is_whole


class LRSchedule:
    """Set the learning rates of one or several optimizers, each by its own track."""

    def __init__(self, tracks: Mapping[str, Track], steps_per_epoch: int | None = None) -> None:
        self.tracks = dict(tracks)
        self.updates = 0  # applied
        self.epochs = 0
        self._steps_per_epoch = steps_per_epoch

    @classmethod
    def wrap(
        cls, scheduler: Any = None, interval: Interval = "step", monitor: str | None = None
    ) -> Self:
        """Wrap a plain torch scheduler (or None, or a schedule), which is stepped directly.

        `monitor` is the metric of a scheduler that needs one, such as ReduceLROnPlateau.
        """
        if isinstance(scheduler, cls):
            return scheduler
        return cls({} if scheduler is None else {"optimizer": Track(scheduler, interval, monitor)})

    def remarks(self, updates: int | None, epochs: float | None) -> Iterator[str]:
        """Yield which arguments of the caller's schedulers do not fit a run of this length.

        Of a configuration `${total_steps}` and its checks see to that.
        """
        for track in self.tracks.values():
            length = updates if track.interval == "step" else epochs
            if track.settings or length is None:
                continue
            steps = math.ceil(length)
            other = "epoch" if track.interval == "step" else "step"
            for name, start, value, is_whole in _lengths(track.scheduler):
                # Of a whole length one step less is the same: no update follows the last step.
                if start + value > steps or (is_whole and start + value < steps - 1):
                    yield (
                        f"lr_scheduler: {name}={value}, from step {start} on, does not fit this "
                        f"run: it has {steps} steps of the scheduler, one after each "
                        f"{'update' if track.interval == 'step' else 'epoch'}; change it, or say "
                        f"Trainer(..., lr_interval={other!r})"
                    )

    def after_update(self) -> None:
        """Step after an applied update; a skipped update changes nothing (I10)."""
        self.updates += 1
        for track in self.tracks.values():
            track.move(self.updates, self.epochs)

    def after_epoch(self) -> None:
        """Step after the last update of an epoch."""
        self.epochs += 1
        for track in self.tracks.values():
            track.move(self.updates, self.epochs)

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        """Step after a validation, or with the training metrics of an epoch.

        A track that monitors the other of the two is not stepped. Raises `ConfigError` if a
        monitored metric of this stage is missing.
        """
        stages = {name.partition("/")[0] for name in metrics}
        for track in self.tracks.values():
            if track.watched is None or track.watched.partition("/")[0] not in stages:
                continue
            if track.watched not in metrics:
                message = f"{track.monitor}: no such metric; there are: {', '.join(metrics)}"
                refuse("lr_scheduler.monitor", message)
            track.after_validation(metrics[track.watched])

    def state_dict(self) -> dict[str, Any]:
        """Return counters, positions and settings: plain values only."""
        return {
            "updates": self.updates,
            "epochs": self.epochs,
            "tracks": {name: track.state_dict() for name, track in self.tracks.items()},
        }

    def load_state_dict(self, state: State, hyper_parameters: bool = True) -> None:
        """Load `state`; the optimizers must be loaded first.

        The state is restored exactly, with `CheckpointError` if any setting differs. With
        `hyper_parameters=False` the settings of this schedule are used, at the saved position.
        """
        try:
            updates, epochs, saved = int(state["updates"]), int(state["epochs"]), state["tracks"]
            found = [f"{n!r} has no schedule here" for n in saved.keys() - self.tracks.keys()]
            for name, track in self.tracks.items():
                there = name in saved
                found += track.differences(saved[name]) if there else [f"{name!r} had no schedule"]
            if found and hyper_parameters:
                raise CheckpointError(f"the lr_scheduler does not fit: {truncated_list(found, 1)}")
            for name, track in self.tracks.items():
                if hyper_parameters:
                    track.load_state_dict(saved[name], updates, epochs)
                else:
                    track.catch_up(saved.get(name), updates, epochs, self._steps_per_epoch)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise CheckpointError(f"the lr_scheduler's state is malformed: {error!r}") from None
        self.updates, self.epochs = updates, epochs

    def preview(self, steps: Sequence[int]) -> list[dict[str, float]]:
        """Return each group's learning rate after each of `steps` updates, which ascend.

        For a schedule with a metric it is assumed that the metric always improves. A copy is
        walked, over optimizers that have neither parameters nor state, at some microseconds an
        update. A schedule of the caller's is not: who knows what it holds.
        """
        nothing = dict[int, Any]()
        for track in self.tracks.values():
            optimizer = track.scheduler.optimizer
            nothing |= {id(group["params"]): [] for group in track.groups}
            nothing |= {id(optimizer.state): {}}
        known = LRSchedule({n: t for n, t in self.tracks.items() if t.settings})
        walked, rates = copy.deepcopy(known, nothing), []
        # torch misses steps of the optimizer in between.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            for step in steps:
                while walked.updates < step:
                    walked.after_update()
                    if self._steps_per_epoch and walked.updates % self._steps_per_epoch == 0:
                        walked.after_epoch()
                at = dict[str, float]()
                for track in walked.tracks.values():
                    at |= zip(track.group_names, track.rates(), strict=True)
                rates.append(at)
        return rates

    def refuse_to_wait(self, has_data: bool, validates: bool) -> None:
        """Raise `ConfigError` if a validation is monitored and there is none."""
        for track in self.tracks.values():
            if (track.monitor or "").startswith("val/") and not (has_data and validates):
                message = f"{track.monitor} is never measured: there is no validation"
                refuse("lr_scheduler.monitor", message, "monitor train/loss")


def as_schedule(scheduler: Any, interval: Interval | None = None) -> LRSchedule:
    """Return a schedule as it is, and a scheduler of torch's as one; None has no schedule.

    `interval`: when a scheduler is stepped, after each "step" or "epoch". By default after each
    epoch, as in torch's examples, but after each step where its arguments are in steps (OneCycleLR,
    CyclicLR). Raises ValueError for another interval or one without effect, and TypeError for what
    is no scheduler.
    """
    if interval not in (None, "step", "epoch"):
        raise ValueError(f"lr_interval={interval!r}: choose 'step' or 'epoch'")
    if scheduler is None or isinstance(scheduler, LRSchedule):
        if interval is not None:
            raise ValueError(
                f"lr_interval={interval!r} has no effect: it says when a scheduler of torch's is "
                f"stepped, and lr_scheduler is {describe_value(scheduler)}"
            )
        return LRSchedule.wrap(scheduler)
    if not hasattr(scheduler, "step") or not hasattr(scheduler, "optimizer"):
        given = scheduler.__name__ if isinstance(scheduler, type) else describe_value(scheduler)
        raise TypeError(
            f"lr_scheduler is {given}: give an object such as "
            "torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)"
        )
    if interval is None:
        interval = "step" if _is_in_updates(scheduler) else "epoch"
    return LRSchedule.wrap(scheduler, interval)


def curve(
    schedule: LRSchedule, optimizers: Optimizers, total_steps: int, points: int = 200
) -> dict[str, list[tuple[int, float]]]:
    """Return (step, learning rate) of each group at about `points` steps of the run."""
    steps = sorted({*range(0, total_steps, max(1, total_steps // points)), max(0, total_steps - 1)})
    rates = [optimizers.learning_rates() | at for at in schedule.preview(steps)]
    return {name: [(s, at[name]) for s, at in zip(steps, rates, strict=True)] for name in rates[0]}
