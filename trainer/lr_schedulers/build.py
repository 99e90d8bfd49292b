"""Build the schedule of learning rates from an `lr_scheduler` node of the config."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

from conf.errors import Problem, raise_problems
from trainer.lr_schedulers.functions import by_name, function_of, functions_of_groups
from trainer.lr_schedulers.schedule import (
    Interval,
    LRSchedule,
    ScheduleError,
    StandIn,
    Track,
    Warmup,
    takes_metric,
)
from trainer.optimizers.optimizers import Optimizers
from trainer.targets.instantiate import instantiate, locate

logger = logging.getLogger("regimen")

OUTER = ("interval", "monitor", "warmup")  # keys of ours, in the outermost node only
OWN = (*OUTER, "functions")  # keys that are not arguments of the target
EXAMINED = 10_000  # updates, at most, that are walked before a run

_SHAPES = ("linear", "exponential")
_WARMUP_KEYS = ("steps", "epochs", "start_factor", "shape")
_WAY = 'write functions: {default: ...} instead, such as "0.97 ** epoch"'


def target_nodes(node: Mapping[str, Any] | None, key: str) -> dict[str, dict[str, Any]]:
    """Return, by config key, the nodes whose targets get one positional argument from us.

    Arguments that we compute for a target (inner schedulers, functions, ...) are replaced by
    placeholders, so that the nodes can be checked against the signatures of their targets.
    """
    if not node or "_target_" not in node:
        return {}
    chained = str(node["_target_"]).endswith(f".{ChainedScheduler.__name__}")
    highest = node.get("max_lr")
    stand_ins: dict[str, dict[str, Any]] = {
        "functions": {"lr_lambda": []},
        "schedulers": {} if chained else {"schedulers": []},
        "milestones": {"milestones": [1]},
        "step_size": {"step_size": 1},
        "max_lr": {"max_lr": 1.0 if highest is None else highest},
    }
    plain = {k: v for k, v in node.items() if k not in (*OUTER, *stand_ins)}
    for word in stand_ins.keys() & node.keys():
        plain |= stand_ins[word]
    found = {key: plain}
    for name, function in by_name(node.get("functions")).items():
        if isinstance(function, Mapping):
            found[f"{key}.functions.{name}"] = dict(function)
    for name, child in _inner_nodes(node, key):
        found |= target_nodes(child, f"{key}.schedulers.{name}")
    return found


def _inner_nodes(node: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    # The nodes under `schedulers`, a dict (null is dropped) or a list.
    children = node.get("schedulers") or {}
    pairs = children.items() if isinstance(children, Mapping) else enumerate(children)
    named = [(str(name), child) for name, child in pairs if child is not None]
    for name, child in named:
        where = f"{key}.schedulers.{name}"
        if not isinstance(child, Mapping) or not child.get("_target_"):
            message = "has no _target_, such as torch.optim.lr_scheduler.StepLR"
            raise ScheduleError(Problem(where, message))
        for word in OUTER:
            if child.get(word) is not None:
                message = f"must be set in {key}, for all its schedulers"
                raise ScheduleError(Problem(f"{where}.{word}", message))
    return named


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
    nodes = {}
    for name in optimizers.optimizers:
        own = optimizers.lr_schedulers.get(name)
        chosen, where = (
            (node, key) if own is None else (own, f"{optimizers.keys[name]}.lr_scheduler")
        )
        if chosen:
            names = [group.name for group in groups if group.optimizer_name == name]
            nodes[name] = partial(
                _build_track, chosen, where, names, groups, total_steps, steps_per_epoch, guessed
            )

    def over(chosen: Mapping[str, Optimizer]) -> LRSchedule:
        tracks = {name: build(chosen[name]) for name, build in nodes.items()}
        return LRSchedule(tracks, steps_per_epoch, rehearsal)

    def rehearsal() -> LRSchedule:
        stand_ins = {
            name: StandIn(optimizers.configured[name], optimizer.defaults)
            for name, optimizer in optimizers.items()
        }
        schedule = over(stand_ins)
        for optimizer in stand_ins.values():
            optimizer.step()
        return schedule

    schedule = over(optimizers.optimizers)
    _examine(schedule, total_steps, key, guessed)
    return schedule


def _examine(schedule: LRSchedule, total_steps: int | None, key: str, guessed: bool) -> None:
    # torch validates few arguments, so the learning rates of the run are looked at.
    last = min(total_steps or 1000, EXAMINED)
    steps = [*range(0, last, max(1, last // 50)), last]
    try:
        for step, rates in zip(steps, schedule.preview(steps), strict=True):
            for group, lr in rates.items():
                if not math.isfinite(lr):
                    raise ArithmeticError(f"the learning rate of {group!r} is {lr:g} at {step}")
                if lr < 0:
                    message = f"makes the learning rate of {group!r} {lr:g} at {step}"
                    raise ScheduleError(Problem(key, message))
    except (TypeError, ArithmeticError) as error:
        message = f"the schedule cannot be computed: {error}"
        raise ScheduleError(Problem(key, message)) from error
    except ValueError as error:
        if "Tried to step" not in str(error):
            raise
        if not guessed:
            raise _too_short(str(error), total_steps, key) from error


def _too_short(message: str, total_steps: int | None, key: str) -> ScheduleError:
    # OneCycleLR cannot be stepped beyond its end.
    hint = "set lr_scheduler.total_steps to ${total_steps}"
    message = f"{message}, but the run has {total_steps} updates in all"
    return ScheduleError(Problem(key, message, hint))


def warn_of_long_warmups(
    schedule: LRSchedule, total_steps: int | None, steps_per_epoch: int | None
) -> None:
    """Warn if a warm-up takes the whole run, which is allowed for short trials."""
    ramp = max((t.warmup.updates(steps_per_epoch) for t in schedule.tracks.values()), default=0)
    if total_steps is not None and ramp >= total_steps:
        logger.warning(
            "warning: the warm-up takes %d updates, the run ends at %d", ramp, total_steps
        )


def _build_track(
    node: Mapping[str, Any],
    key: str,
    group_names: Sequence[str],
    groups: Sequence[Any],
    total_steps: int | None,
    steps_per_epoch: int | None,
    guessed: bool,
    optimizer: Optimizer,
) -> Track:
    if not node.get("_target_"):
        message = "has no _target_, such as torch.optim.lr_scheduler.StepLR"
        raise ScheduleError(Problem(key, message))
    interval: Interval = node.get("interval") or "step"
    if interval not in ("step", "epoch"):
        message = f"must be step or epoch, not {interval!r}"
        raise ScheduleError(Problem(f"{key}.interval", message))
    warmup = parse_warmup(node.get("warmup"), f"{key}.warmup", interval, steps_per_epoch)
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)  # of an earlier scheduler, which torch would go on from
    maker = _Maker(optimizer, group_names, [group.name for group in groups], interval)
    horizon = Horizon.remaining(total_steps, steps_per_epoch, interval, warmup)
    scheduler = maker.make(node, horizon, key)
    steps = 0 if guessed else horizon.steps or 0
    if steps > EXAMINED and isinstance(scheduler, OneCycleLR) and scheduler.total_steps < steps:
        raise _too_short(f"ends after {scheduler.total_steps} steps", total_steps, key)
    monitor, follows = node.get("monitor"), takes_metric(scheduler)
    if follows and not monitor:
        message = "must be the metric that the scheduler monitors, such as val/loss"
        raise ScheduleError(Problem(f"{key}.monitor", message))
    if monitor and not follows:
        message = f"{type(scheduler).__name__} does not monitor a metric"
        raise ScheduleError(Problem(f"{key}.monitor", message))
    ramp = ("ticks", "every", "start_factor", "shape") if warmup.ticks else ()
    settings = maker.settings | {f"warmup.{name}": getattr(warmup, name) for name in ramp}
    settings |= {"interval": interval, "monitor": monitor}
    return Track(scheduler, interval, monitor, warmup, group_names, settings, steps_per_epoch)


def parse_warmup(node: Any, key: str, interval: str, steps_per_epoch: int | None) -> Warmup:
    """Parse `{steps | epochs, start_factor, shape}`. Raises `ScheduleError` with all problems.

    With `epochs` the factor changes after every update, or once an epoch if the schedule does.
    """
    if node is None:
        return Warmup()
    if not isinstance(node, Mapping):
        message = f"must be a dict with steps or epochs, not {node!r}"
        raise ScheduleError(Problem(key, message))
    steps, epochs = node.get("steps") or 0, node.get("epochs") or 0
    start, shape = node.get("start_factor", 0.01), node.get("shape", "linear")
    problems = [
        Problem(f"{key}.{word}", "unknown key", f"there are {', '.join(_WARMUP_KEYS)}")
        for word in node
        if word not in _WARMUP_KEYS
    ]
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        problems.append(Problem(f"{key}.steps", f"must be a number of updates, not {steps!r}"))
    if not _is_number(epochs) or epochs < 0:
        problems.append(Problem(f"{key}.epochs", f"must be a number of epochs, not {epochs!r}"))
    if steps and epochs:
        problems.append(Problem(key, "has steps and epochs", "remove one of the two"))
    if shape not in _SHAPES:
        message = f"must be one of {', '.join(_SHAPES)}, not {shape!r}"
        problems.append(Problem(f"{key}.shape", message))
    if not _is_number(start) or not 0 <= start <= 1 or (start == 0 and shape == "exponential"):
        message = f"must be from 0 to 1 (exponential: above 0), not {start!r}"
        problems.append(Problem(f"{key}.start_factor", message))
    if epochs and steps_per_epoch is None and interval == "step":
        message = "the length of an epoch is not known"
        problems.append(Problem(f"{key}.epochs", message, "give steps"))
    raise_problems(problems, ScheduleError)
    every: Literal["step", "epoch"] = "epoch" if interval == "epoch" and not steps else "step"
    ticks = epochs if every == "epoch" else steps or epochs * (steps_per_epoch or 0)
    return Warmup(round(ticks), every, float(start), shape)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Horizon:
    """The length of a schedule, which replaces `${total_steps}` in a node; None if unknown."""

    steps: int | None  # of the scheduler: updates, or epochs if it is stepped once an epoch
    updates: int | None
    steps_per_epoch: int | None

    @classmethod
    def remaining(
        cls,
        total_steps: int | None,
        steps_per_epoch: int | None,
        interval: Interval,
        warmup: Warmup,
    ) -> Horizon:
        """Return the horizon of the run after the warm-up; it has at least one step."""
        if total_steps is None:
            return cls(None, None, steps_per_epoch)
        updates = max(1, total_steps - warmup.updates(steps_per_epoch))
        if interval == "step":
            return cls(updates, updates, steps_per_epoch)
        epochs = math.ceil(updates / steps_per_epoch) if steps_per_epoch else None
        return cls(epochs, updates, steps_per_epoch)

    def fill(self, node: Any, key: str) -> Any:
        """Replace `${total_steps}` and `${steps_per_epoch}` in plain containers."""
        if isinstance(node, Mapping):
            return {k: self.fill(v, f"{key}.{k}") for k, v in node.items()}
        if isinstance(node, list | tuple):
            return [self.fill(v, key) for v in node]
        if not isinstance(node, str):
            return node
        text = node
        for word, length in (
            ("${total_steps}", self.steps),
            ("${steps_per_epoch}", self.steps_per_epoch),
        ):
            if node == word:
                return _known(length, key)
            if word in text:
                text = text.replace(word, str(_known(length, key)))
        return text

    def share(self, value: Any, key: str) -> int:
        """Return a step of the scheduler: `value`, or that fraction of the horizon."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            message = f"{value!r} is neither a step nor a fraction of the run"
            raise ScheduleError(Problem(key, message))
        if isinstance(value, int):
            return value
        if not 0 < value < 1:
            message = f"{value!r}: a fraction of the run must be between 0 and 1"
            raise ScheduleError(Problem(key, message))
        return round(value * _known(self.steps, key))

    def phases(self, milestones: Sequence[int], count: int) -> list[Horizon]:
        """Return the horizons of `count` successive parts, which change at `milestones`."""
        if len(milestones) != count - 1:  # torch raises an error for this
            return [self] * count
        ends = [*milestones, self.steps]
        return [
            replace(self, steps=None if end is None else max(1, end - begin))
            for begin, end in zip([0, *milestones], ends, strict=True)
        ]


def _known(length: int | None, key: str) -> int:
    if length is None:
        message = "depends on the length of the run, which is not known"
        hint = "set trainer.max_epochs or trainer.max_steps"
        raise ScheduleError(Problem(key, message, hint))
    return length


@dataclass(slots=True)
class _Maker:
    """Build the scheduler of a node, and those inside it, over one optimizer.

    `settings` collects their arguments, which are compared when a run is resumed.
    """

    optimizer: Optimizer
    group_names: Sequence[str]
    all_names: Sequence[str]
    interval: Interval
    settings: dict[str, Any] = field(default_factory=dict)

    def make(self, node: Mapping[str, Any], horizon: Horizon, key: str, path: str = "") -> Any:
        """Return the torch scheduler of `node`; `path` is its prefix in `settings`."""
        kind = locate(node["_target_"])
        given = {k: v for k, v in node.items() if k not in (*OWN, "schedulers")}
        arguments: dict[str, Any] = horizon.fill(given, key)
        milestones, size = arguments.get("milestones"), arguments.get("step_size")
        if isinstance(milestones, list):
            arguments["milestones"] = [horizon.share(m, f"{key}.milestones") for m in milestones]
        if isinstance(size, float):
            arguments["step_size"] = max(1, horizon.share(size, f"{key}.step_size"))
        self.settings |= {f"{path}{name}": value for name, value in arguments.items()}
        objects: dict[str, Any] = {}  # arguments that are not plain data
        if "functions" in node:
            if "lr_lambda" in arguments:
                raise ScheduleError(Problem(f"{key}.lr_lambda", "is what functions gives", _WAY))
            objects["lr_lambda"] = self._functions(node["functions"], horizon, key, path)
        if node.get("schedulers"):
            children = _inner_nodes(node, key)
            parts = [horizon] * len(children)
            if kind is SequentialLR:
                parts = horizon.phases(arguments.get("milestones", []), len(children))
            objects["schedulers"] = [
                self.make(child, part, f"{key}.schedulers.{name}", f"{path}schedulers.{name}.")
                for (name, child), part in zip(children, parts, strict=True)
            ]
        if kind in (OneCycleLR, CyclicLR) and arguments.get("max_lr") is None:
            arguments["max_lr"] = [float(group["lr"]) for group in self.optimizer.param_groups]
        return self._construct(kind, arguments, objects, key)

    def _functions(self, functions: Any, horizon: Horizon, key: str, path: str) -> list[Any]:
        self.settings[f"{path}functions"] = functions
        if "total_steps" in str(functions):
            self.settings[f"{path}total_steps"] = horizon.updates
        if self.interval == "epoch" or "epoch" in str(functions):
            self.settings[f"{path}steps_per_epoch"] = horizon.steps_per_epoch
        make = partial(
            function_of,
            interval=self.interval,
            steps=horizon.steps,
            updates=horizon.updates,
            steps_per_epoch=horizon.steps_per_epoch,
        )
        return functions_of_groups(
            functions, self.group_names, self.all_names, make, f"{key}.functions"
        )

    def _construct(
        self, kind: type, arguments: dict[str, Any], objects: dict[str, Any], key: str
    ) -> Any:
        try:
            if kind is ChainedScheduler:  # the optimizer is its last argument
                made = instantiate(arguments, optimizer=self.optimizer, _key_=key, **objects)
            else:
                made = instantiate(arguments, self.optimizer, _key_=key, **objects)
        except (RuntimeError, ArithmeticError, LookupError) as error:
            # An error of a user's function is theirs.
            if hasattr(error, "exit_code") or "lr_lambda" in objects:
                raise
            raise ScheduleError(Problem(key, f"{arguments['_target_']}: {error}")) from error
        if not isinstance(made, LRScheduler):
            message = f"makes no LRScheduler but a {type(made).__name__}"
            raise ScheduleError(Problem(f"{key}._target_", message))
        return made
