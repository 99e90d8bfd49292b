"""Expressions: arithmetic and nothing else."""

import math

import pytest

from trainer.lr_schedulers.functions import MAX_LENGTH, Expression, ExpressionError

NAMES = ("step", "epoch", "total_steps")
VALUES = {"step": 7.0, "epoch": 2.0, "total_steps": 10.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("1", 1.0, id="number"),
        pytest.param(" 1 - step / total_steps ", 0.3, id="names"),
        pytest.param("0.5 * (1 + cos(pi * step / total_steps))", None, id="cosine"),
        pytest.param("-step + +epoch", -5.0, id="signs"),
        pytest.param("step // 2 + step % 4", 6.0, id="integer-division"),
        pytest.param("2 ** -epoch", 0.25, id="power"),
        pytest.param("1 if step < 5 else 0.1", 0.1, id="condition"),
        pytest.param("step >= 7 and epoch != 3", 1.0, id="logic"),
        pytest.param("not (step == 7 or epoch > 9)", 0.0, id="not"),
        pytest.param("min(step, 3, epoch) + max(1, 2) + abs(-4)", 8.0, id="functions"),
        pytest.param("floor(2.7) + ceil(2.2) + sqrt(4) + log(e) + log(8, 2)", 11.0, id="rounding"),
        pytest.param("exp(0) + tanh(0) + sin(0) + pow(2, 3)", 9.0, id="more-functions"),
        pytest.param("True + 1e-3", 1.001, id="true"),
        pytest.param("+".join(["1"] * 25), 25.0, id="long-sum"),
    ],
)
def test_an_expression_is_what_python_makes_of_it(text: str, expected: float | None) -> None:
    if expected is None:
        expected = 0.5 * (1 + math.cos(math.pi * 7 / 10))
    assert Expression(text, NAMES)(VALUES) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "not a valid expression", id="empty"),
        pytest.param("1 +", "not a valid expression", id="syntax"),
        pytest.param("step; step", "not a valid expression", id="statement"),
        pytest.param("lr * 2", "'lr' is unknown; there are step, epoch", id="name"),
        pytest.param("__import__('os').system('true')", "not allowed", id="import"),
        pytest.param("step.__class__", "not allowed", id="attribute"),
        pytest.param("[1][0]", "not allowed", id="subscript"),
        pytest.param("'a' * 3", "not allowed", id="text"),
        pytest.param("1j", "not allowed", id="complex"),
        pytest.param("None", "not allowed", id="none"),
        pytest.param("(lambda: 1)()", "not allowed", id="lambda"),
        pytest.param("[x for x in (1,)]", "not allowed", id="comprehension"),
        pytest.param("(y := 1)", "not allowed", id="assignment"),
        pytest.param("1 < step < 9", "not allowed", id="chain"),
        pytest.param("step @ step", "not allowed", id="matrix"),
        pytest.param("1 << 9999", "not allowed", id="shift"),
        pytest.param("f'{step}'", "not allowed", id="format"),
        pytest.param("max(*step)", "not allowed", id="star"),
        pytest.param("min(step, key=1)", "not allowed", id="keyword"),
        pytest.param("eval(1)", "function 'eval' is unknown", id="function"),
        pytest.param("cos(1, 2)", "cos takes 1 arguments", id="count"),
        pytest.param("min(1)", "min takes 2 to 8 arguments", id="too-few"),
        pytest.param("9" * 400, "too large", id="huge-number"),
        pytest.param("(" * 100 + "1" + ")" * 100, None, id="parentheses"),
        pytest.param("-" * 200 + "1", "nested more than", id="deep"),
        pytest.param("1" + "+1" * MAX_LENGTH, "at most", id="long"),
        pytest.param("\0", "not a valid expression", id="nul"),
    ],
)
def test_anything_else_is_refused(text: str, message: str | None) -> None:
    if message is None:  # Python itself may or may not refuse it, and takes no harm
        assert Expression(text, NAMES)(VALUES) == 1.0
        return
    with pytest.raises(ExpressionError, match=message):
        Expression(text, NAMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("1 / (step - 7)", "has no value at step = 7", id="zero-division"),
        pytest.param("log(0)", "has no value", id="domain"),
        pytest.param("9 ** 9 ** 9 ** 9", "has no value", id="overflow"),
        pytest.param("1e308 * 10", "is inf at", id="infinite"),
        pytest.param("1e308 * 10 - 1e308 * 10", "is nan at", id="nan"),
        pytest.param("(-8) ** 0.5", "has no value", id="complex-root"),
    ],
)
def test_an_expression_without_a_value_says_where(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        Expression(text, NAMES)(VALUES)
