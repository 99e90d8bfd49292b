"""The table of `predict`: names of classes and files are any text."""

import csv
import io
import json

import pyarrow.parquet
import pytest

from regimen.scripts.runs.answers import _write_table

ROWS = [
    {"file": "a\udcff.png", "prediction": "\ud800", "probability": 0.5},
    {"file": "b.png", "prediction": ["x", "\udfff"], "probability": [0.25, 0.75]},
]
COLUMNS = ["file", "prediction", "probability"]


def written(suffix, rows):
    file = io.BytesIO()
    _write_table(file, suffix, COLUMNS, rows)
    return file.getvalue()


@pytest.mark.parametrize("row", ROWS, ids=["a text", "a list"])
def test_names_may_hold_lone_surrogates(row):
    table = [*csv.DictReader(io.StringIO(written(".csv", [row]).decode("utf-8", "replace")))]
    assert len(table) == 1
    assert table[0].keys() == set(COLUMNS)
    assert json.loads(written(".jsonl", [row])) == row
    (found,) = pyarrow.parquet.read_table(io.BytesIO(written(".parquet", [row]))).to_pylist()
    assert found["probability"] == row["probability"]
    assert "\\ud" in str(found).replace("\\\\", "\\")


def test_the_bytes_of_a_files_name_stay_in_csv():
    assert (
        written(".csv", [ROWS[0] | {"prediction": "cat"}])
        .splitlines()[1]
        .startswith(b"a\xff.png,cat,")
    )
