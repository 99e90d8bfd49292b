"""Texts with a label and words with tags: what is read, padded, numbered and refused."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra transformers is not installed")

import transformers

from regimen.conf.errors import ConfigError
from regimen.data.errors import ClassNamesError, DataError
from regimen.data.formats.new_texts import find_texts, given_texts
from regimen.data.formats.tagged_words import tagged_words
from regimen.data.formats.texts import texts
from regimen.data.loading.loader import Loader
from regimen.data.orders import Sequential
from regimen.data.samplers import UpdateSampler
from regimen.trainer.assembly.data import follow_names
from toy_texts import TAGS, make_tokenizer, pairs, sentences, write_jsonl, write_table

PAIR = ["premise", "hypothesis"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def batches(dataset, size, **options):
    sampler = UpdateSampler(Sequential(len(dataset)), batch_size=size)
    loader = Loader(dataset, sampler, seed=0, **options)
    return [micro.batch for micro in loader.epoch(0)]


def targets_of(rows):
    """Return the class numbers of pairs: 0 other, 1 same."""
    return [["other", "same"].index(row["label"]) for row in rows]


def test_pairs_are_what_the_tokenizer_makes_of_them(tokenizer, tmp_path):
    rows = pairs(10)
    write_table(tmp_path / "train.csv", rows)

    dataset = texts(str(tmp_path), "train", PAIR, tokenizer, length=64, val_fraction=0)

    assert dataset.classes == ["other", "same"]
    assert dataset.path(1) == f"{tmp_path}/train.csv:3"
    assert dataset.shown_of(1) == {name: rows[1][name] for name in PAIR}
    by_hand = make_tokenizer()
    for batch, start in zip(batches(dataset, 4), (0, 4, 8), strict=True):
        given = rows[start : start + 4]
        premises = [row["premise"] for row in given]
        hypotheses = [row["hypothesis"] for row in given]
        expected = by_hand(premises, hypotheses, padding="longest", return_tensors="pt")
        assert batch["labels"].tolist() == targets_of(given)
        for name in by_hand.model_input_names:
            assert torch.equal(batch[name], expected[name])


def test_a_task_of_glue_goes_by_its_name(tokenizer, tmp_path):
    write_table(tmp_path / "train.csv", pairs(10))
    write_table(tmp_path / "validation_matched.csv", pairs(4, 10))
    write_table(tmp_path / "validation_mismatched.csv", pairs(4, 20))
    for split, first, count in (("train", 0, 10), ("val", 10, 4)):
        by_name = texts(str(tmp_path), split, "mnli", tokenizer, length=64)
        shown = [by_name.shown_of(number) for number in range(len(by_name))]
        assert shown == [{name: row[name] for name in PAIR} for row in pairs(count, first)]


def write_labels(path, labels):
    write_jsonl(path, [{"text": "rain", "label": label} for label in labels])


def test_a_number_that_has_no_float32_is_refused(tokenizer, tmp_path):
    write_labels(tmp_path / "train.jsonl", [1e300, 2.0])
    with pytest.raises(DataError, match=r"train.jsonl:1: '1e\+300' of column 'label' is no finite"):
        texts(str(tmp_path), "train", "text", tokenizer, target_kind="number", length=64)


def test_a_column_may_have_the_name_of_a_task(tokenizer, tmp_path):
    rows = [{"rte": row["premise"], "label": row["label"]} for row in pairs(10)]
    write_table(tmp_path / "train.csv", rows)
    dataset = texts(str(tmp_path), "train", ["rte"], tokenizer, length=64, val_fraction=0)
    assert dataset.shown_of(0) == {"rte": rows[0]["rte"]}


def test_one_length_for_all(tokenizer, tmp_path):
    write_table(tmp_path / "train.csv", pairs(10))
    options = {"length": 64, "val_fraction": 0}

    longest = texts(str(tmp_path), "train", PAIR, tokenizer, padding="longest", **options)
    padded = texts(str(tmp_path), "train", PAIR, tokenizer, padding="max_length", **options)

    for number in range(10):
        expected = longest[number]
        found = padded[number]
        size = len(expected["input_ids"])
        assert torch.equal(found.pop("labels"), expected["labels"])
        for name, values in found.items():
            assert len(values) == 64
            assert torch.equal(values[:size], expected[name])
        assert not found["attention_mask"][size:].any()
    assert longest.fingerprint() != padded.fingerprint()


def assert_batches_equal_those_of(collator, dataset):
    ours = batches(dataset, 3)
    theirs = batches(dataset, 3, collate_fn=collator)
    for own, other in zip(ours, theirs, strict=True):
        assert own.keys() == other.keys()
        for name, values in own.items():
            assert torch.equal(values, other[name])


def test_a_collator_of_transformers_takes_texts(tokenizer, tmp_path):
    write_table(tmp_path / "train.csv", pairs(6))
    dataset = texts(str(tmp_path), "train", PAIR, tokenizer, length=64, val_fraction=0)

    collator = transformers.DataCollatorWithPadding(make_tokenizer())

    assert_batches_equal_those_of(collator, dataset)


def test_a_collator_of_transformers_takes_tagged_words(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "words.jsonl", sentences(6))
    dataset = tagged_words(str(path), "train", tokenizer, 64, val_fraction=0)

    collator = transformers.DataCollatorForTokenClassification(make_tokenizer())

    assert_batches_equal_those_of(collator, dataset)


def write_tsv(folder, rows):
    lines = ["\t".join(rows[0])]
    for row in rows:
        lines.append("\t".join(row.values()))
    (folder / "train.tsv").write_text("\n".join(lines))


def write_parquet(folder, rows):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, folder / "train.parquet")


def write_datasets(folder, rows):
    """Write the rows as `train`, and three without a label as `test`."""
    datasets = pytest.importorskip("datasets", reason="the extra huggingface is missing")
    features = datasets.Features(
        {
            "premise": datasets.Value("string"),
            "hypothesis": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["other", "same"]),
        }
    )
    numbered = []
    for row, target in zip(rows, targets_of(rows), strict=True):
        numbered.append({**row, "label": target})
    unlabelled = [{**row, "label": -1} for row in rows[:3]]
    train = datasets.Dataset.from_list(numbered, features=features)
    test = datasets.Dataset.from_list(unlabelled, features=features)
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(folder)


WRITERS = {
    "csv": lambda folder, rows: write_table(folder / "train.csv", rows),
    "tsv": write_tsv,
    "jsonl": lambda folder, rows: write_jsonl(folder / "train.jsonl", rows),
    "parquet": write_parquet,
    "saved": write_datasets,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_every_kind_of_file_holds_the_same(tokenizer, tmp_path, write):
    rows = pairs(8)
    write(tmp_path, rows)

    dataset = texts(str(tmp_path), "train", PAIR, tokenizer, length=64, val_fraction=0)

    assert dataset.targets.tolist() == targets_of(rows)
    premises = [dataset.shown_of(number)["premise"] for number in range(8)]
    assert premises == [row["premise"] for row in rows]


def test_rows_of_datasets_without_a_label_are_left_out_of_the_loss(tokenizer, tmp_path):
    write_datasets(tmp_path, pairs(8))

    test = texts(str(tmp_path), "test", PAIR, tokenizer, length=64)

    assert test.targets.tolist() == [-100] * 3
    assert not test.has_labels
    assert test.path(2) == f"test of {tmp_path}:2"


@pytest.mark.parametrize("label", [-1, -1.0, None, "left out"])
@pytest.mark.parametrize("kind", ["class", "number"])
def test_a_test_set_may_be_without_labels(tokenizer, tmp_path, kind, label):
    write_jsonl(tmp_path / "train.jsonl", [{"text": "rain", "label": 1}, {"text": "a", "label": 0}])
    rows = [{"text": "film", "label": label}] * 3
    if label == "left out":
        rows = [{"text": "film"}] * 3
    write_jsonl(tmp_path / "test.jsonl", rows)
    options = {"length": 64, "target_kind": kind}

    test = texts(str(tmp_path), "test", "text", tokenizer, **options)

    assert not test.has_labels
    assert test.targets.tolist() == [-100] * 3
    # Neither where no train says which classes there are.
    (tmp_path / "train.jsonl").unlink()
    assert not texts(str(tmp_path), "test", "text", tokenizer, **options).has_labels
    # One label among them is none by mistake.
    write_jsonl(tmp_path / "train.jsonl", [{"text": "rain", "label": 1}, {"text": "a", "label": 0}])
    write_jsonl(tmp_path / "test.jsonl", [*rows, {"text": "film", "label": 1}])
    if kind == "number" and label in (-1, -1.0):
        assert texts(str(tmp_path), "test", "text", tokenizer, **options).has_labels
    else:
        with pytest.raises(DataError, match=r"test\.jsonl:1: (no value|class '-1)"):
            texts(str(tmp_path), "test", "text", tokenizer, **options)


def test_minus_one_is_a_class_where_train_has_it(tokenizer, tmp_path):
    labels = [{"text": "rain", "label": 1}, {"text": "film", "label": -1}]
    write_jsonl(tmp_path / "train.jsonl", labels)
    write_jsonl(tmp_path / "test.jsonl", labels[1:])

    test = texts(str(tmp_path), "test", "text", tokenizer, length=64)

    assert test.has_labels
    assert test.targets.tolist() == [test.classes.index("-1")]


def test_val_is_cut_from_train(tokenizer, tmp_path):
    path = str(write_table(tmp_path / "all.csv", pairs(40)))

    train = texts(path, "train", PAIR, tokenizer, length=64)
    val = texts(path, "val", PAIR, tokenizer, length=64)
    test = texts(path, "test", PAIR, tokenizer, length=64)

    assert len(train) == 36
    assert len(val) == 4
    assert set(train.names).isdisjoint(val.names)
    assert test is None


def test_folds_share_the_rows_out(tokenizer, tmp_path):
    path = str(write_table(tmp_path / "all.csv", pairs(40)))

    names = set()
    for number in range(4):
        fold = texts(path, "val", PAIR, tokenizer, length=64, fold=number, folds=4)
        names.update(fold.names)

    assert len(names) == 40


def test_numbers_as_targets(tokenizer, tmp_path):
    rows = [{"text": "good film", "score": "4.5"}, {"text": "bad film", "score": "1"}]
    path = str(write_table(tmp_path / "all.csv", rows))
    options = {"target": "score", "target_kind": "number", "length": 64, "val_fraction": 0}

    dataset = texts(path, "train", "text", tokenizer, **options)

    assert dataset.targets.tolist() == [4.5, 1.0]
    assert dataset.targets.dtype == torch.float32
    write_table(tmp_path / "all.csv", [*rows, {"text": "rain", "score": "nan"}])
    with pytest.raises(DataError, match=r"all\.csv:4: 'nan' of column 'score' is no finite"):
        texts(path, "train", "text", tokenizer, **options)


def test_ends_are_cut_off_and_told(tokenizer, tmp_path):
    rows = [{"text": "rain " * 9, "label": "a"}, {"text": "rain", "label": "b"}]
    path = str(write_jsonl(tmp_path / "all.jsonl", rows))
    options = {"length": 6, "val_fraction": 0}

    dataset = texts(path, "train", "text", tokenizer, **options)

    long, short = [sample["input_ids"] for sample in (dataset[0], dataset[1])]
    assert len(long) == 6
    assert len(short) == 3
    assert "1 texts are longer than data.length=6: their ends are cut off" in dataset.explain()
    with pytest.raises(DataError, match=r"all\.jsonl:1: 11 tokens are more than data\.length=6"):
        texts(path, "train", "text", tokenizer, too_long="error", **options)


NEW_YORK = {"words": ["annas", "saw", "new", "york"], "tags": ["B-PER", "O", "B-LOC", "I-LOC"]}


# [CLS] anna ##s saw new york [SEP]
NEW_YORK_LABELS = [
    -100,
    TAGS.index("B-PER"),
    -100,
    TAGS.index("O"),
    TAGS.index("B-LOC"),
    TAGS.index("I-LOC"),
    -100,
]


def test_words_are_labelled_at_their_first_token(tokenizer, tmp_path):
    path = str(write_jsonl(tmp_path / "all.jsonl", [NEW_YORK]))

    dataset = tagged_words(path, "train", tokenizer, 64, val_fraction=0)

    assert dataset[0]["labels"].tolist() == NEW_YORK_LABELS
    assert dataset.classes == TAGS
    assert dataset.word_places(0) == [1, 3, 4, 5]


def test_a_long_sentence_is_cut_if_asked_for(tokenizer, tmp_path):
    path = str(write_jsonl(tmp_path / "all.jsonl", [NEW_YORK]))

    cut = tagged_words(path, "train", tokenizer, 5, too_long="cut", val_fraction=0)

    assert cut[0]["labels"].tolist() == [*NEW_YORK_LABELS[:4], -100]
    assert "1 sentences are longer" in cut.explain()[1]


def conll(rows):
    """Return sentences as CoNLL-2003 has them: a word a line, an empty line between."""
    lines = ["-DOCSTART- -X- O", ""]
    for row in rows:
        for word, tag in zip(row["words"], row["tags"], strict=True):
            lines.append(f"{word} NN {tag}")
        lines.append("")
    return "\n".join(lines) + "\n"


def test_columns_of_conll_are_the_same_sentences(tokenizer, tmp_path):
    number = {"words": ["10\u00a0000", "Anna"], "tags": ["O", "B-PER"]}  # a word with a blank
    rows = [*sentences(9), number]
    write_jsonl(tmp_path / "a/train.jsonl", rows)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/train.conll").write_text(conll(rows))

    of_json = tagged_words(str(tmp_path / "a"), "train", tokenizer, 64, val_fraction=0)
    of_conll = tagged_words(str(tmp_path / "b"), "train", tokenizer, 64, val_fraction=0)

    assert of_conll.fingerprint() == of_json.fingerprint()
    assert of_conll.path(0).endswith("train.conll:3")


def test_a_run_numbers_the_classes_of_a_folder_without_train(tokenizer, tmp_path):
    write_jsonl(tmp_path / "test.jsonl", [{"text": "rain", "label": "wet"}])
    dataset = texts(str(tmp_path), "test", "text", tokenizer, length=64)
    assert dataset[0]["labels"] == 0

    follow_names(dataset, ["dry", "wet"], "data.test")

    assert dataset[0]["labels"] == 1
    again = texts(str(tmp_path), "test", "text", tokenizer, length=64)
    with pytest.raises(ClassNamesError, match="'wet' among them"):
        follow_names(again, ["dry"], "data.test")


def test_a_byte_order_mark_and_lines_of_windows_are_read(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "all.jsonl", LABELLED)
    sentence = write_jsonl(tmp_path / "ner.jsonl", [{"words": ["anna"], "tags": ["O"]}])
    for path in (file, sentence):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    found = texts(str(file), "train", "text", tokenizer, length=64, val_fraction=0)
    assert found.shown["text"] == ["rain", "film"]
    words = tagged_words(str(sentence), "train", tokenizer, 64, val_fraction=0)
    assert words.shown["words"] == [["anna"]]


@pytest.mark.parametrize("labels", [["00", "01", "07"], ["٠", "١"]], ids=["padded", "arabic"])
def test_what_counts_in_another_way_is_a_name(tokenizer, tmp_path, labels):
    rows = [{"text": "rain", "label": label} for label in labels]
    path = str(write_jsonl(tmp_path / "all.jsonl", rows))
    found = texts(path, "train", "text", tokenizer, length=64, val_fraction=0)
    assert found.classes == labels
    assert found.targets.tolist() == [*range(len(labels))]


def test_a_file_of_another_kind_is_named_with_those_that_are_read(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "all.json", LABELLED)
    with pytest.raises(DataError, match=r"data\.root: .*all\.json is none of \.jsonl, \.csv"):
        texts(str(path), "train", "text", tokenizer, length=64)


LABELLED = [{"text": "rain", "label": "a"}, {"text": "film", "label": "b"}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param(
            [{"text": 5, "label": "a"}], r":1: column 'text' is 5, which is no text", id="type"
        ),
        pytest.param([{"label": "a"}], r"data\.input: .*no column 'text'", id="no column"),
        pytest.param(
            [{"text": "x"}], r"data\.target: .*no column 'label'; it has 'text'", id="no target"
        ),
        pytest.param(
            [{"text": "x", "label": None}], r":1: no value in column 'label'", id="no label"
        ),
        pytest.param(
            [*LABELLED, {"text": "x"}], r":3: no value in column 'label'", id="one label missing"
        ),
        pytest.param([], "holds no row", id="empty"),
        pytest.param(
            [*LABELLED, {"text": "\ud800", "label": "a"}],
            r":3: is no JSON: .*surrogates not allowed",
            id="half a character",
        ),
        pytest.param(["text"], r":1: is no object", id="list"),
    ],
)
def test_bad_rows_are_named(tokenizer, tmp_path, rows, message):
    path = str(write_jsonl(tmp_path / "all.jsonl", rows))
    with pytest.raises(DataError, match=message):
        texts(path, "train", "text", tokenizer, length=64, val_fraction=0)


def test_a_run_numbers_the_tags_of_a_folder_without_train(tokenizer, tmp_path):
    write_jsonl(tmp_path / "test.jsonl", [{"words": ["anna", "saw"], "tags": ["B-PER", "O"]}])
    words = tagged_words(str(tmp_path), "test", tokenizer, 64)

    follow_names(words, TAGS, "data.test")

    assert words[0]["labels"].tolist() == [-100, 1, 3, -100]
    assert words.classes == TAGS


def test_a_label_that_train_lacks(tokenizer, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", LABELLED)
    write_jsonl(tmp_path / "val.jsonl", [*LABELLED, {"text": "rain", "label": "c"}])

    with pytest.raises(DataError, match=r"val\.jsonl:3: class 'c' of column 'label' is not among"):
        texts(str(tmp_path), "val", "text", tokenizer, length=64)


def test_a_tag_that_train_lacks(tokenizer, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"words": ["a"], "tags": ["O"]}])
    write_jsonl(tmp_path / "val.jsonl", [{"words": ["a"], "tags": ["B-X"]}])

    with pytest.raises(DataError, match=r"val\.jsonl:1: tag 'B-X' is not among those of train"):
        tagged_words(str(tmp_path), "val", tokenizer, 64)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param({"words": ["a", "b"], "tags": ["O"]}, "2 words have 1 tags", id="lengths"),
        pytest.param(
            {"words": [], "tags": []}, "'words' is .*expected a list of texts", id="empty"
        ),
        pytest.param({"words": "a b", "tags": "O O"}, "expected a list of texts", id="texts"),
        pytest.param(
            {"words": ["a", 5], "tags": ["O", "O"]}, "number 2, is 5 and no text", id="number"
        ),
        pytest.param(
            {"words": ["a", " "], "tags": ["O", "O"]}, "number 2, is ' ' and no", id="blank"
        ),
        pytest.param({"words": ["a"]}, "'tags' is None", id="no tags"),
        pytest.param(
            {"words": ["a", "\u200b"], "tags": ["O", "O"]}, "word 2, .*has no token", id="no token"
        ),
        pytest.param({"words": ["rain"] * 70, "tags": ["O"] * 70}, "72 tokens are more", id="long"),
    ],
)
def test_bad_sentences_are_named(tokenizer, tmp_path, row, message):
    good = {"words": ["anna"], "tags": ["O"]}
    path = str(write_jsonl(tmp_path / "all.jsonl", [good, row]))

    with pytest.raises(DataError, match=rf"all\.jsonl:2: .*{message}"):
        tagged_words(path, "train", tokenizer, 64, val_fraction=0)


def test_a_word_without_a_tag_is_named(tokenizer, tmp_path):
    path = tmp_path / "all.conll"
    path.write_text("anna O\nsaw\n")

    with pytest.raises(DataError, match=r"all\.conll:2: 'saw' is a word without a tag"):
        tagged_words(str(path), "train", tokenizer, 64, val_fraction=0)


@pytest.mark.parametrize("given", [[], ["text", "text"], ["a", "b", "c"]], ids=str)
def test_inputs_are_one_or_two_columns(tokenizer, tmp_path, given):
    path = str(write_jsonl(tmp_path / "all.jsonl", LABELLED))
    with pytest.raises(ConfigError, match=r"data\.input"):
        texts(path, "train", given, tokenizer)


def test_a_length_or_tokenizer_that_does_not_fit_is_refused(tokenizer, tmp_path):
    path = str(write_jsonl(tmp_path / "all.jsonl", LABELLED))
    with pytest.raises(ConfigError, match=r"data\.length: is 128, and .* takes 64 tokens"):
        texts(path, "train", "text", tokenizer)
    with pytest.raises(ConfigError, match=r"data\.length: is 2, of which .* take 2"):
        texts(path, "train", "text", tokenizer, length=2)
    with pytest.raises(ConfigError, match="names a tokenizer"):
        texts(path, "train", "text", None)
    make_tokenizer(pad_token=None).save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match="has no padding token"):
        texts(path, "train", "text", str(tmp_path / "bare"), length=64)


def test_a_file_that_is_not_there_is_named(tokenizer, tmp_path):
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"data\.root=.*nowhere: no such file"):
        texts(nowhere, "train", "text", tokenizer)
    with pytest.raises(DataError, match=r"data\.root=.*nowhere: no such file"):
        tagged_words(nowhere, "train", tokenizer)


@pytest.fixture
def form(tokenizer):
    """What a run of texts keeps of how it takes them."""
    return {
        "kind": "texts",
        "columns": ["text"],
        "tokenizer": tokenizer,
        "length": 64,
        "too_long": "cut",
    }


@pytest.fixture
def form_of_words(tokenizer):
    return {"kind": "words", "tokenizer": tokenizer, "length": 64, "too_long": "error"}


def test_new_texts_for_a_run_are_read_from_a_file_or_given(form, tmp_path):
    path = tmp_path / "new.txt"
    path.write_text("good film\n\nbad film\n")

    of_file = find_texts(form, str(path), [])
    of_lines = find_texts(form, "-", ["good film", "", "bad"])
    given = given_texts(form, ["rain"])

    assert of_file.path(1) == f"{tmp_path}/new.txt:3"
    assert of_file[0].keys() == {"input_ids", "token_type_ids", "attention_mask"}
    assert len(of_lines) == 2
    (expected,) = make_tokenizer()(["rain"])["input_ids"]
    assert given[0]["input_ids"].tolist() == expected


def test_new_texts_that_are_none_are_refused(form):
    with pytest.raises(DataError, match="is no file of texts"):
        find_texts(form, "nowhere.csv", [])
    with pytest.raises(DataError, match="holds no text"):
        find_texts(form, "-", [])


def test_new_pairs_for_a_run(form):
    of_pairs = {**form, "columns": PAIR}

    assert len(given_texts(of_pairs, pairs(3))) == 3
    with pytest.raises(DataError, match="the run takes pairs of texts"):
        given_texts(of_pairs, ["one"])


def test_new_words_for_a_run_are_a_list_a_text_or_a_row(form_of_words, tmp_path):
    path = write_jsonl(tmp_path / "new.jsonl", [{"words": ["anna", "saw"]}])

    of_list = given_texts(form_of_words, [["anna", "saw"]])[0]
    of_text = given_texts(form_of_words, ["anna saw"])[0]
    of_row = given_texts(form_of_words, [{"words": "anna saw"}])[0]
    of_file = find_texts(form_of_words, str(path), [])[0]

    for other in (of_text, of_row, of_file):
        assert np.array_equal(other["input_ids"], of_list["input_ids"])


@pytest.mark.parametrize("wrong", [[], " ", {"text": "anna"}, 3, None, ["anna", 3]], ids=str)
def test_new_words_that_are_none_are_refused(form_of_words, wrong):
    with pytest.raises(DataError, match="neither a text nor a list of words"):
        given_texts(form_of_words, [wrong])


def test_json_of_a_row_is_kept_as_it_is(tokenizer, tmp_path):
    # `None`, `NA` and `?` are texts and classes, too.
    rows = [{"text": "None", "label": "NA"}, {"text": "?", "label": "none"}]
    path = str(write_table(tmp_path / "all.csv", rows))
    dataset = texts(path, "train", "text", tokenizer, length=64, val_fraction=0)
    assert dataset.classes == ["NA", "none"]
    assert json.dumps(dataset.shown_of(1)) == '{"text": "?"}'
