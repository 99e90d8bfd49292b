"""Functions of a step for LambdaLR, from expressions or import paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conf.errors import Problem, did_you_mean, problems_at
from trainer.lr_schedulers.expression import Expression, ExpressionError
from trainer.lr_schedulers.horizon import Horizon, Interval, ScheduleError
from trainer.optimizers.param_groups import DEFAULT
from trainer.targets.instantiate import instantiate, locate

NAMES = ("step", "epoch", "total_steps", "steps_per_epoch")  # the variables of an expression
Function = Callable[[int], float]
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def functions_of_groups(
    functions: Any,
    group_names: Sequence[str],
    all_names: Sequence[str],
    horizon: Horizon,
    interval: Interval,
    key: str,
) -> list[Function]:
    """Return the function of each group: that of its name, its rule or optimizer, or `default`.

    A single function applies to every group. `all_names` are the names of the groups of all
    optimizers, which may be keys of `functions`. Raises `ScheduleError`.
    """
    given = by_name(functions)
    known = {alias for group in all_names for alias in _aliases(group)}
    for name in given:
        if name != DEFAULT and name not in known:
            message = f"there is no parameter group of this name, only {', '.join(all_names)}"
            raise ScheduleError(Problem(f"{key}.{name}", message, did_you_mean(name, known)))
    made = {
        name: make(source, horizon, interval, f"{key}.{name}") for name, source in given.items()
    }
    found = []
    for group in group_names:
        chosen = [made[name] for name in [*_aliases(group), DEFAULT] if name in made]
        if not chosen:
            message = f"has no function for group {group!r}, and no default"
            raise ScheduleError(Problem(key, message))
        found.append(chosen[0])
    return found


def by_name(functions: Any) -> dict[str, Any]:
    """Return functions by name; a single one gets the name `default`, null is dropped."""
    several = isinstance(functions, Mapping) and "_target_" not in functions
    given = functions if several else {DEFAULT: functions}
    return {str(name): function for name, function in given.items() if function is not None}


def _aliases(group: str) -> list[str]:
    """Return the names that select a group: `muon.body.3`, `muon.body` and `muon`."""
    parts = group.split(".")
    return [".".join(parts[:i]) for i in range(len(parts), 0, -1)]


def make(source: Any, horizon: Horizon, interval: Interval, key: str) -> Function:
    """Return the function that an expression, an import path or a node describes."""
    if isinstance(source, Mapping):
        function = instantiate(dict(source), _key_=key)
    elif isinstance(source, str) and _IMPORT_PATH.fullmatch(source):
        with problems_at(key):
            function = locate(source)
    elif isinstance(source, str | int | float) and not isinstance(source, bool):
        return _expression(str(source), horizon, interval, key)
    else:
        message = f"must be an expression or an import path, not {source!r}"
        raise ScheduleError(Problem(key, message))
    if not callable(function):
        raise ScheduleError(Problem(key, f"is not a function of a step: {function!r}"))
    # torch saves the attributes of callable objects, but nothing of functions.
    return lambda step: function(step)


def _expression(text: str, horizon: Horizon, interval: Interval, key: str) -> Function:
    per_epoch = horizon.steps_per_epoch or 1
    lengths = {"total_steps": horizon.updates, "steps_per_epoch": horizon.steps_per_epoch}
    known = {name: float(length) for name, length in lengths.items() if length is not None}
    try:
        compiled = Expression(text, [n for n in NAMES if n not in lengths or n in known])
    except ExpressionError as error:
        raise ScheduleError(Problem(key, str(error))) from None

    def factor(tick: int) -> float:
        step = tick if interval == "step" else tick * per_epoch
        try:
            return compiled({"step": float(step), "epoch": float(step // per_epoch), **known})
        except ExpressionError as error:
            raise ScheduleError(Problem(key, str(error))) from None

    last = horizon.steps or 2
    for tick in sorted({0, 1, last // 2, last}):
        if factor(tick) < 0:
            message = f"{text!r} is negative, {factor(tick):g}, at step {tick}"
            raise ScheduleError(Problem(key, message))
    return factor
