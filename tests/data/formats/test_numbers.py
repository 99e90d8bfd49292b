"""Numbers in others' formats: tables with their encoding, and token files."""

import bz2
import gzip
import logging
import lzma
import os
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch

from regimen.data.errors import DataError
from regimen.data.formats.table import Dialect, Table, read_columns, table
from regimen.data.formats.tokens import token_blocks
from regimen.data.sources import fingerprint
from regimen.data.splits import class_names
from regimen.trainer.assembly.data import changed_data, data_facts
from toy_batches import batches

HEADER = "rooms,area,town,price"
KINDS = {"target": "town", "target_kind": "class"}
SPLITS = ("train", "val", "test")


TOWNS = ("Aachen", "Bonn", "Celle")


def houses(rows=40):
    random = np.random.default_rng(0)
    lines = []
    for i in range(rows):
        rooms = 1 + i % 5
        area = 50 + 10 * random.random()
        town = TOWNS[i % 3]
        price = 100 + 3 * i
        lines.append(f"{rooms},{area:.3f},{town},{price}")
    return lines


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "houses.csv"
    write_table(path, houses())
    return path


def write_table(path, rows, header=HEADER):
    text = "\n".join([header, *rows])
    path.write_text(text + "\n")


def rows_of(path, split="train", **options):
    options = {"target": "price", **options}
    return table(str(path), split, **options)


def without_splits(path, **options):
    """Read all rows of a file as those of training."""
    return rows_of(path, val_fraction=0.0, test_fraction=0.0, **options)


def names_of(features):
    return [feature["name"] for feature in features]


def inputs_by_row(data, rows):
    """Return the inputs of a table of all rows in the order of the split's rows."""
    return data.inputs[torch.from_numpy(rows)]


def test_numbers_are_standardised_by_the_training_rows(file):
    sets = {split: rows_of(file, split) for split in SPLITS}

    rows = [row.split(",") for row in houses()]
    train = [rows[number] for number in sets["train"].rows]
    areas = np.array([float(row[1]) for row in train])
    prices = np.array([float(row[3]) for row in train])
    for data in sets.values():
        mean, std = data.target_scale
        for (inputs, price), row in zip(data, data.rows, strict=True):
            _, area, town, expected_price = rows[row]
            expected_area = (float(area) - areas.mean()) / areas.std()
            expected_town = [town == name for name in TOWNS]
            read_price = price.item() * std + mean
            assert inputs.shape == (5,)
            assert inputs[1].item() == pytest.approx(expected_area, rel=1e-5)
            assert inputs[2:].tolist() == expected_town
            assert read_price == pytest.approx(float(expected_price), rel=1e-5)
    assert sets["train"].target_scale == (prices.mean(), prices.std())


def test_splits_share_the_rows_of_a_file_out(file):
    sets = [rows_of(file, split) for split in SPLITS]

    every_row = np.concatenate([data.rows for data in sets])
    assert sorted(every_row) == list(range(40))
    assert [len(data) for data in sets] == [32, 4, 4]


def test_classes_are_names_and_splits_stratified(file):
    sets = [rows_of(file, split, **KINDS) for split in SPLITS]

    for data in sets:
        assert data.classes == list(TOWNS)
        assert set(data.targets.tolist()) == {0, 1, 2}
    val = sets[1]
    _, label = val[0]
    line = houses()[val.rows[0]]
    assert val.classes[label] == line.split(",")[2]


def test_classes_may_be_numbers(file):
    rooms = rows_of(file, target="rooms", target_kind="class")

    assert rooms.classes == ["1", "2", "3", "4", "5"]


def test_a_folder_gives_its_splits(tmp_path):
    lines = houses()
    write_table(tmp_path / "train.csv", lines[:30])
    write_table(tmp_path / "test.csv", [*lines[30:], "1,55,Dover,7"])

    train = rows_of(tmp_path, "train")
    val = rows_of(tmp_path, "val")
    test = rows_of(tmp_path, "test")

    assert len(train) == 27
    assert len(val) == 3
    assert len(test) == 11
    inputs, _ = test[10]
    assert inputs[2:].tolist() == [0, 0, 0]  # a town that train does not know
    assert train.target_scale == test.target_scale
    assert rows_of(tmp_path, "val", val_fraction=0.0) is None


def test_new_rows_in_another_order_of_columns_are_encoded_alike(file, tmp_path):
    train = rows_of(file)
    form = train.input_form()
    new = tmp_path / "new.csv"
    turned = []
    for row in houses():
        rooms, area, town, _ = row.split(",")
        turned.append(f"{town},{area},{rooms}")
    write_table(new, turned, header="town,area,rooms")

    rows = Table(read_columns(str(new)), form["features"], form["missing"], None)

    assert torch.equal(inputs_by_row(rows, train.rows), train.inputs)
    assert rows.path(3) == f"{new}:5"


def test_a_parquet_file_is_read_as_csv_is(file):
    arrow = pytest.importorskip("pyarrow.csv")
    parquet = pytest.importorskip("pyarrow.parquet")
    train = rows_of(file)
    path = file.with_suffix(".parquet")
    parquet.write_table(arrow.read_csv(file), path)

    other = rows_of(path)

    assert train.features == other.features
    assert torch.equal(train.inputs, other.inputs)
    assert torch.equal(train.targets, other.targets)
    first_row = other.rows[0] + 1
    assert other.path(0).endswith(f":{first_row}")


def test_a_file_that_is_no_table_is_named(file):
    path = file.with_suffix(".parquet")
    path.write_bytes(b"PAR1 no table")
    with pytest.raises(DataError, match=r"houses\.parquet: cannot be read as parquet"):
        rows_of(path)
    with pytest.raises(DataError, match=r"houses\.xlsx is none of"):
        rows_of(file.rename(file.with_suffix(".xlsx")))
    with pytest.raises(DataError, match="no such file"):
        rows_of(file)


def test_a_missing_value_becomes_the_mean_with_missing_mean(file):
    text = file.read_text()
    text = text.replace("Bonn,103", " ? ,103")  # the town of the second row
    text = text.replace("\n2,", "\nNA,", 1)  # and its rooms
    file.write_text(text)
    with pytest.raises(DataError, match=r"houses\.csv: row 3, column 'rooms': no value"):
        rows_of(file)

    data = without_splits(file, missing="mean")

    inputs, _ = data[1]
    assert inputs[0].item() == 0.0
    assert inputs[2:].tolist() == [0, 0, 0]


ONE = f"{HEADER}\n1,2,B,3\n"


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (f"{ONE}1,two,B,3\n", {}, r"row 3, column 'area': 'two'"),
        (f"{HEADER}\n1,2,B\n", {}, "row 2 has 3 cells, the header 4"),
        (f"{HEADER}\n", {}, "has no rows"),
        (ONE, {"features": []}, "to predict from"),
        ("", {}, "needs a name of its own"),
        ("a,a\n1,2\n", {}, "needs a name of its own.*'a', 'a'"),
        (ONE, {"target": "prize"}, "no column 'prize'"),
        (ONE, {"features": ["room"]}, "data.features: .*'room'"),
        (ONE, {"categorical": ["tow"]}, "data.categorical: .*'tow'"),
        (ONE, {"channels": 4}, "set data.channels=3"),
        (f"{HEADER}\n1,inf,B,3\n", {}, "'inf' is not a finite number"),
        (f"{HEADER}\n1,2,B,\n", {}, "column 'price': no value"),
        (f'{HEADER}\n1,"2,B,3\n', {}, "cannot be read as csv"),
    ],
)
def test_a_mistake_is_named_by_row_and_column(tmp_path, text, options, words):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        rows_of(tmp_path / "t.csv", **options)


def replaced(old, new):
    return lambda text: text.replace(old, new)


def german(text):
    text = text.replace(",", ";")
    return text.replace(".", ",")


def unchanged(text):
    return text


def sheet(text):
    """End lines and the file as spreadsheets do."""
    return text.replace("\n", "\r\n") + ",,,\n"


@pytest.mark.parametrize(
    ("name", "change", "options"),
    [
        pytest.param("t.csv", replaced(",", ";"), {}, id="semicolons"),
        pytest.param("t.csv", replaced(",", "\t"), {}, id="tabs"),
        pytest.param("t.csv", replaced(",", "|"), {}, id="bars"),
        pytest.param("t.tsv", unchanged, {}, id="commas in a .tsv"),
        pytest.param("t.csv", replaced(",", ":"), {"delimiter": ":"}, id="colons"),
        pytest.param("t.csv", german, {"decimal": ","}, id="decimal comma"),
        pytest.param("t.csv", replaced(",", " , "), {}, id="blanks around cells"),
        pytest.param("t.csv", lambda text: f"\n{text}\n\n  \n", {}, id="empty lines"),
        pytest.param("t.csv", replaced("\n", "\n\n"), {}, id="lines between"),
        pytest.param("t.csv", sheet, {}, id="a sheet's end"),
        pytest.param("t.csv", replaced("\n", ",\n"), {}, id="a comma at the end"),
        pytest.param("T.CSV", unchanged, {}, id="capitals"),
        pytest.param("t.csv", lambda text: f"\ufeff{text}", {}, id="with a mark"),
    ],
)
def test_a_table_is_read_as_people_write_it(file, tmp_path, name, change, options):
    usual = rows_of(file)
    other = tmp_path / name
    text = change(file.read_text())
    other.write_text(text, newline="")

    found = rows_of(other, **options)

    assert found.features == usual.features
    assert torch.equal(found.inputs, usual.inputs)
    assert torch.equal(found.targets, usual.targets)
    # An answer reads a file by the form that the checkpoint keeps.
    form = found.input_form()
    dialect = Dialect(**form["dialect"])
    again = Table(read_columns(other, dialect), form["features"])
    assert torch.equal(inputs_by_row(again, found.rows), usual.inputs)


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".csv.gz", gzip.compress), (".CSV.bz2", bz2.compress), (".tsv.xz", lzma.compress)],
)
def test_a_packed_table_is_read(file, tmp_path, suffix, pack):
    packed = tmp_path / f"train{suffix}"
    packed.write_bytes(pack(file.read_bytes()))

    by_name = rows_of(packed)
    as_split_of_folder = rows_of(tmp_path)

    expected = rows_of(file).inputs
    assert torch.equal(by_name.inputs, expected)
    assert torch.equal(as_split_of_folder.inputs, expected)


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".csv.gz", gzip.compress), (".CSV.bz2", bz2.compress), (".tsv.xz", lzma.compress)],
)
def test_a_packed_table_that_is_cut_off_is_named(file, tmp_path, suffix, pack):
    packed = tmp_path / f"train{suffix}"
    whole = pack(file.read_bytes())
    packed.write_bytes(whole[:-20])

    with pytest.raises(DataError, match=rf"train{suffix}: cannot be read as .sv"):
        rows_of(packed)


@pytest.mark.parametrize(("encoding", "key"), [("cp1252", "cp1252"), ("utf-16", None)])
def test_the_encoding_of_a_table_is_read_or_named(file, encoding, key):
    text = file.read_text().replace("area", "fläche")
    file.write_text(text, encoding=encoding)

    if key is not None:
        with pytest.raises(DataError, match=r"is not UTF-8.*data\.encoding=cp1252"):
            rows_of(file)
    data = rows_of(file, encoding=key)

    assert names_of(data.features)[1] == "fläche"
    with pytest.raises(DataError, match=r"data\.encoding=klingon"):
        rows_of(file, encoding="klingon")


def test_several_possible_delimiters_are_not_guessed(file):
    text = file.read_text().replace("area", "area|m")
    file.write_text(text.replace(",", ";"))
    with pytest.raises(DataError, match=r"data\.delimiter says which"):
        rows_of(file)

    data = rows_of(file, delimiter=";")

    assert len(data) == 32


def numbered(text, name):
    """Put a column of row numbers in front, in an order of its own."""
    head, *rows = text.splitlines()
    lines = [f"{name},{head}"]
    for position, row in enumerate(rows):
        number = position * 7 % 40
        lines.append(f"{number},{row}")
    return "\n".join(lines)


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_row_numbers_without_a_name_are_no_feature(file, caplog, name):
    usual = rows_of(file)
    text = numbered(file.read_text(), name)
    file.write_text(text)

    with caplog.at_level(logging.INFO):
        found = rows_of(file)

    assert "is left out: it holds row numbers" in caplog.text
    assert torch.equal(found.inputs, usual.inputs)


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_row_numbers_are_a_feature_where_they_are_named(file, name):
    text = numbered(file.read_text(), name)
    file.write_text(text)

    named = rows_of(file, features=[name, "area"])
    every = rows_of(file, features=[name, "rooms", "area", "town"])

    assert named.inputs.shape[1] == 2
    resumed = rows_of(file, statistics=named.statistics())
    assert resumed.features != named.features
    resumed = rows_of(file, statistics=every.statistics())
    assert resumed.features == every.features


@pytest.mark.parametrize("row", [0, 7, 39], ids=str)
@pytest.mark.parametrize("odd", ["1,000.5", "12%", "n.v.", "3,5", "1_000"])
def test_a_column_is_what_most_of_its_rows_are(file, row, odd):
    head, *rows = file.read_text().splitlines()
    rooms, _, _, price = rows[row].split(",")

    rows[row] = f'{rooms},"{odd}",{TOWNS[row % 3]},{price}'
    write_table(file, rows, head)
    with pytest.raises(DataError, match=rf"row {row + 2}, column 'area': '{odd}' is not a finite"):
        rows_of(file)

    # A column of names, one of which is a number, stays one.
    rows[row] = f"{rooms},1,5,{price}"
    write_table(file, rows, head)
    town = without_splits(file).features[2]
    assert town["categories"] == ["5", "Aachen", "Bonn", "Celle"]


@pytest.mark.parametrize(
    ("spelled", "options", "wanted"),
    [
        pytest.param("1,{:03d}.5", {"thousands": ","}, 1000.5, id="thousands"),
        pytest.param("1.{:03d},5", {"thousands": ".", "decimal": ","}, 1000.5, id="german"),
        pytest.param("{:03d},5", {"decimal": ","}, 0.5, id="decimal"),
        pytest.param("{:d}%", None, 0.0, id="percent"),
        pytest.param("${:d}", None, 0.0, id="dollar"),
    ],
)
def test_a_column_of_numbers_in_another_spelling_is_no_column_of_names(
    tmp_path, spelled, options, wanted
):
    path = tmp_path / "t.csv"
    rows = [f"{spelled.format(i)};{i}" for i in range(40)]
    write_table(path, rows, header="size;price")

    with pytest.raises(DataError, match=r"row 2, column 'size'.*data\.decimal.*data\.categorical"):
        rows_of(path)

    size = rows_of(path, categorical=["size"]).features[0]
    assert len(size["categories"]) == 32
    if options is not None:
        data = rows_of(path, **options)
        size = data.features[0]
        values = wanted + data.rows
        assert size["mean"] == pytest.approx(values.mean())
        assert size["std"] == pytest.approx(values.std())


MARKS = [
    "",
    "NA",
    "N/A",
    "n/a",
    "NaN",
    "nan",
    "NULL",
    "null",
    "None",
    "<NA>",
    "#N/A",
    "?",
    "-",
    ".",
]


@pytest.mark.parametrize("mark", MARKS)
def test_the_usual_marks_of_a_missing_value_are_known(file, mark):
    head, first, *rows = file.read_text().splitlines()
    _, *others = first.split(",")
    marked = ",".join([mark, *others])
    write_table(file, [marked, *rows], head)
    with pytest.raises(DataError, match=r"row 2, column 'rooms': no value"):
        rows_of(file)

    data = without_splits(file, missing="mean")

    rooms = np.array([float(row.split(",")[0]) for row in rows])
    assert data.features[0]["mean"] == pytest.approx(rooms.mean())
    assert data.inputs[0, 0] == 0


def test_folds_are_shared_out_of_what_test_leaves(file):
    folds = [rows_of(file, "val", fold=k, folds=3).rows for k in range(3)]
    train = rows_of(file, "train", fold=1, folds=3).rows
    test = rows_of(file, "test", fold=1, folds=3).rows

    without_test = sorted([*rows_of(file, "train").rows, *rows_of(file, "val").rows])
    assert sorted(np.concatenate(folds)) == without_test
    assert sorted([*train, *folds[1]]) == without_test
    assert (test == rows_of(file, "test").rows).all()


@pytest.mark.parametrize("target", [{}, KINDS], ids=["number", "class"])
def test_statistics_of_a_checkpoint_take_the_place_of_the_rows(file, target):
    before = rows_of(file, **target)
    kept = before.statistics()
    # More rows, and larger ones: by their own statistics each row would be encoded anew.
    more = [f"9,{900 + i},Bonn,{i}\n" for i in range(40)]
    file.write_text(file.read_text() + "".join(more))

    anew = rows_of(file, **target)
    alike = rows_of(file, **target, statistics=kept)

    assert anew.statistics() != kept
    assert alike.statistics() == kept
    rows_before = encoded_rows(before)
    assert not rows_before.isdisjoint(encoded_rows(alike))
    assert rows_before.isdisjoint(encoded_rows(anew))
    assert fingerprint(alike) != fingerprint(before)


def encoded_rows(data):
    return {tuple(inputs.tolist()) for inputs, _ in data}


@pytest.mark.parametrize("target", [{}, KINDS], ids=["number", "class"])
def test_of_the_statistics_of_a_checkpoint_only_the_features_asked_for_are_taken(file, target):
    kept = rows_of(file, **target).statistics()

    others = rows_of(file, **target, features=["area"], statistics=kept)

    assert names_of(others.statistics()["features"]) == ["area"]


def test_a_checkpoint_keeps_and_compares_what_a_table_was(file):
    train = rows_of(file)
    val = rows_of(file, "val")
    then = data_facts({"train": train, "val": val, "test": None})
    assert then.keys() == {"statistics", "fingerprints"}
    now = data_facts({"train": train})
    assert changed_data(then, now) == []

    file.write_text(file.read_text().replace("Bonn", "Celle"))
    now = data_facts({"train": rows_of(file)})
    (line,) = changed_data(then, now)

    assert line.startswith("data.train: the rows are not those of the checkpoint; they are encoded")
    assert line.endswith("by other statistics than before")


def test_class_numbers_count_from_zero_and_are_bounded():
    assert class_names({"3", "0"}, None, 9, "here") == ["0", "1", "2", "3"]
    assert class_names({"b", "10", "a"}, None, 2, "here") == ["10", "a", "b"]
    with pytest.raises(DataError, match=r"here: class number 99999999999 is not below the number"):
        class_names({"0", "99999999999"}, None, 9, "here")


NUMBERS = np.arange(1000, dtype=np.uint16) * 7 % 500


@pytest.fixture
def folder(tmp_path):
    NUMBERS.tofile(tmp_path / "train.bin")
    NUMBERS[:100].tofile(tmp_path / "val.bin")
    return tmp_path


def test_a_list_has_no_facts_for_a_checkpoint():
    assert data_facts({"train": [1, 2]}) == {}


def blocks(root, split="train", **options):
    options = {"context": 16, "num_classes": 500, **options}
    return token_blocks(str(root), split, **options)


def test_blocks_follow_each_other(folder):
    data = blocks(folder)

    assert len(data) == (1000 - 1) // 16
    content = pickle.dumps(data)
    assert len(content) < 1500  # a worker maps the file itself
    for index in (0, 7, len(data) - 1):
        in_worker = pickle.loads(content)
        tokens, following = in_worker[index]
        first = index * 16
        assert tokens.tolist() == NUMBERS[first : first + 16].tolist()
        assert following.tolist() == NUMBERS[first + 1 : first + 17].tolist()
    with pytest.raises(IndexError):
        data[len(data)]


def test_a_batch_of_blocks_is_their_stack(folder):
    data = blocks(folder)

    tokens, following = data.batch([3, 0])

    assert torch.equal(tokens, torch.stack([data[3][0], data[0][0]]))
    assert torch.equal(following, torch.stack([data[3][1], data[0][1]]))
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize("name", ["a.npy", "a.bin"])
def test_tokens_are_read_from_other_forms_alike(folder, name):
    path = folder / name
    if name == "a.npy":
        np.save(path, NUMBERS)
    else:
        NUMBERS.astype("<u4").tofile(path)

    tokens, following = blocks(path, dtype="uint32", val_fraction=0.0)[5]

    expected_tokens, expected_following = blocks(folder)[5]
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(following, expected_following)


def test_the_fingerprint_of_blocks_is_that_of_their_tokens(folder):
    before = blocks(folder).fingerprint()
    assert blocks(folder).fingerprint() == before

    NUMBERS[::-1].tofile(folder / "train.bin")

    assert blocks(folder).fingerprint() != before


def test_text_is_read_by_bytes(tmp_path):
    text = ("Größe: naïve café. " * 20).encode()
    path = tmp_path / "book.txt"
    path.write_bytes(text)
    options = {"num_classes": None, "val_fraction": 0.25}

    train = blocks(path, "train", **options)
    val = blocks(path, "val", **options)
    test = blocks(path, "test", **options)

    boundary = len(text) - round(len(text) * 0.25)
    first_of_train, _ = train[0]
    first_of_val, _ = val[0]
    assert bytes(first_of_train.tolist()) == text[:16]
    assert bytes(first_of_val.tolist()) == text[boundary : boundary + 16]
    assert test is None
    assert len(train.classes) == train.num_classes == 256
    assert train.input_form() == {"kind": "text", "encoding": "bytes", "context": 16}


def test_token_files_without_a_text_are_arrays(folder):
    assert blocks(folder).input_form() == {"kind": "array"}


def test_a_shift_is_the_epochs_own_and_overlaps_nothing(folder):
    data = blocks(folder, shift=True)
    starts = {}
    for epoch in range(40):
        data.set_epoch(epoch)
        tokens = [data[index][0] for index in range(len(data))]
        seen = torch.cat(tokens).tolist()
        offset = NUMBERS[:16].tolist().index(seen[0])
        assert seen == NUMBERS[offset : offset + len(seen)].tolist()
        starts[epoch] = offset
    assert len(set(starts.values())) > 10

    for workers in (0, 2):  # the loader tells the epoch, wherever samples are read
        found = batches(blocks(folder, shift=True), epoch=17, workers=workers)
        first_tokens = found[0][0]
        assert first_tokens[0] == NUMBERS[starts[17]]


@pytest.mark.parametrize("shift", [False, True])
def test_folds_are_contiguous_and_share_out_the_file(folder, shift):
    held_out = 0
    for fold in range(3):
        train = blocks(folder, shift=shift, fold=fold, folds=3)
        val = blocks(folder, "val", fold=fold, folds=3)
        train.set_epoch(5)

        first = fold * 1000 // 3
        last = (fold + 1) * 1000 // 3
        tokens, _ = val.batch(range(len(val)))
        held_out += tokens.numel()
        assert tokens[0][0] == NUMBERS[first]

        assert len(train) >= 38
        starts = [train._first(index) for index in range(len(train))]
        for start in starts:
            # A block is 16 tokens, and what follows the last of them.
            used = range(start, start + 17)
            assert set(used).isdisjoint(range(first, last))
        for start, following in pairwise(starts):
            assert following - start >= 16

        other_fold = blocks(folder, fold=(fold + 1) % 3, folds=3)
        assert train.fingerprint() != other_fold.fingerprint()
    assert held_out == 3 * 20 * 16


def save_archive(file):
    np.savez(file, a=NUMBERS)


def save_objects(file):
    np.save(file, np.array([{}]), allow_pickle=True)


def save_half_a_header(file):
    file.write(b"\x93NUMPY\x01\x00v\x00{'descr'")


def save_header_of_a_longer_file(file):
    header = {"descr": "<u2", "fortran_order": False, "shape": (10**15,)}
    np.lib.format.write_array_header_1_0(file, header)


@pytest.mark.parametrize(
    "save",
    [
        pytest.param(save_archive, id="an archive"),
        pytest.param(save_objects, id="objects"),
        pytest.param(lambda file: np.save(file, np.zeros(3, "i4,i4")), id="records"),
        pytest.param(lambda file: np.save(file, np.array(3)), id="a number"),
        pytest.param(lambda file: np.save(file, np.zeros(0, "u2")), id="nothing"),
        pytest.param(save_half_a_header, id="half a header"),
        pytest.param(save_header_of_a_longer_file, id="longer than the file"),
    ],
)
def test_a_token_file_of_another_form_is_named(folder, save):
    (folder / "train.bin").unlink()
    with open(folder / "train.npy", "wb") as file:
        save(file)

    with pytest.raises(DataError, match=r"train\.npy"):
        blocks(folder).batch(range(62))


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (NUMBERS.tobytes(), {"num_classes": 200}, r"train\.bin: token \d+ is \d+.*200"),
        (NUMBERS.tobytes(), {"num_classes": None}, "vocabulary"),
        (NUMBERS.tobytes(), {"context": 2000}, "1000 tokens are too few"),
        (b"abc", {}, "3 bytes are no list"),
        (b"", {}, "0 bytes"),
        (None, {}, "no such file"),
        (np.zeros((3, 3)), {}, "not a row of integers"),
    ],
)
def test_a_mistake_in_a_token_file_is_named(folder, content, options, words):
    (folder / "train.bin").unlink()
    if isinstance(content, bytes):
        (folder / "train.bin").write_bytes(content)
    elif content is not None:
        np.save(folder / "train.npy", content)
    with pytest.raises(DataError, match=words):
        blocks(folder, **options).batch(range(62))


@pytest.mark.parametrize("name", ["data.csv", "data.csv.gz", "data.parquet", "data.tsv"])
def test_a_pipe_is_no_table(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}: is a pipe or device, not a file"):
        rows_of(tmp_path / name)


@pytest.mark.parametrize("name", ["train.csv", "val.csv", "test.csv"])
def test_a_pipe_among_the_files_of_splits_is_not_passed_over(file, tmp_path, name):
    place = tmp_path / "splits"
    place.mkdir()
    (place / "train.csv").write_text(file.read_text())
    (place / name).unlink(missing_ok=True)
    os.mkfifo(place / name)

    with pytest.raises(DataError, match=rf"{name}: is a pipe or device, not a file"):
        [rows_of(place, split) for split in SPLITS]


@pytest.mark.parametrize("name", ["train.bin", "train.npy", "val.bin"])
def test_a_pipe_is_no_token_file(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "train.npy":
        (folder / "train.bin").unlink()

    with pytest.raises(DataError, match=rf"{name}: is a pipe or device, not a file"):
        [blocks(folder, split) for split in ("train", "val")]


def test_a_device_is_no_token_file(tmp_path):
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"endless\.txt: is a pipe or device"):
        blocks(tmp_path / "endless.txt")
