"""JSON of strangers is read to a bounded depth, or refused as ValueError."""

import json

import pytest

from regimen.conf.json_text import MAX_DEPTH, plain_json


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"a": [1, 2.5, None, True, "x"]}, id="plain"),
        pytest.param(["[" * 100, {"{" * 100: '"[' * 100, '\\"[': 1}], id="brackets in texts"),
        pytest.param([[]] * 1000, id="many, not deep"),
        pytest.param({"a": "\ud800"}, id="a lone surrogate"),
    ],
)
def test_what_json_writes_is_read(value):
    assert plain_json(json.dumps(value)) == value
    assert plain_json(json.dumps(value).encode(), finite=True) == value


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 5000, id="open brackets"),
        pytest.param("[" * 5000 + "]" * 5000, id="brackets"),
        pytest.param('{"a":' * 5000 + "1" + "}" * 5000, id="braces"),
        pytest.param("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), id="a level too many"),
        pytest.param('["\\" + [[' * 5000, id="broken quotes"),
        pytest.param(b"\xff", id="no UTF-8"),
        pytest.param("1" * 100_000, id="a number without end"),
        pytest.param("", id="nothing"),
    ],
)
def test_what_is_too_deep_or_no_json_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011 (Python's own words for each)
        plain_json(text)


def test_numbers_that_are_not_finite_are_refused_where_asked():
    for text in ("NaN", "[1e999]", "-Infinity"):
        plain_json(text)
        with pytest.raises(ValueError, match="is no finite number"):
            plain_json(text, finite=True)
