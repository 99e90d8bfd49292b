"""`predict`: a row for each sample, in order, whatever reads it; and the same from Python."""

import csv
import json
import os
import shutil
import signal

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from sklearn.datasets import load_digits
from torch.nn import functional as F

from models.small_cnn import SmallCNN
from scripts.cli.arguments import parse_arguments
from scripts.cli.keys import of_run
from scripts.cli.request import Request
from scripts.composition.compose import compose
from scripts.prediction.command_line import take_apart
from trainer import load_run

MEAN, STD = 0.305, 0.319  # of conf/data/digits.yaml


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Thirty digits as PNG files of 8 x 8 pixels, in folders, two levels deep."""
    folder = tmp_path_factory.mktemp("pictures")
    images, labels = load_digits(return_X_y=True)
    for number in range(30):
        place = folder / str(labels[number])
        place.mkdir(exist_ok=True)
        pixels = np.round(images[number].reshape(8, 8) * 255 / 16).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{number:02d}.png")
    return folder


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


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


def test_rows_are_those_of_plain_torch(predict, whole, pictures, tmp_path):
    done = predict([f"run={whole}", f"source={pictures}", "top_k=3", f"out={tmp_path}/p.csv"])
    assert done.code == 0, done.err
    rows = read_csv(tmp_path / "p.csv")
    files, expected = by_hand(whole, pictures)
    assert [row["file"] for row in rows] == files
    best = expected.topk(3)
    for place, (name, share) in enumerate(
        (("prediction", "probability"), ("top2", "probability2"), ("top3", "probability3"))
    ):
        assert [int(row[name]) for row in rows] == best.indices[:, place].tolist()
        found = torch.tensor([float(row[share]) for row in rows])
        torch.testing.assert_close(found, best.values[:, place], atol=1e-6, rtol=0)
    meta = json.loads((tmp_path / "p.csv.meta.json").read_text())
    assert meta["average"] == "ema"
    assert meta["samples"] == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.csv", "p.csv.meta.json"]


@pytest.mark.parametrize(
    ("more", "exact"),
    [
        pytest.param(["loader.num_workers=2"], True, id="workers"),
        pytest.param(["strategy.name=ddp", "strategy.devices=3"], False, id="processes"),
        pytest.param(["loader.batch_size=7"], False, id="batches"),
    ],
)
def test_how_it_is_read_changes_nothing(predict, whole, pictures, tmp_path, more, exact):
    for name, arguments in (("one", []), ("other", more)):
        out = f"out={tmp_path}/{name}.csv"
        source = f"source={pictures}"
        done = predict([f"run={whole}", source, out, "save=logits", *arguments])
        assert done.code == 0, done.err
    one, other = read_csv(tmp_path / "one.csv"), read_csv(tmp_path / "other.csv")
    assert [row["file"] for row in one] == [row["file"] for row in other]
    arrays = [np.load(tmp_path / f"{name}.logits.npy") for name in ("one", "other")]
    np.testing.assert_allclose(*arrays, atol=0 if exact else 1e-5)
    assert (one == other) or not exact


def test_a_broken_file_ends_it_or_has_a_row(predict, whole, pictures, tmp_path):
    source = tmp_path / "some"
    shutil.copytree(pictures, source)
    (source / "3" / "broken.png").write_bytes(b"no picture")
    wanted = [f"run={whole}", f"source={source}", "loader.batch_size=8"]
    done = predict([*wanted, f"out={tmp_path}/a.csv"])
    assert done.code == 3
    assert "3/broken.png: no image format" in done.error
    assert not (tmp_path / "a.csv").exists()
    more = ["on_error=skip", "save=embeddings:head", f"out={tmp_path}/b.csv"]
    done = predict([*wanted, *more])
    assert done.code == 0, done.err
    rows = read_csv(tmp_path / "b.csv")
    broken = [number for number, row in enumerate(rows) if row["error"]]
    assert [rows[number]["file"] for number in broken] == [f"{source}/3/broken.png"]
    assert rows[broken[0]]["prediction"] == ""
    kept = np.load(tmp_path / "b.embeddings.npy")
    assert np.isnan(kept).any(1).nonzero()[0].tolist() == broken
    assert "1 of them broken" in done.out


def test_a_source_without_a_readable_file_is_an_error(predict, whole, tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(b"no picture")
    asked = [f"run={whole}", f"source={tmp_path}", "loader.batch_size=2", "save=logits"]
    done = predict([*asked, "on_error=skip", f"out={tmp_path}/p.csv"])
    assert done.code == 3
    assert "none of 5 samples could be read" in done.error
    rows = read_csv(tmp_path / "p.csv")
    assert all("no image format" in row["error"] for row in rows)
    shutil.copytree(tmp_path, tmp_path / "more")
    Image.new("L", (8, 8)).save(tmp_path / "more" / "z.png")
    done = predict(
        [
            *asked[:1],
            f"source={tmp_path}/more",
            *asked[2:],
            "on_error=skip",
            f"out={tmp_path}/q.csv",
        ]
    )
    assert done.code == 0, done.err
    assert np.isnan(np.load(tmp_path / "q.logits.npy")).all(1).tolist() == [True] * 5 + [False]


def test_killed_and_resumed_it_is_the_same_table(start, predict, whole, pictures, tmp_path):
    wanted = [f"run={whole}", "source=-", "loader.batch_size=2", "loader.num_workers=0"]
    names = sorted(str(path) for path in pictures.rglob("*.png")) * 40
    listing = tmp_path / "names"
    listing.write_text("\n".join(names))
    piped = {"STANDARD_INPUT": str(listing)}
    done = predict([*wanted, "save=logits", f"out={tmp_path}/whole.csv"], environment=piped)
    assert done.code == 0, done.err
    tensors = f"save_to={tmp_path}/killed.safetensors"
    mine = [*wanted, "save=logits", tensors, f"out={tmp_path}/killed.csv"]
    part = tmp_path / "killed.csv.part"
    run = start(mine, command="predict", environment=piped)
    run.until(lambda: part.exists() and part.read_bytes().count(b"\n") > 20)
    run.kill()
    assert not (tmp_path / "killed.csv").exists()
    done = predict([*mine, "resume=auto"], environment=piped)
    assert done.code == 0, done.err
    assert "going on after" in done.err
    assert (tmp_path / "killed.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    found = load_file(tmp_path / "killed.safetensors")["logits"]
    np.testing.assert_array_equal(found, np.load(tmp_path / "whole.logits.npy"))
    assert list(tmp_path.glob("*.part")) == []


def test_a_signal_ends_it_and_another_source_is_refused(start, predict, whole, pictures, tmp_path):
    names = sorted(str(path) for path in pictures.rglob("*.png")) * 40
    listing = tmp_path / "names"
    listing.write_text("\n".join(names))
    mine = [f"run={whole}", "loader.batch_size=2", f"out={tmp_path}/p.csv"]
    part = tmp_path / "p.csv.part"
    piped = {"STANDARD_INPUT": str(listing)}
    run = start([*mine, "source=-"], command="predict", environment=piped)
    run.until(lambda: part.exists() and part.read_bytes().count(b"\n") > 5)
    os.kill(run.pid, signal.SIGTERM)
    run.wait()
    assert run.code == 143
    assert "resume=auto" in run.error
    done = predict([*mine, f"source={pictures}", "resume=auto"])
    assert done.code == 4
    assert "made from another" in done.error


def test_parquet_and_lines_hold_what_the_csv_holds(predict, whole, pictures, tmp_path):
    for suffix in ("csv", "jsonl", "parquet"):
        done = predict([f"run={whole}", f"source={pictures}/[0-4]/*", f"out={tmp_path}/p.{suffix}"])
        assert done.code == 0, done.err
    rows = read_csv(tmp_path / "p.csv")
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    table = pyarrow.parquet.read_table(tmp_path / "p.parquet").to_pylist()
    assert lines == table
    assert [(r["file"], r["prediction"]) for r in rows] == [
        (line["file"], line["prediction"]) for line in lines
    ]


def test_a_run_stands_alone(train, predict, pictures, tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(pictures, tree / "train")
    run = tmp_path / "run"
    arguments = ["experiment=resnet18", "model=small_cnn", "data=image_folder", f"data.root={tree}"]
    small = ["data.image_size=16", "data.channels=1", "data.mean=[0.5]", "data.std=[0.5]"]
    limits = ["trainer.max_steps=2", "loader.batch_size=8", "loader.num_workers=0"]
    done = train([*arguments, *small, *limits, f"run_dir={run}"])
    assert done.code == 0, done.err
    tree.rename(tmp_path / "moved")
    done = predict([f"run={run}", f"source={tmp_path}/moved/train", f"out={tmp_path}/p.csv"])
    assert done.code == 0, done.err
    facts = json.loads((run / "inference.json").read_text())
    assert facts["classes"] == sorted(facts["classes"])
    assert facts["num_classes"] == len(facts["classes"]) == 10
    assert len(read_csv(tmp_path / "p.csv")) == 30
    (run / "inference.json").unlink()  # as a run of an older version
    done = predict([f"run={run}", f"source={tmp_path}/moved/train", f"out={tmp_path}/q.csv"])
    assert done.code == 3
    assert "data.root" in done.error


@pytest.mark.parametrize(
    ("experiment", "source", "check"),
    [
        pytest.param("regression", "test", lambda r: float(r["prediction"]), id="regression"),
        pytest.param("multilabel", "val", lambda r: r["probability"], id="multilabel"),
        pytest.param(
            "segmentation",
            "test",
            lambda r: Image.open(r["prediction"]).size == (32, 32),
            id="mask",
        ),
    ],
)
def test_other_tasks_answer_in_their_own_form(train, predict, tmp_path, experiment, source, check):
    run = tmp_path / "run"
    limits = ["trainer.max_steps=1", "loader.num_workers=0", "trainer.limit_val_batches=1"]
    done = train([f"experiment={experiment}", *limits, f"run_dir={run}"])
    assert done.code == 0, done.err
    asked = [f"run={run}", f"source={source}", f"out={tmp_path}/p.csv"]
    done = predict(asked)
    assert done.code == 0, done.err
    if experiment == "regression":
        done = predict([*asked, "draw=true", "overwrite=true"])
        assert (done.code, "draw: the samples are no picture" in done.err) == (2, True)
    rows = read_csv(tmp_path / "p.csv")
    assert [row["file"] for row in rows] == [str(number) for number in range(len(rows))]
    assert all(check(row) is not False for row in rows)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param([], 2, "source: missing", id="no-source"),
        pytest.param(["source=/nowhere"], 3, "names no picture", id="nothing-there"),
        pytest.param(["source=test", "out=x.txt"], 2, "ends with none of", id="format"),
        pytest.param(["source=test", "out=none/x.csv"], 2, "there is no folder", id="folder"),
        pytest.param(["source=test", "top_k=0"], 2, "top_k", id="top-k"),
        pytest.param(["source=test", "device=tpu"], 2, "device", id="device"),
        pytest.param(["source=test", "save=embeddings:fc"], 2, "no such module", id="module"),
        pytest.param(["source=test", "checkpoint=x"], 4, "no such checkpoint", id="checkpoint"),
        pytest.param(
            ["source=test", "model.widths=[4,8]"],
            4,
            "best.pt: does not fit the model",
            id="architecture",
        ),
        pytest.param(["source=predict"], 2, "data.predict", id="no-split"),
        pytest.param(["source=test", "loader.batchsize=3"], 2, "batch_size", id="unknown-key"),
        pytest.param(["source=test", "strategy.name=fsdp"], 2, "put together for it", id="fsdp"),
    ],
)
def test_mistakes_write_nothing(predict, whole, tmp_path, arguments, code, said):
    done = predict([f"run={whole}", *arguments], folder=tmp_path)
    assert done.code == code, done.err
    assert said in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [[], ["strategy.name=ddp", "strategy.devices=2"]])
def test_a_run_is_asked_on_one_device_however_it_was_trained(tmp_path, more):
    trained = ["strategy=fsdp", "strategy.devices=4", "strategy.wrap_modules=[BasicBlock]"]
    trained += ["strategy.sharded_checkpoint=true", "strategy.accelerator=cpu"]
    composed = compose(parse_arguments(["experiment=resnet18", *trained]))
    text = Request(composed.config, composed.overrides, {}, []).config_text()
    (tmp_path / "config.yaml").write_text(text)
    arguments = parse_arguments([f"run={tmp_path}", "source=test", *more])
    options, overrides = take_apart(arguments)
    strategy = compose(of_run(arguments, options.run, overrides)).config["strategy"]
    expected = {"name": "ddp", "devices": 2} if more else {"name": "single", "devices": "auto"}
    assert strategy["accelerator"] == "cpu"
    assert strategy["wrap_modules"] is None
    assert expected.items() <= strategy.items()


def test_pictures_are_drawn_with_their_labels(predict, whole, pictures, tmp_path):
    done = predict([f"run={whole}", f"source={pictures}/3", "draw=true", f"out={tmp_path}/a.csv"])
    assert done.code == 0, done.err
    done = predict([f"run={whole}", "source=test", "draw=true", f"out={tmp_path}/b.csv"])
    assert done.code == 0, done.err
    for name in ("a", "b"):
        drawn = sorted((tmp_path / f"{name}_pictures").iterdir())
        assert len(drawn) == len(read_csv(tmp_path / f"{name}.csv"))
        with Image.open(drawn[0]) as picture:
            label = np.array(picture)[-14:]
            assert label.min() < 128 < label.max()


def test_a_table_is_not_replaced_unless_asked(predict, whole, tmp_path):
    (tmp_path / "predictions.csv").write_text("mine")
    done = predict([f"run={whole}", "source=test"], folder=tmp_path)
    assert done.code == 2
    assert "overwrite=true" in done.error
    assert (tmp_path / "predictions.csv").read_text() == "mine"
    done = predict([f"run={whole}", "source=test", "overwrite=true"], folder=tmp_path)
    assert done.code == 0
    assert len(read_csv(tmp_path / "predictions.csv")) == 270


def test_three_lines_of_python(whole, pictures):
    run = load_run(whole)
    files = sorted(str(path) for path in pictures.rglob("*.png"))
    rows = run.predict(files, top_k=2)
    _, expected = by_hand(whole, pictures)
    found = torch.tensor([row["probability"] for row in rows])
    torch.testing.assert_close(found, expected.max(1).values, atol=1e-6, rtol=0)
    assert [row["prediction"] for row in rows] == [str(n) for n in expected.argmax(1).tolist()]
    opened = [Image.open(file) for file in files[:3]]
    assert run.predict(opened, top_k=2) == run.predict(files[:3], top_k=2)
    assert run.predict([np.array(image) for image in opened], top_k=2) == run.predict(
        files[:3], top_k=2
    )


def test_a_run_in_python_has_config_metrics_model_and_data(whole):
    run = load_run(whole)
    assert run.config.trainer.max_epochs == 2
    logged = [line["val/accuracy"] for line in run.metrics if "val/accuracy" in line]
    model = run.model()
    assert not model.training
    hits = total = 0
    for images, labels in run.loader("val"):
        with torch.no_grad():
            hits += int((model(images).argmax(1) == labels).sum())
        total += len(labels)
    assert hits / total == pytest.approx(max(logged))
