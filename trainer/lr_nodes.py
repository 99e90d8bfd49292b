"""From an `lr_scheduler` node of the config to a torch scheduler, horizons filled in."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

from trainer.instantiate import instantiate, locate
from trainer.lr_expression import Expression, ExpressionError
from trainer.lr_track import Interval, Track
from trainer.param_groups import DEFAULT
from trainer.param_selectors import nearest
from trainer.warmup import Warmup, parse_warmup

OWN = ("interval", "monitor", "warmup", "functions")  # keys of a node that are not the target's
NAMES = ("step", "epoch", "total_steps", "steps_per_epoch")  # what an expression may use
_Function = Callable[[int], float]
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class ScheduleError(ValueError):
    """An `lr_scheduler` section of the config that cannot be used."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Horizon:
    """The length of what a scheduler covers: in its own steps, and in updates."""

    steps: int | None  # of the scheduler: updates, or epochs where it moves once an epoch
    updates: int | None
    steps_per_epoch: int | None

    def fill(self, node: Any, key: str) -> Any:
        """Replace `${total_steps}` and `${steps_per_epoch}`; raise if a length is not known."""
        if isinstance(node, Mapping):
            return {k: self.fill(v, f"{key}.{k}") for k, v in node.items()}
        if isinstance(node, list | tuple):
            return [self.fill(v, key) for v in node]
        if node == "${total_steps}":
            return _known(self.steps, key)
        if node == "${steps_per_epoch}":
            return _known(self.steps_per_epoch, key)
        return node


def _known(length: int | None, key: str) -> int:
    if length is None:
        raise ScheduleError(
            f"{key} follows the length of the run, which is not known:"
            " set trainer.max_epochs or trainer.max_steps"
        )
    return length


def target_nodes(node: Mapping[str, Any] | None, key: str) -> dict[str, dict[str, Any]]:
    """Return, by config key, the nodes whose targets are called with `provided` arguments."""
    if not node or "_target_" not in node:
        return {}
    found = {key: {k: v for k, v in node.items() if k not in (*OWN, "schedulers")}}
    for name, child in _children(node, key):
        found |= target_nodes(child, f"{key}.schedulers.{name}")
    return found


def _children(node: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the nodes under `schedulers`, a named dict (null: dropped) or a list."""
    children = node.get("schedulers") or {}
    if isinstance(children, Mapping):
        named = [(str(name), child) for name, child in children.items() if child is not None]
    else:
        named = [(str(i), child) for i, child in enumerate(children)]
    for name, child in named:
        if not isinstance(child, Mapping) or "_target_" not in child:
            raise ScheduleError(f"{key}.schedulers.{name} has no _target_")
    return named


def build_track(
    node: Mapping[str, Any],
    optimizer: Optimizer,
    group_names: Sequence[str],
    total_steps: int | None,
    steps_per_epoch: int | None,
    key: str,
) -> Track:
    """Build the schedule that `node` describes over one optimizer."""
    if "_target_" not in node:
        raise ScheduleError(f"{key} has no _target_")
    interval = _interval(node, key)
    warmup = _warmup(node, key, interval, steps_per_epoch)
    horizon = _remaining(total_steps, steps_per_epoch, interval, warmup)
    scheduler = _Nodes(optimizer, group_names, interval).build(node, horizon, key)
    monitor = node.get("monitor")
    if isinstance(scheduler, ReduceLROnPlateau) and not monitor:
        raise ScheduleError(f"{key}.monitor must name the metric to watch, such as val/loss")
    settings = {k: v for k, v in node.items() if k not in ("interval", "monitor", "warmup")}
    return Track(
        optimizer,
        scheduler,
        interval,
        warmup,
        monitor if isinstance(scheduler, ReduceLROnPlateau) or monitor else None,
        _settings(settings, interval, monitor, warmup, horizon, key),
        rebuild=lambda other: build_track(
            node, other, group_names, total_steps, steps_per_epoch, key
        ),
    )


def _settings(
    node: Mapping[str, Any],
    interval: Interval,
    monitor: Any,
    warmup: Warmup,
    horizon: Horizon,
    key: str,
) -> dict[str, Any]:
    """Describe a schedule completely, to tell whether two are the same."""
    described = _flat(horizon.fill(node, key), "")
    if "functions" in node or any(isinstance(v, float) for v in _flat(node, "").values()):
        described["total_steps"] = horizon.updates
        described["steps_per_epoch"] = horizon.steps_per_epoch
    ramp = {} if not warmup.ticks else {f"warmup.{k}": v for k, v in _as_dict(warmup).items()}
    return {**described, **ramp, "interval": interval, "monitor": monitor}


def _as_dict(warmup: Warmup) -> dict[str, Any]:
    return {name: getattr(warmup, name) for name in ("ticks", "every", "start_factor", "shape")}


def _flat(node: Any, prefix: str) -> dict[str, Any]:
    if isinstance(node, Mapping):
        items = {f"{prefix}.{k}" if prefix else str(k): v for k, v in node.items()}
        return {k: v for name, value in items.items() for k, v in _flat(value, name).items()}
    return {prefix: node}


def _interval(node: Mapping[str, Any], key: str) -> Interval:
    interval = node.get("interval") or "step"
    if interval not in ("step", "epoch"):
        raise ScheduleError(f"{key}.interval must be step or epoch, not {interval!r}")
    return "epoch" if interval == "epoch" else "step"


def _warmup(
    node: Mapping[str, Any], key: str, interval: Interval, steps_per_epoch: int | None
) -> Warmup:
    problems: list[str] = []
    warmup = parse_warmup(
        node.get("warmup"), f"{key}.warmup", interval, steps_per_epoch, problems
    )
    if problems:
        raise ScheduleError("\n  ".join(problems))
    return warmup


def _remaining(
    total_steps: int | None, steps_per_epoch: int | None, interval: Interval, warmup: Warmup
) -> Horizon:
    """Return what is left of the run after the warm-up; at least one step, to be a horizon."""
    if total_steps is None:
        return Horizon(None, None, steps_per_epoch)
    updates = max(1, total_steps - warmup.updates(steps_per_epoch))
    if interval == "step":
        return Horizon(updates, updates, steps_per_epoch)
    epochs = math.ceil(updates / steps_per_epoch) if steps_per_epoch else None
    return Horizon(epochs, updates, steps_per_epoch)


class _Nodes:
    """Build the scheduler of a node, and those within it, over one optimizer."""

    def __init__(
        self, optimizer: Optimizer, group_names: Sequence[str], interval: Interval
    ) -> None:
        self._optimizer = optimizer
        self._group_names = group_names
        self._interval = interval

    def build(self, node: Mapping[str, Any], horizon: Horizon, key: str) -> Any:
        """Return the torch scheduler of `node`. Raises `ScheduleError`."""
        kind = locate(node["_target_"])
        milestones = self._milestones(node, horizon, key)
        own = {k: v for k, v in node.items() if k not in (*OWN, "schedulers")}
        arguments = horizon.fill(own, key) | milestones
        if node.get("schedulers"):
            arguments["schedulers"] = self._build_children(node, kind, milestones, horizon, key)
        if kind in (OneCycleLR, CyclicLR) and arguments.get("max_lr") is None:
            arguments["max_lr"] = [float(g["lr"]) for g in self._optimizer.param_groups]
        if "functions" in node:
            arguments["lr_lambda"] = self._functions(node["functions"], horizon, key)
        return self._construct(arguments, key)

    def _construct(self, arguments: dict[str, Any], key: str) -> Any:
        # What is not plain data goes past the node, untouched.
        objects = {k: arguments.pop(k) for k in ("schedulers", "lr_lambda") if k in arguments}
        try:
            return instantiate(arguments, self._optimizer, _key_=key, **objects)
        except (RuntimeError, ZeroDivisionError, KeyError) as error:
            raise ScheduleError(f"{key}: {arguments['_target_']}: {error}") from error

    def _milestones(
        self, node: Mapping[str, Any], horizon: Horizon, key: str
    ) -> dict[str, Any]:
        """Turn milestones and step sizes that are fractions of the horizon into steps."""
        found: dict[str, Any] = {}
        if isinstance(node.get("milestones"), list | tuple):
            values = horizon.fill(list(node["milestones"]), f"{key}.milestones")
            found["milestones"] = [_share(v, horizon, f"{key}.milestones") for v in values]
        if isinstance(node.get("step_size"), float):
            found["step_size"] = max(1, _share(node["step_size"], horizon, f"{key}.step_size"))
        return found

    def _build_children(
        self,
        node: Mapping[str, Any],
        kind: type,
        milestones: Mapping[str, Any],
        horizon: Horizon,
        key: str,
    ) -> list[Any]:
        children = _children(node, key)
        horizons = [horizon] * len(children)
        if kind is SequentialLR:
            horizons = _phases(milestones.get("milestones", []), horizon, len(children))
        return [
            self.build(child, phase, f"{key}.schedulers.{name}")
            for (name, child), phase in zip(children, horizons, strict=True)
        ]

    def _functions(self, functions: Any, horizon: Horizon, key: str) -> list[_Function]:
        """Return a function for each group: its own, its rule's, or `default`'s."""
        by_group = functions if isinstance(functions, Mapping) else {DEFAULT: functions}
        by_group = {str(k): v for k, v in by_group.items() if v is not None}
        known = {name for group in self._group_names for name in _aliases(group)}
        for name in by_group:
            if name != DEFAULT and name not in known:
                raise ScheduleError(
                    f"{key}.functions.{name}: there is no such parameter group; there are"
                    f" {', '.join(self._group_names)}{nearest(name, known)}"
                )
        found = []
        for group in self._group_names:
            name = next((n for n in [*_aliases(group), DEFAULT] if n in by_group), None)
            if name is None:
                raise ScheduleError(f"{key}.functions has none for group {group!r}, and no default")
            found.append(self._function(by_group[name], horizon, f"{key}.functions.{name}"))
        return found

    def _function(self, source: Any, horizon: Horizon, key: str) -> _Function:
        if isinstance(source, Mapping):
            function = instantiate(dict(source), _key_=key)
        elif isinstance(source, str) and _IMPORT_PATH.fullmatch(source):
            function = locate(source)
        else:
            return _expression(str(source), horizon, self._interval, key)
        if not callable(function):
            raise ScheduleError(f"{key} is no function of a step: {function!r}")
        return lambda step: function(step)  # torch saves a callable object's attributes, not this's


def _aliases(group: str) -> list[str]:
    """Return a group's name and those of the rule and the optimizer that it comes from."""
    parts = group.split(".")
    return [".".join(parts[:i]) for i in range(len(parts), 0, -1)]


def _share(value: Any, horizon: Horizon, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ScheduleError(f"{key} has {value!r}: neither a step nor a fraction of the run")
    if isinstance(value, float) and not 0 < value < 1:
        raise ScheduleError(f"{key} has {value!r}: a fraction of the run lies between 0 and 1")
    return round(value * _known(horizon.steps, key)) if isinstance(value, float) else value


def _phases(milestones: Sequence[int], horizon: Horizon, count: int) -> list[Horizon]:
    """Return the length of each part of a sequence that changes over at `milestones`."""
    begins = [0, *milestones][:count]
    ends: list[int | None] = [*milestones[: count - 1], horizon.steps]
    begins += [0] * (count - len(begins))
    ends += [horizon.steps] * (count - len(ends))
    return [
        replace(horizon, steps=None if end is None else max(1, end - begin))
        for begin, end in zip(begins, ends, strict=True)
    ]


def _expression(
    text: str, horizon: Horizon, interval: Interval, key: str
) -> _Function:
    """Return the factor that `text` gives at a step of the scheduler, tried at both ends."""
    total, per_epoch = horizon.updates, horizon.steps_per_epoch
    lengths = {"total_steps": total, "steps_per_epoch": per_epoch}
    known = {name: float(length) for name, length in lengths.items() if length is not None}
    try:
        compiled = Expression(text, [n for n in NAMES if n not in lengths or n in known])
    except ExpressionError as error:
        raise ScheduleError(f"{key}: {error}") from None
    per_epoch = per_epoch or 1

    def factor(tick: int) -> float:
        step = tick if interval == "step" else tick * per_epoch
        values = {"step": float(step), "epoch": float(step // per_epoch), **known}
        try:
            return compiled(values)
        except ExpressionError as error:
            raise ScheduleError(f"{key}: {error}") from None

    for tick in {0, 1, (horizon.steps or 2) // 2, horizon.steps or 2}:
        if factor(tick) < 0:
            raise ScheduleError(f"{key}: {text!r} is negative at step {tick}")
    return factor


def takes_metric(scheduler: Any) -> bool:
    """Tell whether a scheduler's `step` must be given a metric."""
    metrics = inspect.signature(scheduler.step).parameters.get("metrics")
    return metrics is not None and metrics.default is inspect.Parameter.empty
