"""`predict`: a row for each sample, in order, whatever reads it; of text too, and from Python."""

import csv
import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
import yaml
from PIL import Image
from torch.nn import functional as F

from regimen import load_run
from regimen.conf.errors import ConfigError
from regimen.models.small_cnn import SmallCNN
from toy_pictures import write_digits

MISTAKES = yaml.safe_load((Path(__file__).parents[1] / "mistakes.yaml").read_text())
MEAN = 0.305
STD = 0.319  # of conf/data/digits.yaml


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Thirty digits as PNG files of 8 x 8 pixels, in folders, two levels deep."""
    return write_digits(tmp_path_factory.mktemp("pictures"), {"": 3})


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def predict(train):
    """Run `predict run=RUN out=FILE ...` to its end."""

    def run(path, out, *words, code=0, **options):
        words = [f"run={path}", f"out={out}", *words]
        return train(words, code, command="predict", **options)

    return run


def mistakes(kind):
    """Return the rows of the table as cases: arguments, exit code, what is said."""
    return [pytest.param(*row, id=" ".join(row[0])) for row in MISTAKES[kind]]


def by_hand(run, pictures):
    """Return files and probabilities, computed with nothing of ours but the network."""
    checkpoint = torch.load(run / "checkpoints" / "best.pt", weights_only=True)
    model = SmallCNN(num_classes=10, in_channels=1, dropout=0.2).eval()
    # Beside the averaged weights there are only numbers.
    (averaged,) = [value for value in checkpoint["ema"].values() if isinstance(value, dict)]
    model.load_state_dict(averaged)

    files = sorted(str(path) for path in pictures.rglob("*.png"))
    pixels = np.stack([np.array(Image.open(file)) for file in files])
    images = torch.from_numpy(pixels)[:, None].float()
    images = F.interpolate(images, (16, 16), mode="bilinear", antialias=True)
    images = images.round() / 255
    with torch.no_grad():
        logits = model((images - MEAN) / STD)
    return files, logits.softmax(1)


@pytest.fixture(scope="module")
def predicted(predict, whole, pictures, tmp_path_factory):
    """The table of the pictures, with its logits beside it."""
    path = tmp_path_factory.mktemp("predicted") / "p.csv"
    predict(whole, path, f"source={pictures}", "save=logits", "top_k=3")
    return path


def assert_alike(one, other, tolerance=0):
    """Compare two tables and their logits: exactly, or the logits alone within a tolerance."""
    rows = read_csv(one)
    other_rows = read_csv(other)
    assert column(rows, "file") == column(other_rows, "file")
    logits = np.load(one.with_suffix(".logits.npy"))
    other_logits = np.load(other.with_suffix(".logits.npy"))
    np.testing.assert_allclose(logits, other_logits, atol=tolerance)
    if tolerance == 0:
        assert rows == other_rows


def column(rows, name):
    return [row[name] for row in rows]


def read_json(path):
    return json.loads(path.read_text())


def test_rows_are_those_of_plain_torch(predicted, whole, pictures):
    rows = read_csv(predicted)

    files, expected = by_hand(whole, pictures)
    best = expected.topk(3)
    assert column(rows, "file") == files
    classes = ["prediction", "top2", "top3"]
    shares = ["probability", "probability2", "probability3"]
    for place in range(3):
        found_classes = [int(text) for text in column(rows, classes[place])]
        found_shares = [float(text) for text in column(rows, shares[place])]
        assert found_classes == best.indices[:, place].tolist()
        expected_shares = best.values[:, place]
        torch.testing.assert_close(torch.tensor(found_shares), expected_shares, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("more", "tolerance"), [("loader.num_workers=2", 0), ("loader.batch_size=7", 1e-5)]
)
def test_how_it_is_read_changes_nothing(
    predict, predicted, whole, pictures, tmp_path, more, tolerance
):
    words = [f"source={pictures}", "save=logits", "top_k=3", more]
    predict(whole, tmp_path / "other.csv", *words)
    assert_alike(predicted, tmp_path / "other.csv", tolerance)


def test_a_table_says_beside_it_what_it_was_made_with(predicted):
    meta = read_json(predicted.with_name("p.csv.meta.json"))

    assert meta["average"] == "ema"
    assert meta["samples"] == 30
    written = sorted(path.name for path in predicted.parent.iterdir())
    assert written == ["p.csv", "p.csv.meta.json", "p.logits.npy"]


@pytest.fixture
def damaged(pictures, tmp_path):
    """The pictures, and one more that is none."""
    source = tmp_path / "some"
    shutil.copytree(pictures, source)
    (source / "3" / "broken.png").write_bytes(b"no picture")
    return source


def test_a_broken_file_ends_it(predict, whole, damaged, tmp_path):
    out = tmp_path / "a.csv"

    ended = predict(whole, out, f"source={damaged}", "loader.batch_size=8", code=3)

    assert "3/broken.png: no image format" in ended.error
    assert not out.exists()


def test_a_broken_file_has_a_row_with_on_error_skip(predict, whole, damaged, tmp_path):
    words = ["loader.batch_size=8", "on_error=skip", "save=embeddings:head"]

    ended = predict(whole, tmp_path / "b.csv", f"source={damaged}", *words)

    rows = read_csv(tmp_path / "b.csv")
    (broken,) = [number for number, row in enumerate(rows) if row["error"]]
    assert rows[broken]["file"] == f"{damaged}/3/broken.png"
    assert rows[broken]["prediction"] == ""
    embeddings = np.load(tmp_path / "b.embeddings.npy")
    without_embedding = np.isnan(embeddings).any(1).nonzero()[0]
    assert without_embedding.tolist() == [broken]
    assert "1 of them broken" in ended.out


def test_files_of_which_none_can_be_read_end_it(predict, whole, damaged, tmp_path):
    out = tmp_path / "c.csv"
    words = [f"source={damaged}/3/broken.png", "save=logits", "on_error=skip"]

    ended = predict(whole, out, *words, code=3)

    assert "none of 1 samples could be read" in ended.error
    assert "no image format" in read_csv(out)[0]["error"]


def test_a_signal_ends_it_and_nothing_is_written(start, whole, pictures, tmp_path):
    listing = tmp_path / "names"
    files = sorted(str(path) for path in pictures.rglob("*.png"))
    listing.write_text("\n".join(files * 400))
    words = [f"run={whole}", "source=-", "loader.batch_size=2", f"out={tmp_path}/p.csv"]
    run = start(words, command="predict", environment={"STANDARD_INPUT": str(listing)})
    run.until(lambda: "regimen" in run.err)

    os.kill(run.pid, signal.SIGTERM)

    ended = run.wait(143)
    assert ended.error == "stopped by SIGTERM: there was nothing to save"
    assert [path.name for path in tmp_path.iterdir()] == ["names"]


def test_a_data_set_and_a_task_of_ones_own_predict_on_files(train, predict, tmp_path):
    shutil.copy(Path(__file__).with_name("user_code.py"), tmp_path / "users.py")
    run = tmp_path / "run"
    words = [
        "experiment=resnet18",
        "data.train={_target_: users.Pictures, count: 8}",
        "data.val={_target_: users.Pictures, count: 8}",
        "data.test=null",
        "data.mean=[0.5,0.5,0.5]",
        "data.std=[0.5,0.5,0.5]",
        "data.num_classes=null",
        "model={_target_: users.Heads}",
        "task={_target_: users.Both}",
        "trainer.max_steps=1",
        "loader.num_workers=0",
        "callbacks.model_summary=null",
    ]
    train([*words, f"run_dir={run}"], folder=tmp_path)
    facts = read_json(run / "inference.json")
    assert facts["inputs"] == {"kind": "picture", "channels": 3, "size": [12, 10]}
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        image = Image.new("RGB", (30, 20), (40 * number, 0, 0))
        image.save(photos / f"{number}.png")

    predict(run, "p.csv", "source=photos", "save=logits", folder=tmp_path)
    predict(run, "q.csv", "source=val", folder=tmp_path)

    rows = read_csv(tmp_path / "p.csv")
    assert list(rows[0]) == ["file", "size", "place1", "place2", "map_shape"]
    maps = np.load(tmp_path / "p.logits.map.npy")
    assert maps.shape == (3, 60)
    sizes = np.load(tmp_path / "p.logits.size.npy")
    np.testing.assert_allclose(sizes, [float(text) for text in column(rows, "size")], rtol=1e-6)
    assert len(read_csv(tmp_path / "q.csv")) == 8


def test_parquet_and_lines_hold_what_the_csv_holds(predict, predicted, whole, pictures, tmp_path):
    words = [f"source={pictures}/[0-9]/*"]

    predict(whole, tmp_path / "p.jsonl", *words)
    predict(whole, tmp_path / "p.parquet", *words)

    text = (tmp_path / "p.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    table = pyarrow.parquet.read_table(tmp_path / "p.parquet")
    assert lines == table.to_pylist()
    assert predictions_by_file(lines) == predictions_by_file(read_csv(predicted))


def predictions_by_file(rows):
    return {row["file"]: row["prediction"] for row in rows}


def test_a_run_stands_alone(train, predict, pictures, tmp_path):
    """It predicts without the data that it was trained on."""
    tree = tmp_path / "tree"
    shutil.copytree(pictures, tree / "train")
    run = tmp_path / "run"
    words = [
        "experiment=resnet18",
        "model=small_cnn",
        "data=image_folder",
        f"data.root={tree}",
        "data.image_size=16",
        "data.channels=1",
        "data.mean=[0.5]",
        "data.std=[0.5]",
        "trainer.max_steps=2",
        "loader.batch_size=8",
        "loader.num_workers=0",
    ]
    train([*words, f"run_dir={run}"])
    tree.rename(tmp_path / "moved")

    predict(run, tmp_path / "p.csv", f"source={tmp_path}/moved/train")

    facts = read_json(run / "inference.json")
    assert facts["classes"] == sorted(facts["classes"])
    assert facts["num_classes"] == len(facts["classes"]) == 10
    assert len(read_csv(tmp_path / "p.csv")) == 30


def is_number(row):
    float(row["prediction"])
    return True


def has_probability(row):
    return bool(row["probability"])


def is_mask(row):
    with Image.open(row["prediction"]) as mask:
        return mask.size == (32, 32)


@pytest.mark.parametrize(
    ("experiment", "source", "check"),
    [
        pytest.param("regression", "test", is_number, id="regression"),
        pytest.param("multilabel", "val", has_probability, id="multilabel"),
        pytest.param("segmentation", "test", is_mask, id="mask"),
    ],
)
def test_other_tasks_answer_in_their_own_form(
    predict, of_experiment, tmp_path, experiment, source, check
):
    predict(of_experiment(experiment), tmp_path / "p.csv", f"source={source}")

    rows = read_csv(tmp_path / "p.csv")
    assert column(rows, "file") == [str(number) for number in range(len(rows))]
    for row in rows:
        assert check(row)


def test_a_run_is_asked_on_one_device_however_it_was_trained(predict, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["strategy"] |= {"name": "fsdp", "devices": 4, "wrap_modules": ["ConvBlock"]}
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    one = tmp_path / "one.csv"
    two = tmp_path / "two.csv"
    words = ["source=test", "save=logits"]

    predict(run, one, *words)
    predict(run, two, *words, "strategy.name=ddp", "strategy.devices=2")

    assert len(read_csv(one)) == 270
    assert_alike(one, two, 1e-5)
    again = predict(run, one, "source=test", code=2)
    assert "overwrite=true" in again.error  # a table is not replaced unless it is asked for


def test_three_lines_of_python(whole, pictures):
    run = load_run(whole)
    files = sorted(str(path) for path in pictures.rglob("*.png"))

    rows = run.predict(files, top_k=2)

    _, expected = by_hand(whole, pictures)
    found = torch.tensor(column(rows, "probability"))
    torch.testing.assert_close(found, expected.max(1).values, atol=1e-6, rtol=0)
    classes = expected.argmax(1).tolist()
    assert column(rows, "prediction") == [str(number) for number in classes]


PROMPTS = ["Return", "The", "def main(", "a", "If the file does not exist, the function raises an"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n")
    return path


@pytest.fixture(scope="module")
def speaker(train, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "text"
    small = ["model.dim=32", "model.depth=1", "data.context=32", "trainer.limit_val_batches=1"]
    limits = ["trainer.max_steps=40", "loader.num_workers=0"]
    train(["experiment=char_lm", *small, *limits, f"run_dir={path}"])
    return path


def test_pictures_and_arrays_are_predicted_as_their_files(whole, pictures):
    run = load_run(whole)
    files = sorted(str(path) for path in pictures.rglob("*.png"))[:3]
    opened = [Image.open(file) for file in files]
    arrays = [np.array(image) for image in opened]

    rows = run.predict(files, top_k=2)

    assert run.predict(opened, top_k=2) == rows
    assert run.predict(arrays, top_k=2) == rows


def test_a_run_of_pictures_continues_no_text(whole):
    with pytest.raises(ConfigError, match="do not continue text"):
        load_run(whole).generate(["a"])


RANDOM = ["sampling=random", "temperature=0.8", "top_k=20"]


@pytest.mark.parametrize("sampling", [[], RANDOM], ids=["greedy", "random"])
def test_batches_and_workers_change_nothing(predict, speaker, lines, tmp_path, sampling):
    two = tmp_path / "two.csv"
    every = tmp_path / "all.csv"
    words = [f"source={lines}", "max_new_tokens=12", *sampling]

    predict(speaker, two, *words, "loader.batch_size=2", "loader.num_workers=2")
    predict(speaker, every, *words)

    found = read_csv(two)
    assert found == read_csv(every)
    assert column(found, "file") == [f"{lines}:{number}" for number in range(1, 6)]
    assert column(found, "prompt") == PROMPTS
    assert {len(text) for text in column(found, "prediction")} == {12}
    meta = read_json(tmp_path / "all.csv.meta.json")
    assert meta["generation"]["seed"] == load_run(speaker).config.seed


def test_python_continues_text_as_the_command(predict, speaker, lines, tmp_path):
    out = tmp_path / "p.csv"
    options = {"sampling": "random", "temperature": 0.8, "top_k": 20}

    predict(speaker, out, f"source={lines}", "max_new_tokens=12", *RANDOM)
    run = load_run(speaker, "cpu")
    continued = run.generate(PROMPTS, max_new_tokens=12, seed=None, **options)
    by_other_seed = run.generate(PROMPTS, max_new_tokens=12, seed=5, **options)

    assert column(read_csv(out), "prediction") == continued
    assert by_other_seed != continued


def test_python_continues_text_greedily_whatever_the_seed(predict, speaker, lines, tmp_path):
    out = tmp_path / "p.csv"

    predict(speaker, out, f"source={lines}", "max_new_tokens=12")
    run = load_run(speaker, "cpu")
    continued = run.generate(PROMPTS, max_new_tokens=12, seed=None, sampling="greedy")
    by_other_seed = run.generate(PROMPTS, max_new_tokens=12, seed=5, sampling="greedy")

    assert column(read_csv(out), "prediction") == continued
    assert by_other_seed == continued


def test_a_prompt_beyond_the_vocabulary_ends_it_or_has_a_row(predict, speaker, tmp_path):
    source = tmp_path / "prompts"
    source.write_text("one\nzwölf\nthree\n")
    words = [tmp_path / "p.csv", f"source={source}", "max_new_tokens=3"]

    refused = predict(speaker, *words, code=3).error
    predict(speaker, *words, "on_error=skip")

    assert re.search("prompts:2.*'ö'", refused)
    first, second, third = column(read_csv(tmp_path / "p.csv"), "error")
    assert "ö" not in first
    assert "ö" in second
    assert "ö" not in third


@pytest.mark.parametrize(("arguments", "code", "said"), mistakes("predictions"))
def test_mistakes_write_nothing(train, whole, tmp_path, arguments, code, said):
    ended = train([f"run={whole}", *arguments], code, command="predict", folder=tmp_path)

    assert said in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "code", "said"), mistakes("texts"))
def test_mistakes_of_text_write_nothing(train, speaker, lines, tmp_path, arguments, code, said):
    words = [f"run={speaker}", *arguments]
    if not arguments[0].startswith("source"):
        words.append(f"source={lines}")

    ended = train(words, code, command="predict", folder=tmp_path)

    assert said in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_text_has_its_vocabulary_and_logits_of_its_own_data(predict, speaker, tmp_path):
    facts = read_json(speaker / "inference.json")
    assert facts["inputs"] == {"kind": "text", "encoding": "characters", "context": 32}
    printable = [chr(code) for code in range(32, 127)]
    assert facts["classes"] == ["\n", *printable]

    predict(speaker, tmp_path / "p.csv", "source=val", "save=logits")

    logits = np.load(tmp_path / "p.logits.npy")
    assert logits.shape[1:] == (96, 32)
    assert len(read_csv(tmp_path / "p.csv")) == len(logits)
