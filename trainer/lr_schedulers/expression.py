"""Arithmetic expressions of a config, which are parsed and never evaluated as Python.

All values are floats and expressions are short, so that an evaluation is always cheap.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence

Values = Mapping[str, float]
_Term = Callable[[Values], float]

MAX_LENGTH = 500
MAX_DEPTH = 30
CONSTANTS = {"pi": math.pi, "e": math.e}
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,
}
_COMPARE: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
# Name: function, minimum and maximum number of arguments.
FUNCTIONS: dict[str, tuple[Callable[..., float], int, int]] = {
    "abs": (abs, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "cos": (math.cos, 1, 1),
    "exp": (math.exp, 1, 1),
    "floor": (math.floor, 1, 1),
    "log": (math.log, 1, 2),
    "max": (max, 2, 8),
    "min": (min, 2, 8),
    "pow": (math.pow, 2, 2),
    "sin": (math.sin, 1, 1),
    "sqrt": (math.sqrt, 1, 1),
    "tanh": (math.tanh, 1, 1),
}


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
        if len(text) > MAX_LENGTH:
            raise ExpressionError(f"an expression has at most {MAX_LENGTH} characters")
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ExpressionError(f"{text!r} is not a valid expression: {error}") from None
        self._term = _Compiler(text, names).term(tree.body, 0)

    def __call__(self, values: Values) -> float:
        """Return the value for the given numbers. Raises `ExpressionError` if there is none."""
        try:
            result = float(self._term(values))
        except (ArithmeticError, ValueError) as error:
            raise ExpressionError(f"{self.text!r} has no value at {_at(values)}: {error}") from None
        if not math.isfinite(result):
            raise ExpressionError(f"{self.text!r} is {result} at {_at(values)}")
        return result


def _at(values: Values) -> str:
    return ", ".join(f"{name} = {value:g}" for name, value in values.items())


class _Compiler:
    """Compile a syntax tree to nested functions; syntax that is not listed here is an error."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        self._text = text
        self._names = names

    def term(self, node: ast.expr, depth: int) -> _Term:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"{self._text!r} is nested more than {MAX_DEPTH} deep")
        inner = depth + 1
        match node:
            case ast.Constant(value=bool() | int() | float() as number):
                return self._constant(number)
            case ast.Name(id=name):
                return self._name(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return _negative(self.term(operand, inner))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.term(operand, inner)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return _negation(self.term(operand, inner))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _binary(_BINARY[type(op)], self.term(left, inner), self.term(right, inner))
            case ast.BoolOp(op=op, values=values):
                return _logical(isinstance(op, ast.And), [self.term(v, inner) for v in values])
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
                return _binary(_COMPARE[type(op)], self.term(left, inner), self.term(right, inner))
            case ast.IfExp(test=test, body=body, orelse=other):
                terms = [self.term(part, inner) for part in (test, body, other)]
                return _conditional(*terms)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._call(name, [self.term(a, inner) for a in arguments])
        raise ExpressionError(
            f"{self._text!r}: {ast.unparse(node)!r} is not allowed; an expression has numbers,"
            f" {', '.join(self._names)}, + - * / // % **, comparisons, `a if b else c`,"
            f" {', '.join(CONSTANTS)} and {', '.join(FUNCTIONS)}"
        )

    def _constant(self, number: float) -> _Term:
        try:
            value = float(number)
        except OverflowError:
            raise ExpressionError(f"{self._text!r} has a number that is too large") from None
        return lambda values: value

    def _name(self, name: str) -> _Term:
        if name in CONSTANTS:
            return self._constant(CONSTANTS[name])
        if name not in self._names:
            known = ", ".join([*self._names, *CONSTANTS])
            raise ExpressionError(f"{self._text!r}: {name!r} is unknown; there are {known}")
        return lambda values: values[name]

    def _call(self, name: str, arguments: Sequence[_Term]) -> _Term:
        if name not in FUNCTIONS:
            raise ExpressionError(
                f"{self._text!r}: function {name!r} is unknown; there are {', '.join(FUNCTIONS)}"
            )
        function, fewest, most = FUNCTIONS[name]
        if not fewest <= len(arguments) <= most:
            count = str(fewest) if fewest == most else f"{fewest} to {most}"
            raise ExpressionError(f"{self._text!r}: {name} takes {count} arguments")
        return lambda values: function(*(argument(values) for argument in arguments))


def _negative(term: _Term) -> _Term:
    return lambda values: -term(values)


def _negation(term: _Term) -> _Term:
    return lambda values: not term(values)


def _binary(function: Callable[[float, float], float], left: _Term, right: _Term) -> _Term:
    return lambda values: function(left(values), right(values))


def _logical(every: bool, terms: Sequence[_Term]) -> _Term:
    combine = all if every else any
    return lambda values: combine(term(values) for term in terms)


def _conditional(test: _Term, body: _Term, other: _Term) -> _Term:
    return lambda values: body(values) if test(values) else other(values)
