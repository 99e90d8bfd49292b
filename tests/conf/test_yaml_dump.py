"""A stored configuration composes to the very values it was stored with."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from conf.yaml_dump import dump
from conf.yaml_file import examine
from scripts.composition.trees import escape_reserved

TRICKY = [
    "no",
    "on",
    "010",
    "1:30",
    "1_000",
    "1e-3",
    ".5",
    "???",
    "null",
    "~",
    "",
    " x ",
    "=",
    "<<",
]
TRICKY += [
    "${a}",
    "\\${a}",
    "\\\\${a}",
    "${total_steps}",
    "2024-01-01",
    "a\nb",
    "\x85",
    "#x",
    "a: b",
]

texts = st.sampled_from(TRICKY) | st.text(max_size=8) | st.text("\\${}ab:", max_size=6)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
names = st.sampled_from(["a", "b", "no", "1", "1e3"]) | st.text("abc", min_size=1, max_size=3)
trees = st.dictionaries(
    names,
    st.recursive(leaves, lambda c: st.lists(c, max_size=3) | st.dictionaries(names, c, max_size=3)),
    max_size=4,
)


def read(text: str) -> Any:
    """Read YAML as a composition does: with Hydra's rules, interpolations resolved."""
    raw = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() != "{}" else {}
    return OmegaConf.to_container(OmegaConf.create(escape_reserved(raw)), resolve=True)


@settings(max_examples=200, deadline=None)
@given(trees)
def test_what_is_written_is_read_back(tree: dict[str, Any]) -> None:
    assert read(dump(tree)) == tree


@pytest.mark.parametrize("text", [pytest.param(text, id=repr(text)) for text in TRICKY])
def test_a_tricky_text_is_read_back_and_raises_no_eyebrow(tmp_path: Path, text: str) -> None:
    tree = {"a": text, "b": [text]}
    assert read(dump(tree)) == tree
    path = tmp_path / "f.yaml"
    path.write_text(dump(tree), encoding="utf-8")
    assert examine(path, "f").problems == []
