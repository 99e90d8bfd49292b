"""The table of `predict`: names of classes and files are any text."""

import csv
import io
import json

import numpy as np
import pyarrow.parquet
import pytest
import torch

from regimen.scripts.cli.keys import Prediction
from regimen.scripts.runs.answers import PredictionWriter, _write_table
from regimen.trainer.inference.predictor import Answers, InferenceMetadata

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


def test_each_output_has_a_file_of_its_own_whatever_it_is_called(tmp_path):
    names = ["a/b", "a_b", "a%2Fb", "../x", "c\\d", "e\0f", "\ud800", "plain"]
    keys = Prediction(run="r", source="s", out=str(tmp_path / "t.csv"), save="logits")
    facts = InferenceMetadata(None, None, {"kind": "array"}, {"kind": "array"}, {}, {})
    found = PredictionWriter(keys, facts, [0, 1])
    values = {name: torch.full((2, 3), float(n)) for n, name in enumerate(names)}
    found.add(Answers([0, 1], values, values, {}))
    found.write({})
    written = {path.name: np.load(path) for path in tmp_path.glob("*.npy")}
    assert sorted(float(array[0, 0]) for array in written.values()) == list(range(len(names)))
    assert {"t.logits.plain.npy", "t.logits.a%2Fb.npy"} <= written.keys()
