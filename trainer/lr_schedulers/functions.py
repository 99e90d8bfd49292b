"""Functions of a step for LambdaLR, from arithmetic expressions or import paths.

An expression is parsed and never evaluated as Python. All values are floats and expressions are
short, so that an evaluation is always cheap.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from regimen.conf.errors import problems_at
from regimen.trainer.optimizers.param_groups import refuse
from regimen.trainer.targets.allow_list import locate

Function = Callable[[int], float]
Values = Callable[[int], Mapping[str, float]]  # the variables of an expression at a step
_Term = Callable[[Mapping[str, float]], float]

MAX_LENGTH = 500
MAX_DEPTH = 30
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
_MATH = ("ceil", "cos", "exp", "floor", "log", "pow", "sin", "sqrt", "tanh")
FUNCTIONS: dict[str, Callable[..., float]] = {name: getattr(math, name) for name in _MATH}
FUNCTIONS |= {"abs": abs, "max": max, "min": min}
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def expression(text: str, values: Values, key: str) -> Function:
    """Return the function of a step that `0.5 * (1 + cos(pi * step / total_steps))` describes.

    Supports numbers, `+ - * / // % **`, comparisons, `and or not`, `a if b else c`, the constants
    `pi` and `e`, the functions of `FUNCTIONS` and the names in `values`. Raises `ConfigError`;
    the function as well, where the expression has no value.
    """
    try:
        if len(text) > MAX_LENGTH:
            raise ValueError(f"it has more than {MAX_LENGTH} characters")
        term = _compiled(ast.parse(text.strip(), mode="eval").body, list(values(0)), MAX_DEPTH)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        refuse(key, f"{text[:200]!r} is not a valid expression: {error}")

    def function(step: int) -> float:
        variables = values(step)
        try:
            result = float(term(variables))
            if not math.isfinite(result):
                raise ArithmeticError(f"it is {result}")
            return result
        except (ArithmeticError, ValueError, TypeError) as error:
            at = ", ".join(f"{name} = {value:g}" for name, value in variables.items())
            refuse(key, f"{text!r} has no value at {at}: {error}")

    return function


def _compiled(node: ast.expr, names: Sequence[str], depth: int) -> _Term:
    """Return a node as a function of the variables. Raises ValueError for all other syntax."""
    if depth < 0:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")

    def compiled(*parts: ast.expr) -> list[_Term]:
        return [_compiled(part, names, depth - 1) for part in parts]

    match node:
        case ast.Constant(value=bool() | int() | float() as number):
            constant = float(number)
            return lambda variables: constant
        case ast.Name(id=name) if name in CONSTANTS:
            return lambda variables: CONSTANTS[name]
        case ast.Name(id=name) if name in names:
            return operator.itemgetter(name)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return _applied(OPERATORS[type(op)], compiled(operand))
        case (
            ast.BinOp(left=left, op=op, right=right)
            | ast.Compare(left=left, ops=[op], comparators=[right])
        ) if type(op) in OPERATORS:
            return _applied(OPERATORS[type(op)], compiled(left, right))
        case ast.BoolOp(op=op, values=parts):
            terms = compiled(*parts)
            combine = all if isinstance(op, ast.And) else any
            return lambda variables: combine(term(variables) for term in terms)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            condition, yes, no = compiled(test, body, orelse)
            return lambda variables: yes(variables) if condition(variables) else no(variables)
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in FUNCTIONS:
            return _applied(FUNCTIONS[name], compiled(*parts))
    raise ValueError(
        f"{ast.unparse(node)!r} is not allowed; an expression has numbers, {', '.join(names)}, "
        "+ - * / // % **, comparisons, `and or not`, `a if b else c`, "
        f"{', '.join([*CONSTANTS, *FUNCTIONS])}"
    )


def _applied(function: Callable[..., float], terms: Sequence[_Term]) -> _Term:
    return lambda variables: function(*(term(variables) for term in terms))


def aliases(group: str) -> list[str]:
    """Return the names that select a group: `muon.body.3`, `muon.body` and `muon`."""
    parts = group.split(".")
    return [".".join(parts[:i]) for i in range(len(parts), 0, -1)]


def function_of(source: Any, values: Values, key: str) -> Function:
    """Return the function of an expression or an import path.

    `values` returns the variables of an expression at a step. Raises `ConfigError`.
    """
    if isinstance(source, str) and _IMPORT_PATH.fullmatch(source):
        with problems_at(key):
            function = locate(source)
        # In a function of ours: of a callable object torch's LambdaLR would save the attributes.
        return lambda step: function(step)
    if isinstance(source, bool) or not isinstance(source, str | int | float):
        refuse(key, f"must be an expression or an import path, not {source!r}")
    return expression(str(source), values, key)
