"""The learning rate schedule, which is stepped after updates, epochs and validations."""

import copy
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

from torch import Tensor
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CyclicLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from regimen.conf.errors import truncated_list
from regimen.trainer.checkpoints.archive import plain_part
from regimen.trainer.errors import CheckpointError, describe_value, qualified_name
from regimen.trainer.optimizers.optimizers import Optimizers
from regimen.trainer.optimizers.param_groups import refuse
from regimen.trainer.optimizers.state import State
from regimen.trainer.state import epoch_metric

Interval = Literal["step", "epoch"]

# The state of torch's ReduceLROnPlateau, in contrast to its settings.
_PLATEAU_MEMORY = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
# Entries of the state of torch's schedulers that are lists over the parameter groups.
_BY_GROUP = ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
# torch's schedulers whose arguments are numbers of updates, as its documentation says.
_BY_UPDATES = (OneCycleLR, CyclicLR)
# Arguments that are a length, and whether it is that of the whole run (after it the rate rises
# again, or torch raises) or of a part.
_LENGTHS = {
    OneCycleLR: ("total_steps", True),
    CosineAnnealingLR: ("T_max", True),
    PolynomialLR: ("total_iters", True),
    ConstantLR: ("total_iters", False),
    LinearLR: ("total_iters", False),
    StepLR: ("step_size", False),
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


class OptimizerSchedule:
    """Set the learning rates of one optimizer: by the warm-up, then by a torch scheduler.

    The warm-up ends at the scheduler's first value, so it can precede any scheduler; the
    scheduler's steps start after it. The position follows from the run's updates and epochs.
    `settings` are the arguments that a configured schedule was built from; a scheduler that the
    caller has made has none. Raises `ConfigError` for a `monitor` that the scheduler does not use,
    or a scheduler that needs one.
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
        needs_metric = "metrics" in inspect.signature(scheduler.step).parameters
        if needs_metric and not monitor:
            refuse(
                "",
                "must be the metric that the scheduler monitors, such as val/loss",
                None if settings else 'LRSchedule.wrap(scheduler, monitor="val/loss")',
            )
        if monitor and not needs_metric:
            refuse("", f"{type(scheduler).__name__} does not monitor a metric")
        self.groups = scheduler.optimizer.param_groups
        self.scheduler = scheduler
        self.monitor = monitor
        # The metric by its name for a whole epoch or a validation.
        self.metric = None if monitor is None else epoch_metric(monitor)
        self.warmup = warmup or Warmup()
        self.settings = dict(settings or {})
        self.group_names = list(group_names) or [
            str(group.get("name", i)) for i, group in enumerate(self.groups)
        ]
        self.interval = interval
        self._by_step = interval == "step"
        self._warmup_epochs = 0  # the epochs that were complete when the warm-up ended
        self._at = self._position(0, 0)
        # The groups as the scheduler found them. Tensors are copied: they change in place later.
        self._first = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
            for group in self.groups
        ]
        self._start = self.rates()
        self._apply_warmup()

    def rates(self) -> list[float]:
        """Return the learning rates of the groups now; waits for the device if one is a tensor."""
        return [float(group["lr"]) for group in self.groups]

    def _position(self, updates: int, epochs: int) -> int:
        """Return the scheduler's steps so far; -n if the warm-up has n ticks left."""
        if self.warmup.ticks:
            passed = (epochs if self.warmup.every == "epoch" else updates) - self.warmup.ticks
            if passed <= 0:
                self._warmup_epochs = epochs
                return passed
            return passed if self._by_step else epochs - self._warmup_epochs
        return updates if self._by_step else epochs

    def step_to(self, updates: int, epochs: int) -> None:
        """Take the next step, if it is due after this number of updates and epochs."""
        position = self._position(updates, epochs)
        if position != self._at:
            self._at = position
            if position <= 0:
                self._apply_warmup()
            elif self.monitor is None:
                self.scheduler.step()

    def after_validation(self, value: float) -> None:
        """Step the scheduler by its metric, which does not count during the warm-up."""
        if self._at >= 0:
            self.scheduler.step(value)

    def _apply_warmup(self) -> None:
        # During the warm-up, the learning rates are a fraction of the scheduler's first.
        if self.warmup.ticks and self._at <= 0:
            factor = self.warmup.factor(self.warmup.ticks + self._at)
            for group, start in zip(self.groups, self._start, strict=True):
                _set_value(group, "lr", start * factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, and the scheduler's state without functions: plain values."""
        return {
            "type": qualified_name(self.scheduler),
            "settings": self.settings,
            "groups": list(self.group_names),
            "warmup_epochs": self._warmup_epochs,
            "scheduler": plain_part(self.scheduler.state_dict()),
            "start": list(self._start),
            "lr": self.rates(),
        }

    def differences(self, state: State) -> Iterator[str]:
        """Yield the settings that differ from those of `state`."""
        kind = qualified_name(self.scheduler)
        current = {"type": kind, **self.settings}
        saved = {"type": state["type"], **state["settings"]}
        for key in current | saved:
            value = current.get(key)
            saved_value = saved.get(key)
            if value != saved_value:
                yield f"lr_scheduler.{key} is {value!r}, it was {saved_value!r}"
        saved_groups = state["groups"]
        for name in self.group_names:
            if name not in saved_groups:
                yield f"group {name!r} had no schedule"
        # The state of torch's schedulers can be reordered: it is known which lists are by group.
        can_reorder = self.settings and kind.startswith("torch.")
        if not can_reorder and self.group_names != saved_groups:
            yield "the parameter groups, or their order, have changed"

    def load_state_dict(self, state: State, updates: int, epochs: int) -> None:
        """Restore `state` exactly; the optimizer's state has the hyper-parameters."""
        self._warmup_epochs = int(state["warmup_epochs"])
        self._at = self._position(updates, epochs)
        order = [state["groups"].index(name) for name in self.group_names]
        self._start = [state["start"][i] for i in order]
        self.scheduler.load_state_dict(_reordered(state["scheduler"], order))

    def fast_forward(
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
        if self.warmup.every == "epoch":
            self._warmup_epochs = self.warmup.ticks
        else:
            self._warmup_epochs = self.warmup.ticks // per_epoch if per_epoch else 0
        self._at = self._position(updates, epochs)
        if self.monitor is None:
            self._replay()
        else:
            self._continue_plateau(state)
        if self._at < 0:
            self._apply_warmup()

    def _replay(self) -> None:
        """Step the scheduler from its first values to the present position."""
        for group, first in zip(self.groups, self._first, strict=True):
            for key in first.keys() - {"params"}:
                if key == "lr" or key not in self.scheduler.optimizer.defaults:
                    _set_value(group, key, first[key])
        # torch warns that the optimizer was not stepped in between.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            for _ in range(self._at):
                self.scheduler.step()

    def _continue_plateau(self, state: State | None) -> None:
        """Take over the history of an earlier plateau scheduler, and the rates that it reached."""
        reached = {}
        if state is not None and state["type"] == qualified_name(self.scheduler):
            memory = {key: state["scheduler"][key] for key in _PLATEAU_MEMORY}
            self.scheduler.load_state_dict({**self.scheduler.state_dict(), **memory})
            saved = zip(state["groups"], state["start"], state["lr"], strict=True)
            reached = {(name, start): lr for name, start, lr in saved}
        for group, name, start in zip(self.groups, self.group_names, self._start, strict=True):
            _set_value(group, "lr", reached.get((name, start), start))


def _set_value(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an entry of a group; a tensor in place, as torch's schedulers do."""
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def _reordered(state: State, order: Sequence[int]) -> dict[str, Any]:
    """Return the state of a scheduler, and of those inside it, with its lists in another order."""
    reordered = dict(state)
    for key, value in state.items():
        if key == "_schedulers":
            reordered[key] = [_reordered(inner, order) for inner in value]
        elif key in _BY_GROUP and isinstance(value, list) and len(value) == len(order):
            reordered[key] = [value[i] for i in order]
    return reordered


def _is_in_updates(scheduler: Any) -> bool:
    """Return whether a scheduler, or one inside it, has arguments in updates."""
    inside = getattr(scheduler, "_schedulers", [])
    return isinstance(scheduler, _BY_UPDATES) or any(map(_is_in_updates, inside))


def _lengths(scheduler: Any, start: int = 0) -> Iterator[tuple[str, int, int, bool]]:
    """Yield a scheduler's lengths: name, first step, value, whether it is of the whole run.

    Of a SequentialLR only the last scheduler is looked at: it ends with the run.
    """
    inside = list(getattr(scheduler, "_schedulers", []))
    if isinstance(scheduler, SequentialLR):
        inside = inside[-1:]
        start += scheduler._milestones[-1]
    for inner in inside:
        yield from _lengths(inner, start)
    kind = type(scheduler)
    if kind in _LENGTHS:
        name, is_whole = _LENGTHS[kind]
        yield f"{kind.__name__}.{name}", start, getattr(scheduler, name), is_whole


class LRSchedule:
    """Set the learning rates of one or several optimizers, each by its own schedule."""

    def __init__(
        self, schedules: Mapping[str, OptimizerSchedule], steps_per_epoch: int | None = None
    ) -> None:
        self.schedules = dict(schedules)  # by the name of the optimizer
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
        if scheduler is None:
            return cls({})
        return cls({"optimizer": OptimizerSchedule(scheduler, interval, monitor)})

    def remarks(self, updates: int | None, epochs: float | None) -> Iterator[str]:
        """Yield which arguments of the caller's schedulers do not fit a run of this length.

        Configured schedules are left out, but for their warm-up: they use `${total_steps}`, and
        were checked when built.
        """
        for schedule in self.schedules.values():
            warmup = schedule.warmup.updates(self._steps_per_epoch)
            if updates is not None and 0 < updates <= warmup:
                yield (
                    f"lr_scheduler.warmup takes {warmup} updates, and the run has {updates}: the "
                    "learning rate does not reach the value that it rises to"
                )
            unit = "update"
            other = "epoch"
            length: float | None = updates
            if schedule.interval == "epoch":
                unit = "epoch"
                other = "step"
                length = epochs
            if schedule.settings or length is None:
                continue
            steps = math.ceil(length)
            for name, start, value, is_whole in _lengths(schedule.scheduler):
                # One step less than the whole run is the same: no update follows the last step.
                if start + value > steps or (is_whole and start + value < steps - 1):
                    yield (
                        f"lr_scheduler: {name}={value}, from step {start} on, does not fit this "
                        f"run: it has {steps} steps of the scheduler, one after each {unit}; "
                        f"change it, or say Trainer(..., lr_interval={other!r})"
                    )

    def after_update(self) -> None:
        """Step after an applied update; a skipped update changes nothing (I10)."""
        self.updates += 1
        for schedule in self.schedules.values():
            schedule.step_to(self.updates, self.epochs)

    def after_epoch(self) -> None:
        """Step after the last update of an epoch."""
        self.epochs += 1
        for schedule in self.schedules.values():
            schedule.step_to(self.updates, self.epochs)

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        """Step after a validation, or with the training metrics of an epoch.

        A schedule whose metric is of another stage ("train", "val") is not stepped. Raises
        `ConfigError` if a monitored metric of this stage is missing.
        """
        stages = {name.partition("/")[0] for name in metrics}
        for schedule in self.schedules.values():
            metric = schedule.metric
            if metric is None or metric.partition("/")[0] not in stages:
                continue
            if metric not in metrics:
                refuse(
                    "lr_scheduler.monitor",
                    f"{schedule.monitor}: no such metric; there are: {', '.join(metrics)}",
                )
            schedule.after_validation(metrics[metric])

    def state_dict(self) -> dict[str, Any]:
        """Return counters, positions and settings: plain values only."""
        return {
            "updates": self.updates,
            "epochs": self.epochs,
            "tracks": {name: schedule.state_dict() for name, schedule in self.schedules.items()},
        }

    def load_state_dict(self, state: State, hyper_parameters: bool = True) -> None:
        """Load `state`; the optimizers must be loaded first.

        The state is restored exactly, with `CheckpointError` if any setting differs. With
        `hyper_parameters=False` the settings of this schedule are used, at the saved position.
        """
        try:
            updates = int(state["updates"])
            epochs = int(state["epochs"])
            saved = state["tracks"]
            problems = [f"{n!r} has no schedule here" for n in saved.keys() - self.schedules.keys()]
            for name, schedule in self.schedules.items():
                if name in saved:
                    problems += schedule.differences(saved[name])
                else:
                    problems.append(f"{name!r} had no schedule")
            if problems and hyper_parameters:
                raise CheckpointError(
                    f"the lr_scheduler does not fit: {truncated_list(problems, 1)}"
                )
            for name, schedule in self.schedules.items():
                if hyper_parameters:
                    schedule.load_state_dict(saved[name], updates, epochs)
                else:
                    former = saved.get(name)
                    schedule.fast_forward(former, updates, epochs, self._steps_per_epoch)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise CheckpointError(f"the lr_scheduler's state is malformed: {error!r}") from None
        self.updates = updates
        self.epochs = epochs

    def preview(self, steps: Sequence[int]) -> list[dict[str, float]]:
        """Return each group's learning rate after each of `steps` updates, in ascending order.

        For a schedule with a metric it is assumed that the metric always improves. A copy is
        walked, over optimizers that have neither parameters nor state, at some microseconds an
        update. Schedulers that the caller has made are left out: they may hold anything.
        """
        # `memo` makes deepcopy put empty containers in place of parameters and their state.
        memo = dict[int, Any]()
        for schedule in self.schedules.values():
            memo |= {id(group["params"]): [] for group in schedule.groups}
            memo[id(schedule.scheduler.optimizer.state)] = {}
        configured = {name: s for name, s in self.schedules.items() if s.settings}
        walked = copy.deepcopy(LRSchedule(configured), memo)
        previewed = []
        # torch warns that the optimizer was not stepped in between.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            for step in steps:
                while walked.updates < step:
                    walked.after_update()
                    if self._steps_per_epoch and walked.updates % self._steps_per_epoch == 0:
                        walked.after_epoch()
                rates = dict[str, float]()
                for schedule in walked.schedules.values():
                    rates |= zip(schedule.group_names, schedule.rates(), strict=True)
                previewed.append(rates)
        return previewed

    def check_monitors(self, has_data: bool, validates: bool) -> None:
        """Raise `ConfigError` if a validation is monitored and there is none."""
        for schedule in self.schedules.values():
            monitor = schedule.monitor or ""
            if monitor.startswith("val/") and not (has_data and validates):
                refuse(
                    "lr_scheduler.monitor",
                    f"{monitor} is never measured: there is no validation",
                    "monitor train/loss",
                )


def as_schedule(scheduler: Any, interval: Interval | None = None) -> LRSchedule:
    """Return an `LRSchedule` as it is, and a torch scheduler as one; None becomes an empty one.

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
        description = (
            scheduler.__name__ if isinstance(scheduler, type) else describe_value(scheduler)
        )
        raise TypeError(
            f"lr_scheduler is {description}: give an object such as "
            "torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)"
        )
    if interval is None:
        interval = "step" if _is_in_updates(scheduler) else "epoch"
    return LRSchedule.wrap(scheduler, interval)


def curve(
    schedule: LRSchedule, optimizers: Optimizers, total_steps: int, points: int = 200
) -> dict[str, list[tuple[int, float]]]:
    """Return (step, learning rate) of each group at about `points` steps of the run."""
    spacing = max(1, total_steps // points)
    steps = sorted({*range(0, total_steps, spacing), max(0, total_steps - 1)})
    curves: dict[str, list[tuple[int, float]]] = {}
    constant = optimizers.learning_rates()
    for step, scheduled in zip(steps, schedule.preview(steps), strict=True):
        for name, lr in (constant | scheduled).items():
            curves.setdefault(name, []).append((step, lr))
    return curves
