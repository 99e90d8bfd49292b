"""Lines are broken between words and pairs, never inside one."""

import io
import shlex

import pytest

from trainer.files.layout import (
    aligned,
    columns_of,
    folded,
    folded_command,
    packed,
    pair_lines,
    size_of,
)


def test_pairs_that_are_too_long_go_on_below_the_same_head():
    values = {f"val/a_metric_with_a_long_name_{number}": 0.123456 for number in range(5)}
    lines = pair_lines("epoch 1/3, step 20", values, "(0.9 s)")
    assert max(map(len, lines)) <= 100
    assert all(line.startswith("epoch 1/3, step 20: val/") for line in lines)
    told = [pair for line in lines for pair in line.partition(": ")[2].split(", ")]
    assert ", ".join(told) == ", ".join(f"{name} 0.1235" for name in values) + " (0.9 s)"


@pytest.mark.parametrize("length", range(55, 67))
def test_no_line_of_pairs_is_longer_than_the_width(length):
    lines = pair_lines("epoch 1/3", {"a" * length: 1.0}, "(0.9 s)", width=80)
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).count("(0.9 s)") == 1
    assert pair_lines("epoch 1/3", {}, "(0.9 s)") == ["epoch 1/3: (0.9 s)"]


@pytest.mark.parametrize("width", [20, 60, 80])
def test_prose_is_broken_between_words(width):
    text = "99,978 parameters; a sample takes 199 kFLOPs forward and 1.5 KiB of activations"
    lines = folded(text, width).split("\n")
    assert max(map(len, lines)) <= width
    assert " ".join(lines).split() == text.split()
    assert folded(text, None) == text
    table = " module      type         output\n (model)     MLP          N x 10"
    assert folded(table, width) == table


@pytest.mark.parametrize("width", [30, 60, 200])
def test_a_folded_command_is_the_same_command(width):
    command = "tensorboard --logdir_spec 'a run:/tmp/a run/tensorboard' --host 127.0.0.1"
    shown = folded_command(command, width)
    assert shlex.split(shown.replace("\\\n", "")) == shlex.split(command)
    assert ("\n" in shown) == (width < len(command))


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
