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

TABLE = yaml.safe_load((Path(__file__).parents[1] / "mistakes.yaml").read_text())
MEAN, STD = 0.305, 0.319  # of conf/data/digits.yaml


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


def by_hand(run, pictures):
    """Return files and probabilities, computed with nothing of ours but the network."""
    checkpoint = torch.load(run / "checkpoints" / "best.pt", weights_only=True)
    model = SmallCNN(num_classes=10, in_channels=1, dropout=0.2).eval()
    averaged = next(v for v in checkpoint["ema"].values() if isinstance(v, dict))
    model.load_state_dict(averaged)
    files = sorted(str(path) for path in pictures.rglob("*.png"))
    images = torch.stack([torch.from_numpy(np.array(Image.open(f)))[None].float() for f in files])
    images = F.interpolate(images, (16, 16), mode="bilinear", antialias=True).round() / 255
    with torch.no_grad():
        return files, model((images - MEAN) / STD).softmax(1)


@pytest.fixture(scope="module")
def predicted(predict, whole, pictures, tmp_path_factory):
    """The table of the pictures, with its logits beside it."""
    path = tmp_path_factory.mktemp("predicted") / "p.csv"
    predict(whole, path, f"source={pictures}", "save=logits", "top_k=3")
    return path


def assert_alike(one, other, tolerance=0):
    rows = [read_csv(path) for path in (one, other)]
    assert [row["file"] for row in rows[0]] == [row["file"] for row in rows[1]]
    arrays = [np.load(path.with_suffix(".logits.npy")) for path in (one, other)]
    np.testing.assert_allclose(*arrays, atol=tolerance)
    assert rows[0] == rows[1] or tolerance


def test_rows_are_those_of_plain_torch(predicted, whole, pictures):
    rows = read_csv(predicted)
    files, expected = by_hand(whole, pictures)
    assert [row["file"] for row in rows] == files
    best = expected.topk(3)
    for place, (name, share) in enumerate(
        (("prediction", "probability"), ("top2", "probability2"), ("top3", "probability3"))
    ):
        assert [int(row[name]) for row in rows] == best.indices[:, place].tolist()
        found = torch.tensor([float(row[share]) for row in rows])
        torch.testing.assert_close(found, best.values[:, place], atol=1e-6, rtol=0)
    meta = json.loads(predicted.with_name("p.csv.meta.json").read_text())
    assert (meta["average"], meta["samples"]) == ("ema", 30)
    written = ["p.csv", "p.csv.meta.json", "p.logits.npy"]
    assert sorted(path.name for path in predicted.parent.iterdir()) == written


@pytest.mark.parametrize(
    ("more", "tolerance"), [("loader.num_workers=2", 0), ("loader.batch_size=7", 1e-5)]
)
def test_how_it_is_read_changes_nothing(
    predict, predicted, whole, pictures, tmp_path, more, tolerance
):
    words = [f"source={pictures}", "save=logits", "top_k=3", more]
    predict(whole, tmp_path / "other.csv", *words)
    assert_alike(predicted, tmp_path / "other.csv", tolerance)


def test_a_broken_file_ends_it_or_has_a_row(predict, whole, pictures, tmp_path):
    source = tmp_path / "some"
    shutil.copytree(pictures, source)
    (source / "3" / "broken.png").write_bytes(b"no picture")
    wanted = [f"source={source}", "loader.batch_size=8"]
    done = predict(whole, tmp_path / "a.csv", *wanted, code=3)
    assert "3/broken.png: no image format" in done.error
    assert not (tmp_path / "a.csv").exists()
    more = ["on_error=skip", "save=embeddings:head"]
    done = predict(whole, tmp_path / "b.csv", *wanted, *more)
    rows = read_csv(tmp_path / "b.csv")
    broken = [number for number, row in enumerate(rows) if row["error"]]
    assert [rows[number]["file"] for number in broken] == [f"{source}/3/broken.png"]
    assert rows[broken[0]]["prediction"] == ""
    kept = np.load(tmp_path / "b.embeddings.npy")
    assert np.isnan(kept).any(1).nonzero()[0].tolist() == broken
    assert "1 of them broken" in done.out
    alone = [f"source={source}/3/broken.png", "save=logits", "on_error=skip"]
    done = predict(whole, tmp_path / "c.csv", *alone, code=3)
    assert "none of 1 samples could be read" in done.error
    assert "no image format" in read_csv(tmp_path / "c.csv")[0]["error"]


def test_a_signal_ends_it_and_nothing_is_written(start, whole, pictures, tmp_path):
    listing = tmp_path / "names"
    listing.write_text("\n".join(sorted(str(path) for path in pictures.rglob("*.png")) * 400))
    mine = [f"run={whole}", "source=-", "loader.batch_size=2", f"out={tmp_path}/p.csv"]
    run = start(mine, command="predict", environment={"STANDARD_INPUT": str(listing)})
    run.until(lambda: "regimen" in run.err)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(143).error == "stopped by SIGTERM: there was nothing to save"
    assert [path.name for path in tmp_path.iterdir()] == ["names"]


def test_a_data_set_and_a_task_of_ones_own_predict_on_files(train, predict, tmp_path):
    shutil.copy(Path(__file__).with_name("user_code.py"), tmp_path / "users.py")
    run = tmp_path / "run"
    sets = [f"data.{s}={{_target_: users.Pictures, count: 8}}" for s in ("train", "val")]
    own = ["data.test=null", "model={_target_: users.Heads}", "task={_target_: users.Both}"]
    own += ["data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]", "data.num_classes=null"]
    limits = ["trainer.max_steps=1", "loader.num_workers=0", "callbacks.model_summary=null"]
    words = ["experiment=resnet18", *sets, *own, *limits, f"run_dir={run}"]
    train(words, folder=tmp_path)
    facts = json.loads((run / "inference.json").read_text())
    assert facts["inputs"] == {"kind": "picture", "channels": 3, "size": [12, 10]}
    (tmp_path / "photos").mkdir()
    for number in range(3):
        Image.new("RGB", (30, 20), (40 * number, 0, 0)).save(tmp_path / f"photos/{number}.png")
    predict(run, "p.csv", "source=photos", "save=logits", folder=tmp_path)
    rows = read_csv(tmp_path / "p.csv")
    assert list(rows[0]) == ["file", "size", "place1", "place2", "map_shape"]
    assert np.load(tmp_path / "p.logits.map.npy").shape == (3, 60)
    saved = np.load(tmp_path / "p.logits.size.npy")
    np.testing.assert_allclose(saved, [float(row["size"]) for row in rows], rtol=1e-6)
    predict(run, "q.csv", "source=val", folder=tmp_path)
    assert len(read_csv(tmp_path / "q.csv")) == 8


def test_parquet_and_lines_hold_what_the_csv_holds(predict, predicted, whole, pictures, tmp_path):
    for suffix in ("jsonl", "parquet"):
        predict(whole, tmp_path / f"p.{suffix}", f"source={pictures}/[0-9]/*")
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    table = pyarrow.parquet.read_table(tmp_path / "p.parquet").to_pylist()
    assert lines == table
    shown = [{r["file"]: r["prediction"] for r in rows} for rows in (lines, read_csv(predicted))]
    assert shown[0] == shown[1]


def test_a_run_stands_alone(train, predict, pictures, tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(pictures, tree / "train")
    run = tmp_path / "run"
    arguments = ["experiment=resnet18", "model=small_cnn", "data=image_folder", f"data.root={tree}"]
    small = ["data.image_size=16", "data.channels=1", "data.mean=[0.5]", "data.std=[0.5]"]
    limits = ["trainer.max_steps=2", "loader.batch_size=8", "loader.num_workers=0"]
    train([*arguments, *small, *limits, f"run_dir={run}"])
    tree.rename(tmp_path / "moved")
    predict(run, tmp_path / "p.csv", f"source={tmp_path}/moved/train")
    facts = json.loads((run / "inference.json").read_text())
    assert facts["classes"] == sorted(facts["classes"])
    assert facts["num_classes"] == len(facts["classes"]) == 10
    assert len(read_csv(tmp_path / "p.csv")) == 30


@pytest.mark.parametrize(
    ("experiment", "source", "check"),
    [
        ("regression", "test", lambda row: float(row["prediction"])),
        ("multilabel", "val", lambda row: row["probability"]),
        ("segmentation", "test", lambda row: Image.open(row["prediction"]).size == (32, 32)),
    ],
    ids=["regression", "multilabel", "mask"],
)
def test_other_tasks_answer_in_their_own_form(
    predict, of_experiment, tmp_path, experiment, source, check
):
    predict(of_experiment(experiment), tmp_path / "p.csv", f"source={source}")
    rows = read_csv(tmp_path / "p.csv")
    assert [row["file"] for row in rows] == [str(number) for number in range(len(rows))]
    assert all(check(row) is not False for row in rows)


def test_a_run_is_asked_on_one_device_however_it_was_trained(predict, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["strategy"] |= {"name": "fsdp", "devices": 4, "wrap_modules": ["ConvBlock"]}
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for name, more in (("one", []), ("two", ["strategy.name=ddp", "strategy.devices=2"])):
        predict(run, tmp_path / f"{name}.csv", "source=test", "save=logits", *more)
    assert len(read_csv(tmp_path / "one.csv")) == 270
    assert_alike(tmp_path / "one.csv", tmp_path / "two.csv", 1e-5)
    again = predict(run, tmp_path / "one.csv", "source=test", code=2)
    assert "overwrite=true" in again.error  # a table is not replaced unless it is asked for


def test_three_lines_of_python(whole, pictures):
    run = load_run(whole)
    files = sorted(str(path) for path in pictures.rglob("*.png"))
    rows = run.predict(files, top_k=2)
    _, expected = by_hand(whole, pictures)
    found = torch.tensor([row["probability"] for row in rows])
    torch.testing.assert_close(found, expected.max(1).values, atol=1e-6, rtol=0)
    assert [row["prediction"] for row in rows] == [str(n) for n in expected.argmax(1).tolist()]
    opened = [Image.open(file) for file in files[:3]]
    rows = run.predict(files[:3], top_k=2)
    assert run.predict(opened, top_k=2) == rows
    assert run.predict([np.array(image) for image in opened], top_k=2) == rows
    with pytest.raises(ConfigError, match="do not continue text"):
        run.generate(["a"])


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


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param([], id="greedy"),
        pytest.param(["sampling=random", "temperature=0.8", "top_k=20"], id="random"),
    ],
)
def test_batches_and_workers_change_nothing(predict, speaker, lines, tmp_path, sampling):
    for name, more in (("two", ["loader.batch_size=2", "loader.num_workers=2"]), ("all", [])):
        words = [f"source={lines}", "max_new_tokens=12", *sampling, *more]
        predict(speaker, tmp_path / f"{name}.csv", *words)
    found = read_csv(tmp_path / "two.csv")
    assert found == read_csv(tmp_path / "all.csv")
    assert [row["file"] for row in found] == [f"{lines}:{n}" for n in range(1, 6)]
    assert [row["prompt"] for row in found] == PROMPTS
    assert {len(row["prediction"]) for row in found} == {12}
    keys = dict(part.split("=") for part in sampling)
    options = {"sampling": keys.get("sampling", "greedy")}
    options |= {"temperature": float(keys["temperature"]), "top_k": 20} if keys else {}
    mine, other = (
        load_run(speaker, "cpu").generate(PROMPTS, max_new_tokens=12, seed=seed, **options)
        for seed in (None, 5)
    )
    assert [row["prediction"] for row in found] == mine
    assert (mine != other) == bool(keys)
    meta = json.loads((tmp_path / "all.csv.meta.json").read_text())
    assert meta["generation"]["seed"] == load_run(speaker).config.seed


def test_a_prompt_beyond_the_vocabulary_ends_it_or_has_a_row(predict, speaker, tmp_path):
    source = tmp_path / "prompts"
    source.write_text("one\nzwölf\nthree\n")
    wanted = [tmp_path / "p.csv", f"source={source}", "max_new_tokens=3"]
    refused = predict(speaker, *wanted, code=3).error
    assert re.search("prompts:2.*'ö'", refused)
    predict(speaker, *wanted, "on_error=skip")
    found = read_csv(tmp_path / "p.csv")
    assert ["ö" in row["error"] for row in found] == [False, True, False]


@pytest.mark.parametrize(
    ("kind", "row"),
    [pytest.param(k, r, id=" ".join(r[0])) for k in ("predictions", "texts") for r in TABLE[k]],
)
def test_mistakes_write_nothing(train, whole, speaker, lines, tmp_path, kind, row):
    arguments, code, said = row
    named = kind == "predictions" or arguments[0].startswith("source")
    words = [f"run={whole if kind == 'predictions' else speaker}", *arguments]
    words += [] if named else [f"source={lines}"]
    assert said in train(words, code, command="predict", folder=tmp_path).err
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_text_has_its_vocabulary_and_logits_of_its_own_data(predict, speaker, tmp_path):
    facts = json.loads((speaker / "inference.json").read_text())
    assert facts["inputs"] == {"kind": "text", "encoding": "characters", "context": 32}
    assert facts["classes"] == ["\n", *map(chr, range(32, 127))]
    predict(speaker, tmp_path / "p.csv", "source=val", "save=logits")
    logits = np.load(tmp_path / "p.logits.npy")
    assert logits.shape[1:] == (96, 32)
    assert len(read_csv(tmp_path / "p.csv")) == len(logits)
