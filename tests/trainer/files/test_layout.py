"""Lines and tables that fit."""

import io

import pytest

from trainer.files.layout import (
    aligned,
    columns_of,
    packed,
    size_of,
)


def test_an_item_longer_than_a_line_has_its_own_and_a_file_has_no_width():
    assert packed(["a", "b" * 20, "c", "d"], 10, ", ") == ["a", "b" * 20, "c, d"]
    assert columns_of(io.StringIO()) is None
    assert size_of(io.StringIO()) == (80, 24)


def test_a_table_with_room_has_one_line_a_row():
    assert aligned([["job", "lr"], ["0", "0.01"]], 80) == ["job  lr", "0    0.01"]


@pytest.mark.parametrize("columns", [1, 4, 40])
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_table_fits_and_no_cell_is_cut(columns, width):
    names = [f"{'key' * 5}{i}" for i in range(columns)]
    rows = [["job", "status", *names, "val/accuracy", "seconds"]]
    rows += [[str(i), "finished", *["value" * 9] * columns, "0.1234", "10.1"] for i in range(2)]
    lines = aligned(rows, width, last=2)
    assert max(map(len, lines)) <= width
    firsts = [line.split() for line in lines if not line.startswith(" ")]
    assert [words[0] for words in firsts] == ["job", "0", "1"]
    assert all(words[-2:] == ["0.1234", "10.1"] for words in firsts[1:])
    words = " ".join(lines).replace(",", " ").split()
    assert words.count("value" * 9) == 2 * columns
    assert set(names) <= set(words)
