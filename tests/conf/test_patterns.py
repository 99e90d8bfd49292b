"""Patterns of a configuration end: those that Python's matcher could try for ever are refused."""

import re

import pytest

from regimen.conf.errors import ConfigError
from regimen.conf.patterns import Pattern

NAMES = ["a" * 60 + ".", "a" * 30 + "c" * 30, "layers.0.attn.q_proj.weight", "blocks.11.norm1.bias"]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(r"(([\w.]+)+)+!", id="repeats in repeats"),
        pytest.param(r"(a|a)*b", id="alternatives in a repeat"),
        pytest.param(r"(a|ab|b)*c", id="overlapping ones"),
        pytest.param(r"(a?){40}a{40}", id="options in a counted repeat"),
        pytest.param("a?" * 40 + "a" * 40, id="options in a row"),
        pytest.param(".*" * 8 + "b", id="repeats in a row"),
        pytest.param(r"(?:(?:){65000}){65000}", id="rounds of nothing"),
        pytest.param(r"(?!(a+)+b)c", id="in an assertion"),
        pytest.param(r"(?>(a+)+)b", id="in an atomic group"),
        pytest.param(r"(c)?(?(1)(a+)+b|(a+)+b)", id="in a condition"),
        pytest.param(r"(?i:(A+)+)b", id="in a group with flags"),
        pytest.param(r"((.*)*)*b", id="three deep"),
        pytest.param("(" * 5000, id="5,000 brackets"),
        pytest.param("a{99999999999999}", id="a count beyond Python's"),
        pytest.param("x" * 100_000, id="very long"),
        pytest.param("(", id="no expression"),
        pytest.param(r"\8", id="no such group"),
    ],
)
def test_a_pattern_without_end_is_refused_at_once(text):
    with pytest.raises(ConfigError) as caught:
        Pattern(text)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text",
    [
        "bias$",
        r"^blocks\.(\d+)\.",
        r"(^|\.)(head|heads|fc|classifier)(\.|$)",
        ".*",
        r".*\.attn\..*(q|k|v)_proj.*weight",
        "(.*norm.*|.*bias.*)",
        r"^(?!head).*\.weight$",
        r"(\w+\.)*bias",
        r"(layers\.\d+\.)+weight",
        r".*attn.*q.*weight.*",
        r"(layers?|blocks?)\.\d+\.",
        r"(\w+\.){2}\w",
        "(?:a|b)*c",
        "(?i:NORM)",
        r"[\w.]+$",
    ],
)
def test_a_usual_pattern_finds_what_re_finds(text):
    pattern = Pattern(text)
    for name in NAMES:
        assert str(pattern.search(name)) == str(re.search(text, name))
    assert pattern.groups == re.compile(text).groups


def test_a_name_that_is_too_long_for_a_pattern_is_refused():
    pattern = Pattern(".*.*b")
    assert pattern.search("a" * 60) is None
    with pytest.raises(ConfigError, match="a name of 1000 letters"):
        pattern.search("a" * 1000)
