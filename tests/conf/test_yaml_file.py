"""YAML is read with the line of each key, and written so that it is read back as it was."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from conf.yaml_file import MAX_DEPTH, dump, examine
from scripts.composition.compose import escape_reserved


def problems(tmp_path, content):
    path = tmp_path / "f.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [str(problem) for problem in examine(path, "f.yaml").problems]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xff\xfea: 1", "UTF-8"),
        (b"a: \x00", "syntax"),
        ("a: " + "[" * 500, "nested deeper"),
        ("a: '" + "x" * 1_100_000 + "'", "longer than"),
        ("a: 'no'\nb: \"010\"\nc: '1:30'\n", ""),
        ("a: true\nb: 0\nc: 0.5\nd: 1e-3\ne: null\nf: 0x1f\n", ""),
        ("a: &x {b: 1}\nc: *x\nd:\n  <<: *x\n", ""),
        ("", ""),
        ("# only a comment\n", ""),
        ("a: " + "[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2), ""),
        ("größe: ümlaut ✓\n", ""),
    ],
    ids=range(11),
)
def test_what_cannot_be_read_is_named_and_what_is_fine_passes(tmp_path, content, text):
    found = " ".join(problems(tmp_path, content))
    assert text in found if text else found == ""


def test_lines_and_package_are_noted(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text("# train x\n# @package _global_\na:\n  b: 1\n  c: [2,\n    3]\n")
    document = examine(path, "f.yaml")
    assert document.package == "_global_"
    assert document.lines == {"a": 3, "a.b": 4, "a.c": 5, "a.c.0": 5, "a.c.1": 6}
    document = examine(tmp_path / "none.yaml", "none.yaml")
    assert not document.readable
    assert "cannot be read" in str(document.problems[0])


# fmt: off
TRICKY = [
    "no", "on", "010", "1:30", "1_000", "1e-3", ".5", "???", "null", "~", "", " x ", "=", "<<",
    "${a}", "\\${a}", "\\\\${a}", "${total_steps}", "2024-01-01", "a\nb", "\x85", "#x", "a: b",
]
# fmt: on

texts = st.sampled_from(TRICKY) | st.text(max_size=8) | st.text("\\${}ab:", max_size=6)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
names = st.sampled_from(["a", "b", "no", "1", "1e3"]) | st.text("abc", min_size=1, max_size=3)
trees = st.dictionaries(
    names,
    st.recursive(leaves, lambda c: st.lists(c, max_size=3) | st.dictionaries(names, c, max_size=3)),
    max_size=4,
)


def read(text):
    """Read YAML as a composition does: with Hydra's rules, interpolations resolved."""
    raw = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() != "{}" else {}
    return OmegaConf.to_container(OmegaConf.create(escape_reserved(raw)), resolve=True)


@settings(max_examples=200, deadline=None)
@given(trees)
def test_what_is_written_is_read_back(tree):
    assert read(dump(tree)) == tree


def test_tricky_texts_are_read_back_and_raise_no_eyebrow(tmp_path):
    tree = {f"k{i}": [text, {"x": text}] for i, text in enumerate(TRICKY)}
    assert read(dump(tree)) == tree
    assert problems(tmp_path, dump(tree)) == []
