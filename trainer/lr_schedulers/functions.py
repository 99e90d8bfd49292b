"""Functions of a step for LambdaLR, from arithmetic expressions or import paths.

An expression is parsed and never evaluated as Python. All values are floats and expressions are
short, so that an evaluation is always cheap.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conf.errors import Problem, did_you_mean, problems_at
from trainer.lr_schedulers.schedule import Interval, ScheduleError
from trainer.optimizers.param_groups import DEFAULT
from trainer.targets.instantiate import instantiate, locate

Function = Callable[[int], float]
Values = Mapping[str, float]
_Term = Callable[[Values], float]

MAX_LENGTH = 500
MAX_DEPTH = 30
NAMES = ("step", "epoch", "total_steps", "steps_per_epoch")  # the variables of an expression
CONSTANTS = {"pi": math.pi, "e": math.e}
OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
# Name: function, minimum and maximum number of arguments.
FUNCTIONS: dict[str, tuple[Callable[..., float], int, int]] = {
    **{
        name: (getattr(math, name), 1, 1)
        for name in ("ceil", "cos", "exp", "floor", "sin", "sqrt", "tanh")
    },
    "abs": (abs, 1, 1),
    "log": (math.log, 1, 2),
    "max": (max, 2, 8),
    "min": (min, 2, 8),
    "pow": (math.pow, 2, 2),
}
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class ExpressionError(ValueError):
    """An expression is invalid, or has no value for some arguments."""


class Expression:
    """A function of named numbers: `0.5 * (1 + cos(pi * step / total_steps))`.

    Supports numbers, `+ - * / // % **`, comparisons, `and or not`, `a if b else c`, the constants
    `pi` and `e`, and the functions of `FUNCTIONS`.
    """

    def __init__(self, text: str, names: Sequence[str]) -> None:
        """Parse `text`, which may use `names`. Raises `ExpressionError`."""
        self.text = text
        self._names = names
        if len(text) > MAX_LENGTH:
            raise ExpressionError(f"an expression has at most {MAX_LENGTH} characters")
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ExpressionError(f"{text!r} is not a valid expression: {error}") from None
        self._term = self._compiled(tree.body, 0)

    def __call__(self, values: Values) -> float:
        """Return the value for the given numbers. Raises `ExpressionError` if there is none."""
        at = ", ".join(f"{name} = {value:g}" for name, value in values.items())
        try:
            result = float(self._term(values))
        except (ArithmeticError, ValueError) as error:
            raise ExpressionError(f"{self.text!r} has no value at {at}: {error}") from None
        if not math.isfinite(result):
            raise ExpressionError(f"{self.text!r} is {result} at {at}")
        return result

    def _compiled(self, node: ast.expr, depth: int) -> _Term:
        # Syntax that is not listed here is an error.
        if depth > MAX_DEPTH:
            raise ExpressionError(f"{self.text!r} is nested more than {MAX_DEPTH} deep")

        def parts(*nodes: ast.expr) -> list[_Term]:
            return [self._compiled(part, depth + 1) for part in nodes]

        match node:
            case ast.Constant(value=bool() | int() | float() as number):
                return self._constant(number)
            case ast.Name(id=name):
                return self._named(name)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
                return _applied(OPERATORS[type(op)], parts(operand))
            case (
                ast.BinOp(left=left, op=op, right=right)
                | ast.Compare(left=left, ops=[op], comparators=[right])
            ) if type(op) in OPERATORS:
                return _applied(OPERATORS[type(op)], parts(left, right))
            case ast.BoolOp(op=op, values=values):
                several = parts(*values)
                combine = all if isinstance(op, ast.And) else any
                return lambda given: combine(term(given) for term in several)
            case ast.IfExp(test=test, body=body, orelse=other):
                asked, yes, no = parts(test, body, other)
                return lambda given: yes(given) if asked(given) else no(given)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._call(name, parts(*arguments))
        raise ExpressionError(
            f"{self.text!r}: {ast.unparse(node)!r} is not allowed; an expression has numbers,"
            f" {', '.join(self._names)}, + - * / // % **, comparisons, `a if b else c`,"
            f" {', '.join(CONSTANTS)} and {', '.join(FUNCTIONS)}"
        )

    def _constant(self, number: float) -> _Term:
        try:
            value = float(number)
        except OverflowError:
            raise ExpressionError(f"{self.text!r} has a number that is too large") from None
        return lambda values: value

    def _named(self, name: str) -> _Term:
        if name in CONSTANTS:
            return self._constant(CONSTANTS[name])
        if name not in self._names:
            known = ", ".join([*self._names, *CONSTANTS])
            raise ExpressionError(f"{self.text!r}: {name!r} is unknown; there are {known}")
        return lambda values: values[name]

    def _call(self, name: str, arguments: Sequence[_Term]) -> _Term:
        if name not in FUNCTIONS:
            known = ", ".join(FUNCTIONS)
            raise ExpressionError(f"{self.text!r}: function {name!r} is unknown; there are {known}")
        function, fewest, most = FUNCTIONS[name]
        if not fewest <= len(arguments) <= most:
            count = str(fewest) if fewest == most else f"{fewest} to {most}"
            raise ExpressionError(f"{self.text!r}: {name} takes {count} arguments")
        return _applied(function, arguments)


def _applied(function: Callable[..., float], terms: Sequence[_Term]) -> _Term:
    return lambda values: function(*(term(values) for term in terms))


def functions_of_groups(
    functions: Any,
    group_names: Sequence[str],
    all_names: Sequence[str],
    make: Callable[[Any, str], Function],
    key: str,
) -> list[Function]:
    """Return the function of each group: that of its name, its rule or optimizer, or `default`.

    A single function applies to every group. `all_names` are the names of the groups of all
    optimizers, which may be keys of `functions`. `make` turns the source of a function, which
    stands under a key, into the function. Raises `ScheduleError`.
    """
    given = by_name(functions)
    known = {alias for group in all_names for alias in _aliases(group)}
    for name in given:
        if name != DEFAULT and name not in known:
            message = f"there is no parameter group of this name, only {', '.join(all_names)}"
            raise ScheduleError(Problem(f"{key}.{name}", message, did_you_mean(name, known)))
    made = {name: make(source, f"{key}.{name}") for name, source in given.items()}
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
    # The names that select a group: `muon.body.3`, `muon.body` and `muon`.
    parts = group.split(".")
    return [".".join(parts[:i]) for i in range(len(parts), 0, -1)]


def function_of(
    source: Any,
    key: str,
    interval: Interval,
    steps: int | None,
    updates: int | None,
    steps_per_epoch: int | None,
) -> Function:
    """Return the function that an expression, an import path or a node describes.

    It is over `steps` steps of the scheduler, which take `updates` updates; None if unknown.
    Raises `ScheduleError`.
    """
    if isinstance(source, Mapping):
        function = instantiate(dict(source), _key_=key)
    elif isinstance(source, str) and _IMPORT_PATH.fullmatch(source):
        with problems_at(key):
            function = locate(source)
    elif isinstance(source, str | int | float) and not isinstance(source, bool):
        lengths = {"total_steps": updates, "steps_per_epoch": steps_per_epoch}
        known = {name: float(length) for name, length in lengths.items() if length is not None}
        factor = _factor(str(source), known, interval, steps_per_epoch or 1, key)
        last = steps or 2
        for tick in sorted({0, 1, last // 2, last}):
            if factor(tick) < 0:
                message = f"{source!r} is negative, {factor(tick):g}, at step {tick}"
                raise ScheduleError(Problem(key, message))
        return factor
    else:
        message = f"must be an expression or an import path, not {source!r}"
        raise ScheduleError(Problem(key, message))
    if not callable(function):
        raise ScheduleError(Problem(key, f"is not a function of a step: {function!r}"))
    # torch saves the attributes of callable objects, but nothing of functions.
    return lambda step: function(step)


def _factor(
    text: str, known: Mapping[str, float], interval: Interval, per_epoch: int, key: str
) -> Function:
    try:
        expression = Expression(text, [n for n in NAMES if n in ("step", "epoch", *known)])
    except ExpressionError as error:
        raise ScheduleError(Problem(key, str(error))) from None

    def factor(tick: int) -> float:
        step = tick if interval == "step" else tick * per_epoch
        try:
            return expression({"step": float(step), "epoch": float(step // per_epoch), **known})
        except ExpressionError as error:
            raise ScheduleError(Problem(key, str(error))) from None

    return factor
