"""Interpolations that lead nowhere, back, or too far; those that are filled in later."""

import time
from typing import Any

import pytest

from conf.interpolation import Interpolations, fill


def found(raw: dict[str, Any]) -> str:
    return " ".join(map(str, Interpolations(raw).problems))


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        pytest.param({"a": "${b}", "b": {"c": "${a}"}}, "a -> b -> b.c -> a", id="loop"),
        pytest.param({"a": "x${a}"}, "a -> a", id="itself"),
        pytest.param({"a": "${.b}", "b": "${.a}"}, "a -> b -> a", id="relative-loop"),
        pytest.param({"a": {"b": "${a}"}}, "back to itself", id="ancestor"),
        pytest.param({"a": "${oc.select:b}", "b": "${a}"}, "back to itself", id="through-select"),
        pytest.param({"a": "${data.sise}", "data": {"size": 1}}, "${data.size}?", id="misspelt"),
        pytest.param({"a": "${b[2]}", "b": [1]}, "refers to nothing", id="beyond-a-list"),
        pytest.param({"a": "${shell:ls}"}, "not available", id="resolver"),
        pytest.param({"a": "${hydra:runtime.cwd}"}, "not available", id="hydra"),
        pytest.param({"a": "${${b}}", "b": "a"}, "refer to anything", id="computed"),
    ],
)
def test_a_fault_is_named(raw: dict[str, Any], text: str) -> None:
    assert text in found(raw)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param({"a": "${b.c}", "b": {"c": 1}}, id="absolute"),
        pytest.param({"m": {"a": "${.b}", "b": "${..n}"}, "n": 3}, id="relative"),
        pytest.param({"a": "${b[0]}/${b.1}", "b": [1, 2]}, id="items"),
        pytest.param({"a": "${oc.env:HOME}${oc.env:X,${b}}", "b": 1}, id="environment"),
        pytest.param({"a": "${oc.select:nothing,3}"}, id="with-a-default"),
        pytest.param({"a": "${total_steps}", "b": "0.5 * ${steps_per_epoch}"}, id="reserved"),
        pytest.param({"a": "\\${nothing}"}, id="escaped"),
        pytest.param({"a": "${c.${k}}", "c": {"x": 1}, "k": "x"}, id="computed-part"),
        pytest.param({"a": "${b}", "b": {"c": 1}, "d": "${a.c}"}, id="through-another"),
    ],
)
def test_what_is_fine(raw: dict[str, Any]) -> None:
    assert found(raw) == ""


def test_interpolations_that_multiply_are_refused_at_once() -> None:
    bomb: dict[str, Any] = {f"k{i}": f"${{k{i + 1}}}" * 9 for i in range(50)}
    started = time.perf_counter()
    assert "write out to more than" in found({**bomb, "k50": "x"})
    assert time.perf_counter() - started < 1


def test_a_chain_without_end_is_refused() -> None:
    chain: dict[str, Any] = {f"k{i}": f"${{k{i + 1}}}" for i in range(5000)}
    assert "too many" in found({**chain, "k5000": 1})


VALUES = {"total_steps": 120, "steps_per_epoch": 10}


@pytest.mark.parametrize(
    ("node", "filled"),
    [
        pytest.param("${total_steps}", 120, id="alone-it-is-the-number"),
        pytest.param("0.3 * ${total_steps}", "0.3 * 120", id="within-text-its-digits"),
        pytest.param({"a": ["${steps_per_epoch}", 1.5, None]}, {"a": [10, 1.5, None]}, id="nested"),
        pytest.param("${total_step}", "${total_step}", id="another-name-stays"),
        pytest.param("\\d+${total_steps}", "\\d+120", id="backslashes-stay"),
    ],
)
def test_fill(node: object, filled: object) -> None:
    assert fill(node, VALUES) == filled


def test_a_name_without_a_value_stays_open() -> None:
    assert fill("${total_steps}", {"steps_per_epoch": 1}) == "${total_steps}"


def test_the_original_is_not_changed() -> None:
    node = {"a": ["${total_steps}"]}
    fill(node, VALUES)
    assert node == {"a": ["${total_steps}"]}
