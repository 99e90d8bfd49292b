"""Build the schedule of learning rates from an `lr_scheduler` node of the config."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from regimen.conf.errors import did_you_mean, problems_at, truncated_list
from regimen.conf.interpolation import RESERVED, fill, leaves
from regimen.trainer.lr_schedulers.functions import aliases, function_of
from regimen.trainer.lr_schedulers.schedule import (
    Interval,
    LRSchedule,
    Track,
    Warmup,
)
from regimen.trainer.optimizers.optimizers import Optimizers, construct
from regimen.trainer.optimizers.param_groups import DEFAULT, refuse
from regimen.trainer.state import direction_of, epoch_metric
from regimen.trainer.targets.allow_list import locate

AUTO = "auto"
OUTER = ("interval", "monitor", "warmup")  # keys of ours, in the outermost node only
_BUILT = ("functions", "schedulers")  # of which objects are made for the target
EXAMINED = 10_000  # updates, at most, that are walked before a run
_WARMUP: Mapping[str, Any] = {"steps": 0, "epochs": 0, "start_factor": 0.01, "shape": "linear"}


def build_lr_schedule(
    node: Mapping[str, Any] | None,
    optimizers: Optimizers,
    total_steps: int | None,
    steps_per_epoch: int | None,
    guessed: bool = False,
    modes: Mapping[str, str] | None = None,
) -> LRSchedule:
    """Build the schedule of an `lr_scheduler` node over `optimizers`.

    An optimizer with an `lr_scheduler` of its own uses that one. "${total_steps}" is replaced by
    the scheduler's own horizon: the rest of the run after the warm-up, in updates, or in epochs
    with `interval: epoch`. Raises `ConfigError`, also for a schedule that ends before the run,
    unless the lengths are `guessed`. `modes`: what the task says of its metrics (`Task.modes`).
    """
    groups = optimizers.groups()
    tracks = {}
    for name, optimizer in optimizers.items():
        section, where, own = node, "lr_scheduler", optimizers.sections.get(name)
        if own and own.settings["lr_scheduler"] is not None:
            section, where = own.settings["lr_scheduler"], f"{own.key}.lr_scheduler"
        if section:
            names = [group.name for group in groups if group.optimizer_name == name]
            every = [group.name for group in groups]
            lengths = total_steps, steps_per_epoch, guessed
            builder = _Builder(optimizer, names, every, *lengths, modes or {})
            tracks[name] = builder.track(section, where)
    schedule = LRSchedule(tracks, steps_per_epoch)
    # torch validates few arguments, so the learning rates of the run are looked at.
    last = min(total_steps or 1000, EXAMINED)
    steps = [*range(0, last, max(1, last // 50)), last]
    try:
        for step, rates in zip(steps, schedule.preview(steps), strict=True):
            for group, lr in rates.items():
                if not 0 <= lr < math.inf:
                    refuse("lr_scheduler", f"makes the learning rate of {group!r} {lr:g} at {step}")
    except (TypeError, ArithmeticError) as error:
        refuse("lr_scheduler", f"the schedule cannot be computed: {error}")
    except ValueError as error:
        if not (guessed and "Tried to step" in str(error)):  # beyond the end of a OneCycleLR
            raise
    return schedule


def parse_warmup(node: Any, key: str, interval: str, steps_per_epoch: int | None) -> Warmup:
    """Parse `{steps | epochs, start_factor, shape}`. Raises `ConfigError`.

    With `epochs` the factor changes after every update, or once an epoch if the schedule does.
    """
    if not isinstance(node, Mapping | None):
        refuse(key, f"must be a dict with steps or epochs, not {node!r}")
    given = {**_WARMUP, **{word: v for word, v in (node or {}).items() if v is not None}}
    for word in given.keys() - _WARMUP:
        refuse(f"{key}.{word}", "unknown key", f"there are {', '.join(_WARMUP)}")
    steps, epochs, start, shape = (given[word] for word in _WARMUP)
    above = start or shape != "exponential"
    need = {
        "steps": (_in(steps) and isinstance(steps, int), "a number of updates"),
        "epochs": (_in(epochs), "a number of epochs"),
        "shape": (shape in ("linear", "exponential"), "one of linear, exponential"),
        "start_factor": (_in(start, 1) and above, "from 0 to 1 (exponential: above 0)"),
    }
    for word, (fits, wanted) in need.items():
        if not fits:
            refuse(f"{key}.{word}", f"must be {wanted}, not {given[word]!r}")
    if steps and epochs:
        refuse(key, "has steps and epochs", "remove one of the two")
    if epochs and steps_per_epoch is None and interval == "step":
        refuse(f"{key}.epochs", "the length of an epoch is not known", "give steps")
    by_epoch = interval == "epoch" and not steps
    ticks = epochs if by_epoch else steps or epochs * (steps_per_epoch or 0)
    return Warmup(round(ticks), "epoch" if by_epoch else "step", float(start), shape)


def _in(value: Any, highest: float = math.inf) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= highest


@dataclass
class _Builder:
    """Build the track of one optimizer: its scheduler, and those inside it.

    `settings` collects their arguments by key, which are compared when a run is resumed. In a node
    "${total_steps}" stands for the `steps` of its scheduler, updates or epochs; None if unknown.
    """

    optimizer: Optimizer
    group_names: Sequence[str]
    all_names: Sequence[str]
    updates: int | None  # of the run, then of what remains after the warm-up
    steps_per_epoch: int | None
    guessed: bool
    modes: Mapping[str, str]
    interval: Interval = "step"
    monitor: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def track(self, node: Mapping[str, Any], key: str) -> Track:
        steps, per_epoch = self.updates, self.steps_per_epoch
        self.interval = node.get("interval") or "step"
        if self.interval not in ("step", "epoch"):
            refuse(f"{key}.interval", f"must be step or epoch, not {self.interval!r}")
        warmup = parse_warmup(node.get("warmup"), f"{key}.warmup", self.interval, per_epoch)
        for group in self.optimizer.param_groups:
            group.pop("initial_lr", None)  # of an earlier scheduler, which torch would go on from
        if steps is not None:  # what remains after the warm-up has at least one step
            steps = self.updates = max(1, steps - warmup.updates(per_epoch))
            if self.interval == "epoch":
                steps = math.ceil(steps / per_epoch) if per_epoch else None
        inner = {name: value for name, value in node.items() if name not in OUTER}
        self.monitor = monitor = node.get("monitor")
        scheduler = self.scheduler(inner, steps, key)
        settings = {where.removeprefix(f"{key}."): v for where, v in self.settings.items()}
        ramp = warmup._asdict() if warmup.ticks else {}
        settings |= {f"warmup.{name}": value for name, value in ramp.items()}
        settings |= {"interval": self.interval, "monitor": monitor}
        with problems_at(f"{key}.monitor"):
            return Track(scheduler, self.interval, monitor, warmup, self.group_names, settings)

    def scheduler(self, node: Any, steps: int | None, key: str) -> Any:
        if not isinstance(node, Mapping) or not node.get("_target_"):
            refuse(key, "has no _target_, such as torch.optim.lr_scheduler.StepLR")
        kind = locate(node["_target_"])
        lengths = {"total_steps": steps, "steps_per_epoch": self.steps_per_epoch}
        arguments = fill({k: v for k, v in node.items() if k not in _BUILT}, lengths)
        for where, value in leaves(arguments, key):
            if any(f"${{{name}}}" in str(value) for name in RESERVED):
                _known(None, where)
        milestones, size = arguments.get("milestones"), arguments.get("step_size")
        if isinstance(milestones, list):
            where = f"{key}.milestones"
            milestones = arguments["milestones"] = [_share(m, steps, where) for m in milestones]
        if isinstance(size, float):
            arguments["step_size"] = max(1, _share(size, steps, f"{key}.step_size"))
        self.settings |= {f"{key}.{name}": value for name, value in arguments.items()}
        plateau = isinstance(kind, type) and issubclass(kind, lr_scheduler.ReduceLROnPlateau)
        if plateau and arguments.get("mode", AUTO) == AUTO:
            arguments["mode"] = self.mode(key)
        objects = {}  # arguments that are not plain data
        if "functions" in node:
            if "lr_lambda" in arguments:
                hint = 'write functions: {default: ...} instead, such as "0.97 ** epoch"'
                refuse(f"{key}.lr_lambda", "is what functions gives", hint)
            objects["lr_lambda"] = self.functions(node["functions"], key)
        children = node.get("schedulers") or {}  # a dict, of which null is dropped, or a list
        named = children.items() if isinstance(children, Mapping) else enumerate(children)
        if kept := [(f"{key}.schedulers.{n}", child) for n, child in named if child is not None]:
            parts, ends = [steps] * len(kept), milestones or []
            if kind is lr_scheduler.SequentialLR and len(ends) == len(kept) - 1:
                bounds = itertools.pairwise([0, *ends, steps])
                parts = [None if end is None else max(1, end - begin) for begin, end in bounds]
            pairs = zip(kept, parts, strict=True)
            objects["schedulers"] = [self.scheduler(c, part, where) for (where, c), part in pairs]
        cycles = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)
        if kind in cycles and arguments.get("max_lr") is None:
            arguments["max_lr"] = [float(group["lr"]) for group in self.optimizer.param_groups]
        # A ChainedScheduler takes that of the schedulers in it.
        first = [] if kind is lr_scheduler.ChainedScheduler else [self.optimizer]
        made = construct(lr_scheduler.LRScheduler, key, arguments, *first, **objects)
        ends = made.total_steps if isinstance(made, lr_scheduler.OneCycleLR) else math.inf
        if ends < (steps or 0) and not self.guessed:
            message = f"total steps is {ends}, but the run has {self.updates} updates"
            refuse(key, message, "set lr_scheduler.total_steps to ${total_steps}")
        return made

    def mode(self, key: str) -> str:
        """Return which values of the monitored metric are better; torch's default without one."""
        if self.monitor is None:
            return "min"
        found = direction_of(epoch_metric(self.monitor), self.modes)
        if found is None:
            message = f"is not said: is a larger {self.monitor} better?"
            refuse(f"{key}.mode", message, "say mode=max or mode=min")
        return found

    def functions(self, functions: Any, key: str) -> list[Any]:
        # Of each group that of its name, its rule or optimizer, or `default`.
        per_epoch, by_step = self.steps_per_epoch, self.interval == "step"
        self.settings[f"{key}.functions"] = functions
        if "total_steps" in str(functions):
            self.settings[f"{key}.total_steps"] = self.updates
        if not by_step or "epoch" in str(functions):
            self.settings[f"{key}.steps_per_epoch"] = per_epoch
        lengths = {"total_steps": self.updates, "steps_per_epoch": per_epoch}
        constant = {name: float(length) for name, length in lengths.items() if length is not None}

        def values(tick: int) -> dict[str, float]:
            step = tick if by_step else tick * (per_epoch or 1)
            return {"step": float(step), "epoch": float(step // (per_epoch or 1)), **constant}

        known = {alias for group in self.all_names for alias in aliases(group)} | {DEFAULT}
        made = {}
        given = functions if isinstance(functions, Mapping) else {DEFAULT: functions}
        for name, source in ((n, s) for n, s in given.items() if s is not None):
            where = f"{key}.functions.{name}"
            if name not in known:
                message = (
                    "there is no parameter group of this name, only "
                    f"{truncated_list(self.all_names)}"
                )
                refuse(where, message, did_you_mean(str(name), known))
            made[name] = function_of(source, values, where)
        chosen = []
        for group in self.group_names:
            names = [name for name in (*aliases(group), DEFAULT) if name in made]
            if not names:
                refuse(f"{key}.functions", f"has no function for group {group!r}, and no default")
            chosen.append(made[names[0]])
        return chosen


def _share(value: Any, steps: int | None, key: str) -> int:
    # A step of the scheduler: `value`, or that fraction of its steps.
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(key, f"{value!r} is neither a step nor a fraction of the run")
    if isinstance(value, int):
        return value
    if not 0 < value < 1:
        refuse(key, f"{value!r}: a fraction of the run must be between 0 and 1")
    return round(value * _known(steps, key))


def _known(length: int | None, key: str) -> int:
    if length is None:
        message = "depends on the length of the run, which is not known"
        refuse(key, message, "set trainer.max_epochs or trainer.max_steps")
    return length
