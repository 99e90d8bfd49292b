"""YAML is read with the line of each key, and written so that it is read back as it was."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from regimen.conf.errors import ConfigError
from regimen.conf.yaml_file import MAX_DEPTH, dump, examine, plain_values
from regimen.scripts.composition.compose import escape_reserved


def problems(tmp_path, content):
    """Return what is said of a file with this content."""
    path = tmp_path / "f.yaml"
    if isinstance(content, str):
        content = content.encode()
    path.write_bytes(content)
    return [str(problem) for problem in examine(path, "f.yaml").problems]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xff\xfea: 1", "UTF-8"),
        (b"a: \x00", "syntax"),
        ("a: " + "[" * 500, "nested deeper"),
        ("a: !!bool x", "KeyError"),
        ('a: !!int ""', "IndexError"),
        ("a: '" + "x" * 1_100_000 + "'", "longer than"),
    ],
    ids=["no UTF-8", "a zero", "brackets", "a type", "no number", "a long text"],
)
def test_what_cannot_be_read_is_named(tmp_path, content, text):
    assert text in " ".join(problems(tmp_path, content))


LENGTH = 100_000


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param("a: " + "01" * LENGTH + "9z", "", id="digits, then a letter"),
        pytest.param("a: 0" + "1" * LENGTH + "9z", "", id="octal digits, then a letter"),
        pytest.param("a: 1." + "1" * LENGTH + "ex", "", id="an exponent that is none"),
        pytest.param("a: 1" + "_" * LENGTH + "x", "", id="underscores"),
        pytest.param("a: " + "1." * LENGTH, "", id="points"),
        pytest.param("a: " + "1" * LENGTH, "a number of more than 300", id="an integer"),
        pytest.param("a: 0x" + "f" * LENGTH, "a number of more than 300", id="hexadecimal"),
        pytest.param("a: 1" + ":1" * LENGTH, "a number of more than 300", id="base 60"),
        pytest.param(
            "a: 1" + ":1" * LENGTH + ".5", "a number of more than 300", id="to a fraction"
        ),
        pytest.param("? " + "1" * LENGTH + "\n: 1", "a key of more than 1000", id="a key"),
        pytest.param("\n" * LENGTH + "a: 1", "", id="empty lines"),
        pytest.param("#\n" * LENGTH + "a: 1", "", id="comments"),
        pytest.param("# @package" + " " * LENGTH + "\na: 1", "", id="blanks after @package"),
        pytest.param("a: !" + "x" * LENGTH + " 1", "is not allowed", id="a tag"),
        pytest.param("a: '" + "${" * 20_000 + "'", "nested deeper", id="open interpolations"),
        pytest.param("a: '${" + "[" * LENGTH + "}'", "nested deeper", id="brackets in one"),
        pytest.param("a: '" + "${b}" * 20_000 + "'", "20000 interpolations", id="interpolations"),
    ],
)
def test_reading_takes_a_time_linear_in_the_length(tmp_path, content, text):
    # Quadratic time would be minutes: the test's own limit. What is said of it is short.
    found = " ".join(problems(tmp_path, content))
    assert text in found if text else found == ""
    assert len(found) < 1000


DEEPEST = "[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("a: 'no'\nb: \"010\"\nc: '1:30'\n", id="texts"),
        pytest.param("a: true\nb: 0\nc: 0.5\nd: 1e-3\ne: null\nf: 0x1f\n", id="values"),
        pytest.param("a: &x {b: 1}\nc: *x\nd:\n  <<: *x\n", id="aliases"),
        pytest.param("", id="nothing"),
        pytest.param("# only a comment\n", id="a comment"),
        pytest.param(f"a: {DEEPEST}", id="as deep as may be"),
        pytest.param("größe: ümlaut ✓\n", id="other letters"),
    ],
)
def test_what_is_fine_passes(tmp_path, content):
    assert problems(tmp_path, content) == []


def test_a_list_is_read_where_one_is_expected():
    assert plain_values("- a=1\n- b=2\n", "overrides", lists=True) == ["a=1", "b=2"]
    with pytest.raises(ConfigError, match="expected keys and values"):
        plain_values("- a=1\n", "config")


def test_aliases_that_multiply_a_list_are_refused():
    lines = ["- &a [x, x]"]
    for before, name in itertools.pairwise("abcdefghijklmnopqrs"):
        lines.append(f"- &{name} [*{before}, *{before}]")

    with pytest.raises(ConfigError, match="aliases"):
        plain_values("\n".join(lines) + "\n", "overrides", lists=True)


def test_lines_and_package_are_noted(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text("# train x\n# @package _global_\na:\n  b: 1\n  c: [2,\n    3]\n")

    document = examine(path, "f.yaml")

    assert document.package == "_global_"
    assert document.lines == {"a": 3, "a.b": 4, "a.c": 5, "a.c.0": 5, "a.c.1": 6}


# fmt: off
TRICKY = [
    "no", "on", "010", "1:30", "1_000", "1e-3", ".5", "???", "null", "~", "", " x ", "=", "<<",
    "${a}", "\\${a}", "\\\\${a}", "${total_steps}", "2024-01-01", "a\nb", "\x85", "#x", "a: b",
]
# fmt: on


def test_a_file_that_is_not_there_cannot_be_read(tmp_path):
    document = examine(tmp_path / "none.yaml", "none.yaml")

    assert not document.readable
    assert "cannot be read" in str(document.problems[0])


texts = st.sampled_from(TRICKY) | st.text(max_size=8) | st.text("\\${}ab:", max_size=6)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
names = st.sampled_from(["a", "b", "no", "1", "1e3"]) | st.text("abc", min_size=1, max_size=3)


def nodes(children):
    return st.lists(children, max_size=3) | st.dictionaries(names, children, max_size=3)


trees = st.dictionaries(names, st.recursive(leaves, nodes), max_size=4)


def read(text):
    """Read YAML as a composition does: with Hydra's rules, interpolations resolved."""
    raw = {}
    if text.strip() != "{}":
        raw = OmegaConf.to_container(OmegaConf.create(text))
    config = OmegaConf.create(escape_reserved(raw))
    return OmegaConf.to_container(config, resolve=True)


@settings(max_examples=200, deadline=None)
@given(trees)
def test_what_is_written_is_read_back(tree):
    assert read(dump(tree)) == tree


def test_tricky_texts_are_read_back_and_raise_no_eyebrow(tmp_path):
    tree = {f"k{i}": [text, {"x": text}] for i, text in enumerate(TRICKY)}
    assert read(dump(tree)) == tree
    assert problems(tmp_path, dump(tree)) == []
