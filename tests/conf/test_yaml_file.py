"""Files that are wrong before any value of theirs is read."""

import time
from pathlib import Path

import pytest

from conf.yaml_file import MAX_DEPTH, examine


def problems(tmp_path: Path, content: str | bytes) -> list[str]:
    path = tmp_path / "f.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [str(problem) for problem in examine(path, "f.yaml").problems]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        pytest.param("a: 1\na: 2\n", ("repeated", "f.yaml:2"), id="duplicate"),
        pytest.param("a: {b: 1, b: 2}\n", ("a.b", "repeated"), id="nested-duplicate"),
        pytest.param("a:\n\tb: 1\n", ("a tab", "f.yaml:2"), id="tab"),
        pytest.param("a: {b: 1\n", ("syntax", "f.yaml:"), id="unclosed"),
        pytest.param("a: no\n", ("no is read as false", "f.yaml:1"), id="no"),
        pytest.param("a: On\n", ("On is read as true",), id="on"),
        pytest.param("x: 1\non: 3\n", ("key on", "f.yaml:2"), id="key"),
        pytest.param("a: [1, 010]\n", ("octal", "a.1"), id="octal"),
        pytest.param("a: 1:30\n", ("base 60",), id="sexagesimal"),
        pytest.param("a: 1_000\n", ("underscore",), id="underscore"),
        pytest.param("a: !!python/object/apply:os.system [x]\n", ("tag",), id="tag"),
        pytest.param("- 1\n", ("keys and values",), id="list"),
        pytest.param("just text\n", ("keys and values",), id="text"),
        pytest.param(b"\xff\xfea: 1", ("UTF-8",), id="bytes"),
        pytest.param(b"a: \x00", ("syntax",), id="nul"),
        pytest.param("a: &x [*x]\n", ("contains itself",), id="loop"),
        pytest.param("a: *x\n", ("syntax",), id="unknown-alias"),
        pytest.param("a: " + "[" * 100_000, ("nested deeper",), id="deep"),
        pytest.param("? [1, 2]\n: 3\n", ("must be a word",), id="composite-key"),
        pytest.param("a: '" + "x" * 1_100_000 + "'", ("longer than",), id="huge"),
    ],
)
def test_a_fault_is_named_with_its_line(
    tmp_path: Path, content: str | bytes, texts: tuple[str, ...]
) -> None:
    found = " ".join(problems(tmp_path, content))
    assert [text for text in texts if text not in found] == []


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("a: 'no'\nb: \"010\"\nc: '1:30'\n", id="quoted"),
        pytest.param("a: true\nb: 0\nc: 0.5\nd: 1e-3\ne: null\nf: 0x1f\n", id="plain"),
        pytest.param("a: &x {b: 1}\nc: *x\nd:\n  <<: *x\n", id="aliases"),
        pytest.param("", id="empty"),
        pytest.param("# only a comment\n", id="comment"),
        pytest.param("a: " + "[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2), id="nested"),
        pytest.param("größe: ümlaut ✓\n", id="unicode"),
    ],
)
def test_what_is_fine(tmp_path: Path, content: str) -> None:
    assert problems(tmp_path, content) == []


def test_aliases_that_multiply_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    started = time.perf_counter()
    found = problems(tmp_path, "\n".join(lines))
    assert time.perf_counter() - started < 2
    assert "aliases write out" in found[0]


def test_lines_and_package_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("# train x\n# @package _global_\na:\n  b: 1\n  c: [2,\n    3]\n")
    document = examine(path, "f.yaml")
    assert document.package == "_global_"
    assert document.lines == {"a": 3, "a.b": 4, "a.c": 5, "a.c.0": 5, "a.c.1": 6}


def test_a_file_that_is_gone_is_a_problem(tmp_path: Path) -> None:
    document = examine(tmp_path / "none.yaml", "none.yaml")
    assert not document.readable
    assert "cannot be read" in str(document.problems[0])
