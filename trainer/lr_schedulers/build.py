"""Build the schedule of learning rates from an `lr_scheduler` node of the config."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from regimen.conf.errors import did_you_mean, problems_at, truncated_list
from regimen.conf.interpolation import RESERVED, fill, leaves
from regimen.trainer.lr_schedulers.functions import aliases, function_of
from regimen.trainer.lr_schedulers.schedule import (
    Interval,
    LRSchedule,
    OptimizerSchedule,
    Warmup,
)
from regimen.trainer.optimizers.optimizers import Optimizers, construct
from regimen.trainer.optimizers.param_groups import DEFAULT, refuse
from regimen.trainer.state import direction_of, epoch_metric
from regimen.trainer.targets.allow_list import locate

AUTO = "auto"
OUTER = ("interval", "monitor", "warmup")  # keys of ours, in the outermost node only
_BY_MILESTONES = (SequentialLR, MultiStepLR)
_BUILT = ("functions", "schedulers")  # keys whose values become objects for the target
_MAX_PREVIEWED = 10_000  # updates, at most, that are walked before a run
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
    unless the lengths are `guessed`. `modes`: the directions of the task's metrics (`Task.modes`).
    """
    groups = optimizers.groups()
    all_names = [group.name for group in groups]
    states = {}
    for name, optimizer in optimizers.items():
        section = node
        key = "lr_scheduler"
        configured = optimizers.sections.get(name)
        if configured and configured.lr_scheduler is not None:
            section = configured.lr_scheduler
            key = f"{configured.key}.lr_scheduler"
        if section:
            builder = _Builder(
                optimizer=optimizer,
                group_names=[group.name for group in groups if group.optimizer_name == name],
                all_names=all_names,
                updates=total_steps,
                steps_per_epoch=steps_per_epoch,
                guessed=guessed,
                modes=modes or {},
            )
            states[name] = builder.build(section, key)
    schedule = LRSchedule(states, steps_per_epoch)
    _check_rates(schedule, total_steps, guessed)
    return schedule


def _check_rates(schedule: LRSchedule, total_steps: int | None, guessed: bool) -> None:
    """Look at the learning rates of the run: torch validates few arguments."""
    last = min(total_steps or 1000, _MAX_PREVIEWED)
    steps = [*range(0, last, max(1, last // 50)), last]
    try:
        for step, rates in zip(steps, schedule.preview(steps), strict=True):
            for group, lr in rates.items():
                if not 0 <= lr < math.inf:
                    refuse("lr_scheduler", f"makes the learning rate of {group!r} {lr:g} at {step}")
    except (TypeError, ArithmeticError) as error:
        refuse("lr_scheduler", f"the schedule cannot be computed: {error}")
    except ValueError as error:
        # OneCycleLR raises beyond its end, which guessed lengths may lie before.
        if not (guessed and "Tried to step" in str(error)):
            raise


def parse_warmup(node: Any, key: str, interval: str, steps_per_epoch: int | None) -> Warmup:
    """Parse `{steps | epochs, start_factor, shape}`. Raises `ConfigError`.

    With `epochs` the factor changes after every update, or once an epoch if the schedule does.
    """
    if not isinstance(node, Mapping | None):
        refuse(key, f"must be a dict with steps or epochs, not {node!r}")
    values = {**_WARMUP, **{word: v for word, v in (node or {}).items() if v is not None}}
    for word in values.keys() - _WARMUP:
        refuse(f"{key}.{word}", "unknown key", f"there are {', '.join(_WARMUP)}")

    steps = values["steps"]
    if not (_is_between(steps) and isinstance(steps, int)):
        refuse(f"{key}.steps", f"must be a number of updates, not {steps!r}")
    epochs = values["epochs"]
    if not _is_between(epochs):
        refuse(f"{key}.epochs", f"must be a number of epochs, not {epochs!r}")
    shape = values["shape"]
    if shape not in ("linear", "exponential"):
        refuse(f"{key}.shape", f"must be one of linear, exponential, not {shape!r}")
    start = values["start_factor"]
    if not _is_between(start, 1) or (start == 0 and shape == "exponential"):
        refuse(f"{key}.start_factor", f"must be from 0 to 1 (exponential: above 0), not {start!r}")
    if steps and epochs:
        refuse(key, "has steps and epochs", "remove one of the two")

    if interval == "epoch" and not steps:
        return Warmup(round(epochs), "epoch", float(start), shape)
    if epochs:
        if steps_per_epoch is None:
            refuse(f"{key}.epochs", "the length of an epoch is not known", "give steps")
        steps = epochs * steps_per_epoch
    return Warmup(round(steps), "step", float(start), shape)


def _is_between(value: Any, highest: float = math.inf) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= highest


@dataclass
class _Builder:
    """Build the schedule of one optimizer: its scheduler, and those inside it.

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

    def build(self, node: Mapping[str, Any], key: str) -> OptimizerSchedule:
        per_epoch = self.steps_per_epoch
        self.interval = node.get("interval") or "step"
        if self.interval not in ("step", "epoch"):
            refuse(f"{key}.interval", f"must be step or epoch, not {self.interval!r}")
        warmup = parse_warmup(node.get("warmup"), f"{key}.warmup", self.interval, per_epoch)
        for group in self.optimizer.param_groups:
            # torch would start from the rate that an earlier scheduler stored.
            group.pop("initial_lr", None)

        steps = self.updates
        if steps is not None:  # what remains after the warm-up has at least one step
            self.updates = max(1, steps - warmup.updates(per_epoch))
            steps = self.updates
            if self.interval == "epoch":
                steps = math.ceil(steps / per_epoch) if per_epoch else None

        self.monitor = node.get("monitor")
        inner = {name: value for name, value in node.items() if name not in OUTER}
        scheduler = self.scheduler(inner, steps, key)

        settings = {name.removeprefix(f"{key}."): v for name, v in self.settings.items()}
        if warmup.ticks:
            settings |= {f"warmup.{name}": value for name, value in warmup._asdict().items()}
        settings |= {"interval": self.interval, "monitor": self.monitor}
        with problems_at(f"{key}.monitor"):
            return OptimizerSchedule(
                scheduler, self.interval, self.monitor, warmup, self.group_names, settings
            )

    def scheduler(self, node: Any, steps: int | None, key: str) -> Any:
        """Build a torch scheduler, and those inside it; `steps`: how many steps it takes."""
        if not isinstance(node, Mapping) or not node.get("_target_"):
            refuse(key, "has no _target_, such as torch.optim.lr_scheduler.StepLR")
        scheduler_class = locate(node["_target_"])
        arguments = self.arguments(node, steps, key)
        milestones = arguments.get("milestones")
        if scheduler_class in _BY_MILESTONES and not isinstance(milestones, list | None):
            refuse(
                f"{key}.milestones",
                f"must be a list of steps, or of fractions of the run, not {milestones!r}",
                f"such as [{milestones}]" if isinstance(milestones, int | float) else None,
            )
        self.settings |= {f"{key}.{name}": value for name, value in arguments.items()}

        is_plateau = isinstance(scheduler_class, type) and issubclass(
            scheduler_class, ReduceLROnPlateau
        )
        if is_plateau and arguments.get("mode", AUTO) == AUTO:
            arguments["mode"] = self.mode(key)
        is_cycle = scheduler_class in (OneCycleLR, CyclicLR)
        if is_cycle and arguments.get("max_lr") is None:
            arguments["max_lr"] = [float(group["lr"]) for group in self.optimizer.param_groups]

        objects = {}  # arguments that are not plain data
        if "functions" in node:
            if "lr_lambda" in arguments:
                refuse(
                    f"{key}.lr_lambda",
                    "is what functions gives",
                    'write functions: {default: ...} instead, such as "0.97 ** epoch"',
                )
            objects["lr_lambda"] = self.functions(node["functions"], key)
        ends = None
        if scheduler_class is SequentialLR:
            ends = milestones
            if ends and ends != sorted(ends):
                refuse(f"{key}.milestones", f"must rise, not {ends}")
        children = self.children(node.get("schedulers"), ends, steps, key)
        if children:
            objects["schedulers"] = children

        # A ChainedScheduler takes its optimizer from the schedulers in it.
        first = [] if scheduler_class is ChainedScheduler else [self.optimizer]
        scheduler = construct(LRScheduler, key, arguments, *first, **objects)
        if isinstance(scheduler, OneCycleLR) and not self.guessed:
            end = scheduler.total_steps
            if end < (steps or 0):
                unit = "updates" if self.interval == "step" else "epochs"
                refuse(
                    key,
                    f"total steps is {end}, but the run has {steps} {unit} for it",
                    f"set {key}.total_steps to ${{total_steps}}",
                )
        return scheduler

    def arguments(self, node: Mapping[str, Any], steps: int | None, key: str) -> dict[str, Any]:
        """Return a scheduler's arguments as plain values, with numbers for fractions of the run."""
        lengths = {"total_steps": steps, "steps_per_epoch": self.steps_per_epoch}
        arguments: dict[str, Any] = fill(
            {k: v for k, v in node.items() if k not in _BUILT}, lengths
        )
        for where, value in leaves(arguments, key):
            if any(f"${{{name}}}" in str(value) for name in RESERVED):
                _refuse_unknown_length(where)
        milestones = arguments.get("milestones")
        if isinstance(milestones, list):
            where = f"{key}.milestones"
            arguments["milestones"] = [_to_step(value, steps, where) for value in milestones]
        size = arguments.get("step_size")
        if isinstance(size, int) and size < 1:
            refuse(f"{key}.step_size", f"{size!r}: expected a number of steps, 1 or more")
        if isinstance(size, float):
            arguments["step_size"] = max(1, _to_step(size, steps, f"{key}.step_size"))
        return arguments

    def children(self, given: Any, ends: Any, steps: int | None, key: str) -> list[Any]:
        """Build the schedulers of a list, or of a dict of which null entries are dropped.

        `ends`: the steps at which each of them, but the last, gives way to the next; None where
        all of them take all `steps`.
        """
        if not isinstance(given, Mapping | list | None):
            refuse(f"{key}.schedulers", f"must be a list or a dict of schedulers, not {given!r}")
        items = given.items() if isinstance(given, Mapping) else enumerate(given or [])
        nodes = [(f"{key}.schedulers.{n}", child) for n, child in items if child is not None]
        lengths = [steps] * len(nodes)
        if nodes and ends and len(ends) == len(nodes) - 1:
            bounds = itertools.pairwise([0, *ends, steps])
            lengths = [None if end is None else max(1, end - begin) for begin, end in bounds]
        pairs = zip(nodes, lengths, strict=True)
        return [self.scheduler(child, length, where) for (where, child), length in pairs]

    def mode(self, key: str) -> str:
        """Return which values of the monitored metric are better; torch's default without one."""
        if self.monitor is None:
            return "min"
        direction = direction_of(epoch_metric(self.monitor), self.modes)
        if direction is None:
            refuse(
                f"{key}.mode",
                f"is not said: is a larger {self.monitor} better?",
                "say mode=max or mode=min",
            )
        return direction

    def functions(self, given: Any, key: str) -> list[Any]:
        """Return one function per group: that of its name, its rule, its optimizer, or `default`.

        `given`: a dict of them by these names, or one for all groups.
        """
        per_epoch = self.steps_per_epoch
        by_step = self.interval == "step"
        self.settings[f"{key}.functions"] = given
        if "total_steps" in str(given):
            self.settings[f"{key}.total_steps"] = self.updates
        if not by_step or "epoch" in str(given):
            self.settings[f"{key}.steps_per_epoch"] = per_epoch
        lengths = {"total_steps": self.updates, "steps_per_epoch": per_epoch}
        constants = {name: float(length) for name, length in lengths.items() if length is not None}

        def variables(tick: int) -> dict[str, float]:
            step = tick if by_step else tick * (per_epoch or 1)
            return {"step": float(step), "epoch": float(step // (per_epoch or 1)), **constants}

        available = {alias for group in self.all_names for alias in aliases(group)} | {DEFAULT}
        functions = {}
        sources = given if isinstance(given, Mapping) else {DEFAULT: given}
        for name, source in sources.items():
            if source is None:
                continue
            where = f"{key}.functions.{name}"
            if name not in available:
                refuse(
                    where,
                    "there is no parameter group of this name, only "
                    f"{truncated_list(self.all_names)}",
                    did_you_mean(str(name), available),
                )
            functions[name] = function_of(source, variables, where)

        by_group = []
        for group in self.group_names:
            names = [name for name in (*aliases(group), DEFAULT) if name in functions]
            if not names:
                refuse(f"{key}.functions", f"has no function for group {group!r}, and no default")
            by_group.append(functions[names[0]])
        return by_group


def _to_step(value: Any, steps: int | None, key: str) -> int:
    """Return a step of a scheduler: `value`, or for a float that fraction of its `steps`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(key, f"{value!r} is neither a step nor a fraction of the run")
    if isinstance(value, int):
        if value < 0:
            refuse(key, f"{value!r} is before the first step")
        return value
    if not 0 < value < 1:
        refuse(key, f"{value!r}: a fraction of the run must be between 0 and 1")
    if steps is None:
        _refuse_unknown_length(key)
    return round(value * steps)


def _refuse_unknown_length(key: str) -> NoReturn:
    refuse(
        key,
        "depends on the length of the run, which is not known",
        "set trainer.max_epochs or trainer.max_steps",
    )
