"""Trained weights carried into another run, averages of them, and data in others' formats."""

import csv
import importlib.util
import io
import shutil
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from same_run import logged
from toy_pictures import write_digits

BASE = ["experiment=resnet18", "model=small_cnn", "trainer.log_every_n_steps=1"]
TUNED = [BASE[0], "model=finetune", "model@model.model=small_cnn", BASE[2]]


@pytest.fixture(scope="module")
def base(train, tmp_path_factory):
    """A run of one epoch on all ten digits."""
    folder = tmp_path_factory.mktemp("base") / "run"
    run = train([*BASE, "trainer.max_epochs=1", f"run_dir={folder}"])
    assert run.code == 0, run.err
    return folder


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Overrides for three of the digits as files: another number of classes."""
    root = tmp_path_factory.mktemp("three")
    write_digits(root, {"train": 30, "val": 15, "test": 15}, 3, size=16, named="digit {}")
    shape = ["data.channels=1", "data.image_size=16", "data.mean=[0.3]", "data.std=[0.3]"]
    batches = ["transforms=basic", "loader.batch_size=16"]
    return ["data=image_folder", f"data.root={root}", *shape, *batches]


def weights(folder, name="last"):
    payload = torch.load(folder / "checkpoints" / f"{name}.pt", weights_only=True)
    return payload["model"]


def values(folder, key):
    return [line[key] for line in logged(folder) if key in line]


def last(folder, key):
    return values(folder, key)[-1]


def test_a_run_s_weights_for_other_classes(train, evaluated, base, three, tmp_path) -> None:
    run_dir = tmp_path / "tuned"
    moved = tmp_path / "base"
    shutil.copytree(base, moved)
    line = [*TUNED, f"model.weights={moved}", *three, "trainer.max_epochs=2", f"run_dir={run_dir}"]
    run = train(line)
    assert run.code == 0, run.err
    log = (run_dir / "train.log").read_text()
    assert f"initial weights {moved}: 18 tensors loaded; resized: head.weight, head.bias" in log
    assert weights(run_dir)["head.weight"].shape[0] == 3

    # Once trained, a run needs neither the weights nor the network that it began from.
    shutil.rmtree(moved)
    again = evaluated(run_dir)
    assert again["test/accuracy"] == last(run_dir, "test/accuracy")
    assert again["test/loss"] == last(run_dir, "test/loss")
    more = [override for override in line if not override.startswith("trainer.max_epochs")]
    resumed = train([*more, "trainer.max_epochs=3", "resume=auto"])
    assert resumed.code == 0, resumed.err
    assert max(values(run_dir, "step")) == 3 * 6


@pytest.mark.parametrize(
    ("callback", "overrides"),
    [
        pytest.param("ema", ["callbacks.ema.decay=0.9"], id="ema"),
        pytest.param("swa", ["callbacks.swa.start_epoch=1"], id="swa"),
    ],
)
def test_an_average_is_what_is_evaluated(train, evaluated, tmp_path, callback, overrides) -> None:
    run_dir = tmp_path / "run"
    common = [*BASE, "trainer.max_epochs=3", "callbacks.checkpoint.save_weights=true"]
    run = train([*common, f"callbacks=[default,{callback}]", *overrides, f"run_dir={run_dir}"])
    assert run.code == 0, run.err
    assert f"the average of callbacks.{callback}" in run.out
    plain = train([*common, f"run_dir={tmp_path / 'plain'}"])
    assert plain.code == 0, plain.err
    # The same training, evaluated with other weights.
    assert last(run_dir, "train/loss") == last(tmp_path / "plain", "train/loss")
    assert last(run_dir, "val/loss") != last(tmp_path / "plain", "val/loss")
    # Validated, saved for others and tested: always the average.
    assert evaluated(run_dir)["test/loss"] == last(run_dir, "test/loss")
    again = evaluated(run_dir, "split=val", "checkpoint=last")
    assert again["val/loss"] == last(run_dir, "val/loss")

    tuned = tmp_path / "tuned"
    line = [*TUNED, f"model.weights={run_dir}", "optimizer.lr=0", "lr_scheduler=constant"]
    run = train([*line, "trainer.max_steps=1", "model.checkpoint=last", f"run_dir={tuned}"])
    assert run.code == 0, run.err
    assert "loading the average of the weights" in (tuned / "train.log").read_text()
    average, given = weights(run_dir)["head.weight"], weights(tuned)["head.weight"]
    assert not torch.equal(average, given)


SHORT = ["trainer.max_epochs=2", "loader.num_workers=0", "callbacks.early_stopping=null"]


PIXEL = io.BytesIO()
Image.new("RGB", (8, 8)).save(PIXEL, "PNG")
PIXEL = PIXEL.getvalue()


@pytest.fixture(scope="module")
def houses(tmp_path_factory):
    drawn = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("houses") / "houses.csv"
    rows = [(r, t, 10 * r + 5 * t) for r, t in drawn.integers(1, 9, (120, 2)).tolist()]
    path.write_text("rooms,town,price\n" + "".join(f"{r},t{t},{p}\n" for r, t, p in rows))
    return path


def test_a_table_is_learned_and_predicted_for(train, houses, tmp_path):
    run_dir = tmp_path / "run"
    table = ["data=table", f"data.path={houses}", "data.target=price", f"run_dir={run_dir}"]
    wrong = train(["experiment=regression", *table, "data.channels=3"])
    assert wrong.code == 3
    assert wrong.error.endswith("set data.channels=9")
    asked = ["data.channels=9", *SHORT, "trainer.max_epochs=40"]
    done = train(["experiment=regression", *table, *asked])
    assert done.code == 0, done.err
    houses.with_name("new.csv").write_text("town,rooms\nt3,5\nt1,8\n")
    new = houses.with_name("new.csv")
    out = tmp_path / "answers.csv"
    words = [f"run={run_dir}", f"source={new}", f"out={out}"]
    assert train(words, command="predict").code == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == [f"{new}:2", f"{new}:3"]
    answers = [float(row["prediction"]) for row in rows]
    assert answers == pytest.approx([65, 85], abs=8)  # in the file's own units


def test_a_dry_run_on_shards_writes_nothing(train, tmp_path):
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "train.tar", "w") as archive:
        for number in range(12):
            for name, content in (
                (f"{number}.png", PIXEL),
                (f"{number}.cls", b"%d" % (number % 2)),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    shards = ["experiment=resnet18", "data=shards", f"data.root={tmp_path}/data", "model=mlp"]
    done = train([*shards, "data.image_size=8", "dry_run=true"], folder=tmp_path)
    assert done.code == 0, done.err
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["train.tar"]


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the extra transformers is not installed",
)
def test_a_language_model_of_transformers_trains(train, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("to be or not to be, that is the question. " * 100)
    tiny = "{n_embd: 16, n_layer: 1, n_head: 2, n_positions: 32}"
    data = ["experiment=char_lm", "data=tokens", f"data.root={text}", "data.context=32"]
    model = ["model=transformers", "model.name=gpt2", "model.auto=AutoModelForCausalLM"]
    model += [f"model.config={tiny}", "optimizer=adamw", "optimizer.lr=0.01"]
    done = train([*data, *model, *SHORT, f"run_dir={tmp_path / 'run'}"])
    assert done.code == 0, done.err
    losses = values(tmp_path / "run", "train/epoch_loss")
    assert losses[-1] < losses[0] < 5.6  # it begins at log(256)
