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


def houses(rows=40):
    drawn = np.random.default_rng(0)
    towns = ("Aachen", "Bonn", "Celle")
    return [
        f"{1 + i % 5},{50 + 10 * drawn.random():.3f},{towns[i % 3]},{100 + 3 * i}"
        for i in range(rows)
    ]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "houses.csv"
    path.write_text("\n".join([HEADER, *houses()]) + "\n")
    return path


def rows_of(path, split="train", **options):
    return table(str(path), split, **{"target": "price", **options})


def test_numbers_are_standardised_by_the_training_rows(file):
    sets = {split: rows_of(file, split) for split in SPLITS}
    rows = [row.split(",") for row in houses()]
    train = [rows[r] for r in sets["train"].rows]
    areas = np.array([float(row[1]) for row in train])
    prices = np.array([float(row[3]) for row in train])
    for data in sets.values():
        for (inputs, price), row in zip(data, data.rows, strict=True):
            _, area, town, wanted = rows[row]
            assert inputs.shape == (5,)
            expected = (float(area) - areas.mean()) / areas.std()
            assert inputs[1].item() == pytest.approx(expected, rel=1e-5)
            assert inputs[2:].tolist() == [town == t for t in ("Aachen", "Bonn", "Celle")]
            mean, std = data.target_scale
            assert price.item() * std + mean == pytest.approx(float(wanted), rel=1e-5)
    assert sets["train"].target_scale == (prices.mean(), prices.std())
    assert sorted(np.concatenate([d.rows for d in sets.values()])) == list(range(40))
    assert [len(d) for d in sets.values()] == [32, 4, 4]


def test_classes_are_names_and_splits_stratified(file):
    sets = [rows_of(file, split, **KINDS) for split in SPLITS]
    assert all(data.classes == ["Aachen", "Bonn", "Celle"] for data in sets)
    assert sets[1].classes[sets[1][0][1]] == houses()[sets[1].rows[0]].split(",")[2]
    assert all(set(data.targets.tolist()) == {0, 1, 2} for data in sets)
    rooms = rows_of(file, target="rooms", target_kind="class")
    assert rooms.classes == ["1", "2", "3", "4", "5"]


def test_a_folder_gives_its_splits(tmp_path):
    lines = houses()
    (tmp_path / "train.csv").write_text("\n".join([HEADER, *lines[:30]]))
    (tmp_path / "test.csv").write_text("\n".join([HEADER, *lines[30:], "1,55,Dover,7"]))
    train, val, test = (rows_of(tmp_path, split) for split in SPLITS)
    assert [len(data) for data in (train, val, test)] == [27, 3, 11]
    assert test[10][0][2:].tolist() == [0, 0, 0]  # a town that train does not know
    assert train.target_scale == test.target_scale
    assert rows_of(tmp_path, "val", val_fraction=0.0) is None


def test_parquet_and_new_rows_are_encoded_alike(file, tmp_path):
    train = rows_of(file)
    new = tmp_path / "new.csv"
    form = train.input_form()
    new.write_text("town,area,rooms\n" + "\n".join(",".join(r.split(",")[2::-1]) for r in houses()))
    rows = Table(read_columns(str(new)), form["features"], form["missing"], None)
    assert torch.equal(rows.inputs[torch.from_numpy(train.rows)], train.inputs)
    assert rows.path(3) == f"{new}:5"
    arrow = pytest.importorskip("pyarrow.csv")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.read_csv(file), file.with_suffix(".parquet"))
    other = rows_of(file.with_suffix(".parquet"))
    assert train.features == other.features
    assert torch.equal(train.inputs, other.inputs)
    assert torch.equal(train.targets, other.targets)
    assert other.path(0).endswith(f":{other.rows[0] + 1}")
    file.with_suffix(".parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(DataError, match=r"houses\.parquet: cannot be read as parquet"):
        rows_of(file.with_suffix(".parquet"))
    with pytest.raises(DataError, match=r"houses\.xlsx is none of"):
        rows_of(file.rename(file.with_suffix(".xlsx")))
    with pytest.raises(DataError, match="no such file"):
        rows_of(file)


def test_a_missing_value_becomes_the_mean_with_missing_mean(file):
    file.write_text(file.read_text().replace("Bonn,103", " ? ,103").replace("\n2,", "\nNA,", 1))
    with pytest.raises(DataError, match=r"houses\.csv: row 3, column 'rooms': no value"):
        rows_of(file)
    data = rows_of(file, missing="mean", val_fraction=0.0, test_fraction=0.0)
    assert data[1][0][0].item() == 0.0
    assert data[1][0][2:].tolist() == [0, 0, 0]


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


@pytest.mark.parametrize(
    ("name", "change", "options"),
    [
        pytest.param("t.csv", lambda t: t.replace(",", ";"), {}, id="semicolons"),
        pytest.param("t.csv", lambda t: t.replace(",", "\t"), {}, id="tabs"),
        pytest.param("t.csv", lambda t: t.replace(",", "|"), {}, id="bars"),
        pytest.param("t.tsv", lambda t: t, {}, id="commas in a .tsv"),
        pytest.param("t.csv", lambda t: t.replace(",", ":"), {"delimiter": ":"}, id="colons"),
        pytest.param(
            *("t.csv", lambda t: t.replace(",", ";").replace(".", ","), {"decimal": ","}),
            id="decimal comma",
        ),
        pytest.param("t.csv", lambda t: t.replace(",", " , "), {}, id="blanks around cells"),
        pytest.param("t.csv", lambda t: f"\n{t}\n\n  \n", {}, id="empty lines"),
        pytest.param("t.csv", lambda t: t.replace("\n", "\n\n"), {}, id="lines between"),
        pytest.param("t.csv", lambda t: t.replace("\n", "\r\n") + ",,,\n", {}, id="a sheet's end"),
        pytest.param("t.csv", lambda t: t.replace("\n", ",\n"), {}, id="a comma at the end"),
        pytest.param("T.CSV", lambda t: t, {}, id="capitals"),
        pytest.param("t.csv", lambda t: f"\ufeff{t}", {}, id="with a mark"),
    ],
)
def test_a_table_is_read_as_people_write_it(file, tmp_path, name, change, options):
    usual = rows_of(file)
    other = tmp_path / name
    other.write_text(change(file.read_text()), newline="")
    found = rows_of(other, **options)
    assert found.features == usual.features
    assert torch.equal(found.inputs, usual.inputs)
    assert torch.equal(found.targets, usual.targets)
    form = found.input_form()
    again = Table(read_columns(other, Dialect(**form["dialect"])), form["features"])
    assert torch.equal(again.inputs[torch.from_numpy(found.rows)], usual.inputs)


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".csv.gz", gzip.compress), (".CSV.bz2", bz2.compress), (".tsv.xz", lzma.compress)],
)
def test_a_packed_table_is_read(file, tmp_path, suffix, pack):
    packed = tmp_path / f"train{suffix}"
    packed.write_bytes(pack(file.read_bytes()))
    for path in (packed, tmp_path):  # by its name, or as the folder's split
        assert torch.equal(rows_of(path).inputs, rows_of(file).inputs)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"train{suffix}: cannot be read as .sv"):
        rows_of(packed)


@pytest.mark.parametrize(("encoding", "key"), [("cp1252", "cp1252"), ("utf-16", None)])
def test_the_encoding_of_a_table_is_read_or_named(file, encoding, key):
    file.write_text(file.read_text().replace("area", "fläche"), encoding=encoding)
    if key is not None:
        with pytest.raises(DataError, match=r"is not UTF-8.*data\.encoding=cp1252"):
            rows_of(file)
    assert [feature["name"] for feature in rows_of(file, encoding=key).features][1] == "fläche"
    with pytest.raises(DataError, match=r"data\.encoding=klingon"):
        rows_of(file, encoding="klingon")


def test_several_possible_delimiters_are_not_guessed(file):
    file.write_text(file.read_text().replace("area", "area|m").replace(",", ";"))
    with pytest.raises(DataError, match=r"data\.delimiter says which"):
        rows_of(file)
    assert len(rows_of(file, delimiter=";")) == 32


def numbered(text, name):
    head, *rows = text.splitlines()
    return "\n".join([f"{name},{head}", *(f"{n * 7 % 40},{row}" for n, row in enumerate(rows))])


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_row_numbers_without_a_name_are_no_feature(file, caplog, name):
    usual = rows_of(file)
    file.write_text(numbered(file.read_text(), name))
    with caplog.at_level(logging.INFO):
        found = rows_of(file)
    assert "is left out: it holds row numbers" in caplog.text
    assert torch.equal(found.inputs, usual.inputs)
    named = rows_of(file, features=[name, "area"])
    assert named.inputs.shape[1] == 2
    assert rows_of(file, statistics=named.statistics()).features != named.features
    every = rows_of(file, features=[name, "rooms", "area", "town"])
    assert rows_of(file, statistics=every.statistics()).features == every.features


@pytest.mark.parametrize("row", [0, 7, 39], ids=str)
@pytest.mark.parametrize("odd", ["1,000.5", "12%", "n.v.", "3,5", "1_000"])
def test_a_column_is_what_most_of_its_rows_are(file, row, odd):
    head, *rows = file.read_text().splitlines()
    cells = rows[row].split(",")
    cells[1] = f'"{odd}"'
    rows[row] = ",".join(cells)
    file.write_text("\n".join([head, *rows]))
    with pytest.raises(DataError, match=rf"row {row + 2}, column 'area': '{odd}' is not a finite"):
        rows_of(file)
    # A column of names, one of which is a number, stays one.
    cells[1], cells[2] = "1", "5"
    rows[row] = ",".join(cells)
    file.write_text("\n".join([head, *rows]))
    known = rows_of(file, val_fraction=0.0, test_fraction=0.0).features[2]["categories"]
    assert known == ["5", "Aachen", "Bonn", "Celle"]


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
    path.write_text("size;price\n" + "".join(f"{spelled.format(i)};{i}\n" for i in range(40)))
    with pytest.raises(DataError, match=r"row 2, column 'size'.*data\.decimal.*data\.categorical"):
        rows_of(path)
    assert len(rows_of(path, categorical=["size"]).features[0]["categories"]) == 32
    if options is not None:
        data = rows_of(path, **options)
        values = wanted + data.rows
        assert data.features[0]["mean"] == pytest.approx(values.mean())
        assert data.features[0]["std"] == pytest.approx(values.std())


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
    head, *rows = file.read_text().splitlines()
    _, *others = rows[0].split(",")
    file.write_text("\n".join([head, ",".join([mark, *others]), *rows[1:]]))
    with pytest.raises(DataError, match=r"row 2, column 'rooms': no value"):
        rows_of(file)
    data = rows_of(file, missing="mean", val_fraction=0.0, test_fraction=0.0)
    rest = np.array([float(row.split(",")[0]) for row in rows[1:]])
    assert data.features[0]["mean"] == pytest.approx(rest.mean())
    assert data.inputs[0, 0] == 0


def test_folds_are_shared_out_of_what_test_leaves(file):
    folds = [rows_of(file, "val", fold=k, folds=3).rows for k in range(3)]
    left = {row for split in ("train", "val") for row in rows_of(file, split).rows}
    assert sorted(np.concatenate(folds)) == sorted(left)
    assert sorted([*rows_of(file, "train", fold=1, folds=3).rows, *folds[1]]) == sorted(left)
    assert (rows_of(file, "test", fold=1, folds=3).rows == rows_of(file, "test").rows).all()


@pytest.mark.parametrize("target", [{}, KINDS], ids=["number", "class"])
def test_statistics_of_a_checkpoint_take_the_place_of_the_rows(file, target):
    before = rows_of(file, **target)
    kept = before.statistics()
    row = {tuple(inputs.tolist()) for inputs, _ in before}
    # More rows, and larger ones: by their own statistics each row would be encoded anew.
    file.write_text(file.read_text() + "".join(f"9,{900 + i},Bonn,{i}\n" for i in range(40)))
    anew = rows_of(file, **target)
    alike = rows_of(file, **target, statistics=kept)
    assert anew.statistics() != kept
    assert alike.statistics() == kept
    assert {tuple(inputs.tolist()) for inputs, _ in alike} & row
    assert not {tuple(inputs.tolist()) for inputs, _ in anew} & row
    assert fingerprint(alike) != fingerprint(before)
    others = rows_of(file, **target, features=["area"], statistics=kept)
    assert [feature["name"] for feature in others.statistics()["features"]] == ["area"]


def test_a_checkpoint_keeps_and_compares_what_a_table_was(file):
    then = data_facts({"train": rows_of(file), "val": rows_of(file, "val"), "test": None})
    assert then.keys() == {"statistics", "fingerprints"}
    assert changed_data(then, data_facts({"train": rows_of(file)})) == []
    assert data_facts({"train": [1, 2]}) == {}
    file.write_text(file.read_text().replace("Bonn", "Celle"))
    (line,) = changed_data(then, data_facts({"train": rows_of(file)}))
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


def blocks(root, split="train", **options):
    return token_blocks(str(root), split, **{"context": 16, "num_classes": 500, **options})


def test_blocks_follow_each_other(folder):
    data = blocks(folder)
    assert len(data) == (1000 - 1) // 16
    content = pickle.dumps(data)
    assert len(content) < 1500  # a worker maps the file itself
    for index in (0, 7, len(data) - 1):
        tokens, following = pickle.loads(content)[index]
        first = index * 16
        assert tokens.tolist() == NUMBERS[first : first + 16].tolist()
        assert following.tolist() == NUMBERS[first + 1 : first + 17].tolist()
    tokens, following = data.batch([3, 0])
    assert torch.equal(tokens, torch.stack([data[3][0], data[0][0]]))
    assert torch.equal(following, torch.stack([data[3][1], data[0][1]]))
    assert tokens.dtype == torch.int64
    with pytest.raises(IndexError):
        data[len(data)]
    np.save(folder / "a.npy", NUMBERS)
    NUMBERS.astype("<u4").tofile(folder / "a.bin")
    for name in ("a.npy", "a.bin"):
        other = blocks(folder / name, dtype="uint32", val_fraction=0.0)
        assert all(torch.equal(a, b) for a, b in zip(other[5], data[5], strict=True))
    before = data.fingerprint()
    assert blocks(folder).fingerprint() == before
    NUMBERS[::-1].tofile(folder / "train.bin")
    assert blocks(folder).fingerprint() != before


def test_text_is_read_by_bytes(folder, tmp_path):
    text = ("Größe: naïve café. " * 20).encode()
    (tmp_path / "book.txt").write_bytes(text)
    train, val, test = (
        blocks(tmp_path / "book.txt", split, num_classes=None, val_fraction=0.25)
        for split in SPLITS
    )
    assert bytes(train[0][0].tolist()) == text[:16]
    assert len(train.classes) == train.num_classes == 256
    boundary = len(text) - round(len(text) * 0.25)
    assert bytes(val[0][0].tolist()) == text[boundary : boundary + 16]
    assert test is None
    assert train.input_form() == {"kind": "text", "encoding": "bytes", "context": 16}
    assert blocks(folder).input_form() == {"kind": "array"}


def test_a_shift_is_the_epochs_own_and_overlaps_nothing(folder):
    data = blocks(folder, shift=True)
    starts = {}
    for epoch in range(40):
        data.set_epoch(epoch)
        seen = torch.cat([data[index][0] for index in range(len(data))]).tolist()
        offset = next(o for o in range(16) if NUMBERS[o] == seen[0])
        assert seen == NUMBERS[offset : offset + len(seen)].tolist()
        starts[epoch] = offset
    assert len(set(starts.values())) > 10
    for workers in (0, 2):  # the loader tells the epoch, wherever samples are read
        found = batches(blocks(folder, shift=True), epoch=17, workers=workers)
        assert found[0][0][0] == NUMBERS[starts[17]]


@pytest.mark.parametrize("shift", [False, True])
def test_folds_are_contiguous_and_share_out_the_file(folder, shift):
    held = 0
    for fold in range(3):
        train = blocks(folder, shift=shift, fold=fold, folds=3)
        val = blocks(folder, "val", fold=fold, folds=3)
        train.set_epoch(5)
        first = fold * 1000 // 3
        last = (fold + 1) * 1000 // 3
        held += val.batch(range(len(val)))[0].numel()
        assert val[0][0][0] == NUMBERS[first]
        starts = [train._first(index) for index in range(len(train))]
        used = {place for start in starts for place in range(start, start + 17)}
        assert len(train) >= 38
        assert used.isdisjoint(range(first, last))  # what follows the last token of a block, too
        assert all(b - a >= 16 for a, b in pairwise(starts))
        assert train.fingerprint() != blocks(folder, fold=(fold + 1) % 3, folds=3).fingerprint()
    assert held == 3 * 20 * 16


@pytest.mark.parametrize(
    "save",
    [
        pytest.param(lambda file: np.savez(file, a=NUMBERS), id="an archive"),
        pytest.param(lambda file: np.save(file, np.array([{}]), allow_pickle=True), id="objects"),
        pytest.param(lambda file: np.save(file, np.zeros(3, "i4,i4")), id="records"),
        pytest.param(lambda file: np.save(file, np.array(3)), id="a number"),
        pytest.param(lambda file: np.save(file, np.zeros(0, "u2")), id="nothing"),
        pytest.param(
            lambda file: file.write(b"\x93NUMPY\x01\x00v\x00{'descr'"), id="half a header"
        ),
        pytest.param(
            lambda file: np.lib.format.write_array_header_1_0(
                file, {"descr": "<u2", "fortran_order": False, "shape": (10**15,)}
            ),
            id="longer than the file",
        ),
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
        [rows_of(place, split) for split in ("train", "val", "test")]


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
