from pathlib import Path

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.formats.table import TableRows, read_columns, table
from data.splits import class_names
from trainer.assembly.data import changed_data, data_facts

HEADER = "rooms,area,town,price"


def houses(rows: int = 40) -> list[str]:
    drawn = np.random.default_rng(0)
    towns = ("Aachen", "Bonn", "Celle")
    return [
        f"{1 + i % 5},{50 + 10 * drawn.random():.3f},{towns[i % 3]},{100 + 3 * i}"
        for i in range(rows)
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "houses.csv"
    path.write_text("\n".join([HEADER, *houses()]) + "\n")
    return path


def opened(path: Path, split: str = "train", **options):
    return table(str(path), split, **{"target": "price", **options})


def test_numbers_are_standardised_by_the_training_rows(file: Path) -> None:
    sets = {split: opened(file, split) for split in ("train", "val", "test")}
    rows = [row.split(",") for row in houses()]
    train = [rows[r] for r in sets["train"].rows]
    areas = np.array([float(row[1]) for row in train])
    prices = np.array([float(row[3]) for row in train])
    for data in sets.values():
        for index, row in enumerate(data.rows):
            inputs, price = data[index]
            _, area, town, wanted = rows[row]
            assert inputs.shape == (5,)
            assert inputs[1].item() == pytest.approx(
                (float(area) - areas.mean()) / areas.std(), rel=1e-5
            )
            assert inputs[2:].tolist() == [town == t for t in ("Aachen", "Bonn", "Celle")]
            mean, std = data.target_scale
            assert price.item() * std + mean == pytest.approx(float(wanted), rel=1e-5)
    assert sets["train"].target_scale == (prices.mean(), prices.std())
    assert sorted(np.concatenate([d.rows for d in sets.values()])) == list(range(40))
    assert [len(d) for d in sets.values()] == [32, 4, 4]


def test_classes_are_names_and_splits_stratified(file: Path) -> None:
    sets = [opened(file, s, target="town", target_kind="class") for s in ("train", "val", "test")]
    assert all(data.classes == ["Aachen", "Bonn", "Celle"] for data in sets)
    town = houses()[sets[1].rows[0]].split(",")[2]
    assert sets[1].classes[sets[1][0][1]] == town
    assert all(set(data.targets.tolist()) == {0, 1, 2} for data in sets)
    rooms = opened(file, target="rooms", target_kind="class")
    assert rooms.classes == ["1", "2", "3", "4", "5"]


def test_a_folder_gives_its_splits(tmp_path: Path) -> None:
    lines = houses()
    (tmp_path / "train.csv").write_text("\n".join([HEADER, *lines[:30]]))
    (tmp_path / "test.csv").write_text("\n".join([HEADER, *lines[30:], "1,55,Dover,7"]))
    train, val, test = (opened(tmp_path, split) for split in ("train", "val", "test"))
    assert [len(data) for data in (train, val, test)] == [27, 3, 11]
    assert test[10][0][2:].tolist() == [0, 0, 0]  # a town that train does not know
    assert train.target_scale == test.target_scale
    assert opened(tmp_path, "val", val_fraction=0.0) is None


def test_parquet_holds_the_same(file: Path) -> None:
    arrow = pytest.importorskip("pyarrow.csv")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.read_csv(file), file.with_suffix(".parquet"))
    one, other = opened(file), opened(file.with_suffix(".parquet"))
    assert one.features == other.features
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.answers, other.answers)


def test_new_rows_are_encoded_alike(file: Path, tmp_path: Path) -> None:
    train = opened(file)
    form = train.input_form()
    new = tmp_path / "new.csv"
    new.write_text("town,area,rooms\n" + "\n".join(",".join(r.split(",")[2::-1]) for r in houses()))
    rows = TableRows(read_columns(str(new)), form["features"], form["missing"], None)
    assert torch.equal(rows.inputs[torch.from_numpy(train.rows)], train.inputs)
    assert rows.path(3) == f"{new}:5"


def test_a_missing_value_is_the_mean_where_that_is_wanted(file: Path) -> None:
    file.write_text(file.read_text().replace("Bonn,103", ",103").replace("\n2,", "\n,", 1))
    with pytest.raises(DataError, match=r"houses\.csv: row 3, column 'rooms': no value"):
        opened(file)
    data = opened(file, missing="mean", val_fraction=0.0, test_fraction=0.0)
    assert data[1][0][0].item() == 0.0
    assert data[1][0][2:].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        pytest.param(
            f"{HEADER}\n1,2,B,3\n1,two,B,3\n", {}, r"row 3, column 'area': 'two'", id="no"
        ),
        pytest.param(f"{HEADER}\n1,2,B\n", {}, "row 2 has 3 cells, the header 4", id="short"),
        pytest.param(f"{HEADER}\n", {}, "has no rows", id="empty"),
        pytest.param(f"{HEADER}\n1,2,B,3\n", {"features": []}, "to predict from", id="none"),
        pytest.param("", {}, "first row must name every column", id="nothing"),
        pytest.param("a,a\n1,2\n", {}, "two columns are named 'a'", id="twice"),
        pytest.param(f"{HEADER}\n1,2,B,3\n", {"target": "prize"}, "no column 'prize'", id="target"),
        pytest.param(
            f"{HEADER}\n1,2,B,3\n", {"features": ["room"]}, "data.features: .*'room'", id="feature"
        ),
        pytest.param(f"{HEADER}\n1,2,B,3\n", {"channels": 4}, "set data.channels=3", id="channels"),
        pytest.param(f"{HEADER}\n1,inf,B,3\n", {}, "'inf' is not a finite number", id="infinite"),
        pytest.param(f"{HEADER}\n1,2,B,\n", {}, "column 'price': no value", id="no-target"),
        pytest.param(f'{HEADER}\n1,"2,B,3\n', {}, "cannot be read as csv", id="quote"),
    ],
)
def test_a_mistake_is_named_by_row_and_column(
    tmp_path: Path, text: str, options: dict[str, object], words: str
) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        opened(tmp_path / "t.csv", **options)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.xlsx").write_text("x")
    with pytest.raises(DataError, match=r"t\.xlsx is none of"):
        opened(tmp_path / "t.xlsx")
    with pytest.raises(DataError, match="no such file"):
        opened(tmp_path / "absent.csv")


def test_folds_are_shared_out_of_what_test_leaves(file: Path) -> None:
    folds = [opened(file, "val", fold=k, folds=3).rows for k in range(3)]
    left = {row for split in ("train", "val") for row in opened(file, split).rows}
    assert sorted(np.concatenate(folds)) == sorted(left)
    assert sorted([*opened(file, "train", fold=1, folds=3).rows, *folds[1]]) == sorted(left)
    assert (opened(file, "test", fold=1, folds=3).rows == opened(file, "test").rows).all()


@pytest.mark.parametrize("kind", ["number", "class"])
def test_statistics_of_a_checkpoint_take_the_place_of_the_rows(file: Path, kind: str) -> None:
    target = {"target": "town", "target_kind": "class"} if kind == "class" else {}
    before = opened(file, **target)
    kept = before.statistics()
    row = {tuple(inputs.tolist()) for inputs, _ in before}
    # More rows, and larger ones: by their own statistics each row would be encoded anew.
    file.write_text(file.read_text() + "".join(f"9,{900 + i},Bonn,{i}\n" for i in range(40)))
    anew = opened(file, **target)
    alike = opened(file, **target, statistics=kept)
    assert anew.statistics() != kept
    assert alike.statistics() == kept
    assert {tuple(inputs.tolist()) for inputs, _ in alike} & row
    assert not {tuple(inputs.tolist()) for inputs, _ in anew} & row
    assert alike.fingerprint() != before.fingerprint()
    others = opened(file, **target, features=["area"], statistics=kept)
    assert [feature["name"] for feature in others.statistics()["features"]] == ["area"]


def test_a_checkpoint_keeps_and_compares_what_a_table_was(file: Path) -> None:
    then = data_facts({"train": opened(file), "val": opened(file, "val"), "test": None})
    assert then.keys() == {"statistics", "fingerprints"}
    assert changed_data(then, data_facts({"train": opened(file)})) == []
    assert data_facts({"train": [1, 2]}) == {}
    file.write_text(file.read_text().replace("Bonn", "Celle"))
    now = data_facts({"train": opened(file)})
    (line,) = changed_data(then, now)
    assert line.startswith("data.train: the rows are not those of the checkpoint; they are encoded")
    assert line.endswith("by other statistics than before")


def test_class_numbers_count_from_zero_and_are_bounded() -> None:
    assert class_names({"3", "0"}, None, 9, "here") == ["0", "1", "2", "3"]
    assert class_names({"b", "10", "a"}, None, 2, "here") == ["10", "a", "b"]
    with pytest.raises(DataError, match=r"here: class number 99999999999 is not below the number"):
        class_names({"0", "99999999999"}, None, 9, "here")
