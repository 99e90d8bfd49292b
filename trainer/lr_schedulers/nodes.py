"""Build a track of learning rates from an `lr_scheduler` node of the config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

from conf.errors import Problem, raise_problems
from trainer.lr_schedulers.functions import by_name, functions_of_groups
from trainer.lr_schedulers.horizon import Horizon, Interval, ScheduleError, remaining
from trainer.lr_schedulers.tape import Tape
from trainer.lr_schedulers.track import Track
from trainer.lr_schedulers.warmup import Warmup, parse_warmup
from trainer.targets.instantiate import instantiate, locate

OUTER = ("interval", "monitor", "warmup")  # keys of ours, in the outermost node only
OWN = (*OUTER, "functions")  # keys that are not arguments of the target

_WAY = 'write functions: {default: ...} instead, such as "0.97 ** epoch"'


def target_nodes(node: Mapping[str, Any] | None, key: str) -> dict[str, dict[str, Any]]:
    """Return, by config key, the nodes whose targets get one positional argument from us.

    Arguments that we compute for a target (inner schedulers, functions, ...) are replaced by
    placeholders, so that the nodes can be checked against the signatures of their targets.
    """
    if not node or "_target_" not in node:
        return {}
    chained = str(node["_target_"]).endswith(f".{ChainedScheduler.__name__}")
    stand_ins: dict[str, dict[str, Any]] = {
        "functions": {"lr_lambda": []},
        "schedulers": {} if chained else {"schedulers": []},
        "milestones": {"milestones": [1]},
        "step_size": {"step_size": 1},
        "max_lr": {"max_lr": 1.0} if node.get("max_lr") is None else {"max_lr": node["max_lr"]},
    }
    plain = {k: v for k, v in node.items() if k not in (*OUTER, *stand_ins)}
    for word in stand_ins.keys() & node.keys():
        plain |= stand_ins[word]
    found = {key: plain}
    for name, function in by_name(node.get("functions")).items():
        if isinstance(function, Mapping):
            found[f"{key}.functions.{name}"] = dict(function)
    for name, child in inner_nodes(node, key):
        found |= target_nodes(child, f"{key}.schedulers.{name}")
    return found


def inner_nodes(node: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the nodes under `schedulers`, a dict (null is dropped) or a list."""
    children = node.get("schedulers") or {}
    if isinstance(children, Mapping):
        named = [(str(name), child) for name, child in children.items() if child is not None]
    else:
        named = [(str(i), child) for i, child in enumerate(children)]
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


def build_track(
    node: Mapping[str, Any],
    optimizer: Optimizer,
    configured: Sequence[Mapping[str, Any]],
    group_names: Sequence[str],
    all_names: Sequence[str],
    total_steps: int | None,
    steps_per_epoch: int | None,
    key: str,
) -> Track:
    """Build the schedule of `node` over one optimizer. Raises `ScheduleError`.

    `configured` are the hyper-parameters of the optimizer's groups, `group_names` their names,
    `all_names` those of all optimizers' groups.
    """
    interval: Interval = _interval(node, key)
    problems: list[Problem] = []
    warmup = parse_warmup(node.get("warmup"), f"{key}.warmup", interval, steps_per_epoch, problems)
    raise_problems(problems, ScheduleError)
    horizon = remaining(total_steps, steps_per_epoch, interval, warmup)
    settings: dict[str, Any] = {}

    def make(over: Optimizer) -> Any:
        maker = _Maker(over, group_names, all_names, interval)
        scheduler = maker.make(node, horizon, key)
        settings.update(maker.settings)
        return scheduler

    tape = Tape(make, configured, optimizer.defaults)
    monitor = _monitor(node, tape.scheduler, key)
    settings |= {**_ramp(warmup), "interval": interval, "monitor": monitor}
    follows = monitor is not None
    return Track(
        optimizer,
        make(optimizer) if follows else tape.scheduler,
        interval,
        monitor,
        warmup,
        group_names,
        settings,
        steps_per_epoch,
        None if follows else tape,
    )


def _interval(node: Mapping[str, Any], key: str) -> Interval:
    if not node.get("_target_"):
        message = "has no _target_, such as torch.optim.lr_scheduler.StepLR"
        raise ScheduleError(Problem(key, message))
    interval = node.get("interval") or "step"
    if interval not in ("step", "epoch"):
        message = f"must be step or epoch, not {interval!r}"
        raise ScheduleError(Problem(f"{key}.interval", message))
    return "epoch" if interval == "epoch" else "step"


def _monitor(node: Mapping[str, Any], scheduler: Any, key: str) -> str | None:
    monitor = node.get("monitor")
    follows = takes_metric(scheduler)
    if follows and not monitor:
        message = "must be the metric that the scheduler monitors, such as val/loss"
        raise ScheduleError(Problem(f"{key}.monitor", message))
    if monitor and not follows:
        message = f"{type(scheduler).__name__} does not monitor a metric"
        raise ScheduleError(Problem(f"{key}.monitor", message))
    return str(monitor) if follows else None


def takes_metric(scheduler: Any) -> bool:
    """Return whether a scheduler's `step` has a required argument, which is a metric."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in variadic for p in parameters)


def _ramp(warmup: Warmup) -> dict[str, Any]:
    if not warmup.ticks:
        return {}
    names = ("ticks", "every", "start_factor", "shape")
    return {f"warmup.{name}": getattr(warmup, name) for name in names}


class _Maker:
    """Build the scheduler of a node, and those inside it, over one optimizer.

    `settings` collects their arguments, which are compared when a run is resumed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group_names: Sequence[str],
        all_names: Sequence[str],
        interval: Interval,
    ) -> None:
        self._optimizer = optimizer
        self._group_names = group_names
        self._all_names = all_names
        self._interval = interval
        self.settings: dict[str, Any] = {}

    def make(self, node: Mapping[str, Any], horizon: Horizon, key: str, path: str = "") -> Any:
        """Return the torch scheduler of `node`; `path` is its prefix in `settings`."""
        kind = locate(node["_target_"])
        arguments = self._arguments(node, horizon, key)
        self.settings |= {f"{path}{name}": value for name, value in arguments.items()}
        objects: dict[str, Any] = {}  # arguments that are not plain data
        if "functions" in node:
            if "lr_lambda" in arguments:
                raise ScheduleError(Problem(f"{key}.lr_lambda", "is what functions gives", _WAY))
            objects["lr_lambda"] = self._functions(node["functions"], horizon, key, path)
        if node.get("schedulers"):
            children = inner_nodes(node, key)
            parts = [horizon] * len(children)
            if kind is SequentialLR:
                parts = horizon.phases(arguments.get("milestones", []), len(children))
            objects["schedulers"] = [
                self.make(child, part, f"{key}.schedulers.{name}", f"{path}schedulers.{name}.")
                for (name, child), part in zip(children, parts, strict=True)
            ]
        if kind in (OneCycleLR, CyclicLR) and arguments.get("max_lr") is None:
            arguments["max_lr"] = [float(group["lr"]) for group in self._optimizer.param_groups]
        return self._construct(kind, arguments, objects, key)

    def _arguments(self, node: Mapping[str, Any], horizon: Horizon, key: str) -> dict[str, Any]:
        """Return the arguments of the node, with horizons and their fractions as numbers."""
        given = {k: v for k, v in node.items() if k not in (*OWN, "schedulers")}
        arguments: dict[str, Any] = horizon.fill(given, key)
        milestones, size = arguments.get("milestones"), arguments.get("step_size")
        if isinstance(milestones, list):
            arguments["milestones"] = [horizon.share(m, f"{key}.milestones") for m in milestones]
        if isinstance(size, float):
            arguments["step_size"] = max(1, horizon.share(size, f"{key}.step_size"))
        return arguments

    def _functions(self, functions: Any, horizon: Horizon, key: str, path: str) -> list[Any]:
        self.settings[f"{path}functions"] = functions
        if "total_steps" in str(functions):
            self.settings[f"{path}total_steps"] = horizon.updates
        if self._interval == "epoch" or "epoch" in str(functions):
            self.settings[f"{path}steps_per_epoch"] = horizon.steps_per_epoch
        return functions_of_groups(
            functions,
            self._group_names,
            self._all_names,
            horizon,
            self._interval,
            f"{key}.functions",
        )

    def _construct(
        self, kind: type, arguments: dict[str, Any], objects: dict[str, Any], key: str
    ) -> Any:
        try:
            if kind is ChainedScheduler:  # the optimizer is its last argument
                made = instantiate(arguments, optimizer=self._optimizer, _key_=key, **objects)
            else:
                made = instantiate(arguments, self._optimizer, _key_=key, **objects)
        except (RuntimeError, ArithmeticError, LookupError) as error:
            if (
                hasattr(error, "exit_code") or "lr_lambda" in objects
            ):  # an error of a user's function
                raise
            raise ScheduleError(Problem(key, f"{arguments['_target_']}: {error}")) from error
        if not isinstance(made, LRScheduler):
            message = f"makes no LRScheduler but a {type(made).__name__}"
            raise ScheduleError(Problem(f"{key}._target_", message))
        return made
