"""Rows from Python are encoded as those of the file that a run was trained on."""

import math

import numpy as np
import pytest
import torch

from regimen.data.errors import DataError
from regimen.data.formats.table import Table, read_columns
from regimen.trainer.inference.rows import records_of, table_of

FEATURES = [
    {"name": "age", "categories": None, "mean": 40.0, "std": 10.0},
    {"name": "floor", "categories": ["1", "2"], "mean": 0.0, "std": 1.0},
    {"name": "kind", "categories": ["cat", "dog"], "mean": 0.0, "std": 1.0},
]
ROWS = [
    {"age": 30, "floor": 2, "kind": "dog", "target": 1},
    {"age": 52.5, "floor": 1, "kind": "cat", "target": 0},
]


class Frame:
    """What a DataFrame of pandas or Polars is here: named columns."""

    def __init__(self, columns):
        self.columns = list(columns)
        self._columns = columns

    def __getitem__(self, name):
        return self._columns[name]

    def to_numpy(self):
        return np.array(list(self._columns.values()), dtype=object).T


COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(ROWS, id="dicts"),
        pytest.param(tuple(ROWS), id="a tuple of dicts"),
        pytest.param(COLUMNS, id="columns"),
        pytest.param({name: np.array(column) for name, column in COLUMNS.items()}, id="arrays"),
        pytest.param(Frame(COLUMNS), id="a frame"),
        pytest.param(Frame({**COLUMNS, "floor": [2.0, 1.0]}), id="whole numbers as floats"),
    ],
)
def test_rows_are_encoded_as_those_of_a_file(tmp_path, given):
    file = tmp_path / "rows.csv"
    lines = [",".join(map(str, row.values())) for row in ROWS]
    file.write_text("\n".join([",".join(ROWS[0]), *lines]) + "\n")
    expected = Table(read_columns(file), FEATURES)
    found = table_of(records_of(given), FEATURES, "error", None)

    assert len(found) == len(expected)
    for number in range(len(expected)):
        assert torch.equal(found[number], expected[number])


def test_one_dict_is_one_row_and_other_things_are_no_rows():
    assert records_of(ROWS[0]) == [ROWS[0]]
    assert records_of(torch.zeros(2, 3)) is None
    assert records_of([torch.zeros(3)]) is None
    assert records_of(Frame({"age": []})) == []


@pytest.mark.parametrize("nothing", [None, math.nan, np.float32("nan"), ""])
def test_a_missing_value_is_treated_as_in_the_file(nothing):
    row = {**ROWS[0], "age": nothing}
    assert table_of([row], FEATURES, "mean", None)[0][0] == 0
    with pytest.raises(DataError, match="column 'age'"):
        table_of([row], FEATURES, "error", None)


def test_a_row_without_a_column_or_columns_of_two_lengths_are_refused():
    with pytest.raises(DataError, match="row 1 has no column 'kind'"):
        table_of([ROWS[0], {"age": 1, "floor": 1}], FEATURES, "mean", None)
    with pytest.raises(DataError, match="different lengths"):
        records_of({"age": [1, 2], "floor": [1]})
