"""Trained weights carried into another run, and data in others' formats."""

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
def trained(train):
    """Run `train` in a run directory."""
    return lambda line, run_dir: train([*line, f"run_dir={run_dir}"])


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Overrides for three of the digits as files: another number of classes."""
    root = tmp_path_factory.mktemp("three")
    write_digits(root, {"train": 30, "val": 15, "test": 15}, 3, size=16, named="digit {}")
    shape = ["data.channels=1", "data.image_size=16", "data.mean=[0.3]", "data.std=[0.3]"]
    batches = ["transforms=basic", "loader.batch_size=16"]
    return ["data=image_folder", f"data.root={root}", *shape, *batches]


def values(folder, key):
    return [line[key] for line in logged(folder) if key in line]


def test_a_run_s_weights_for_other_classes(trained, evaluated, three, tmp_path) -> None:
    run_dir, base = tmp_path / "tuned", tmp_path / "base"  # of one epoch on all ten digits
    trained([*BASE, "trainer.max_epochs=1"], base)
    line = [*TUNED, f"model.weights={base}", *three]
    trained([*line, "trainer.max_epochs=2"], run_dir)
    log = (run_dir / "train.log").read_text()
    assert f"initial weights {base}: 18 tensors loaded; resized: head.weight, head.bias" in log
    saved = torch.load(run_dir / "checkpoints" / "last.pt", weights_only=True)
    assert saved["model"]["head.weight"].shape[0] == 3

    # Once trained, a run needs neither the weights nor the network that it began from.
    shutil.rmtree(base)
    again = evaluated(run_dir)
    for key in ("test/accuracy", "test/loss"):
        assert again[key] == values(run_dir, key)[-1]
    trained([*line, "trainer.max_epochs=3", "resume=auto"], run_dir)
    assert max(values(run_dir, "step")) == 3 * 6


SHORT = ["trainer.max_epochs=2", "loader.num_workers=0", "callbacks.early_stopping=null"]


def test_a_table_is_learned_and_predicted_for(train, trained, tmp_path):
    houses, new, out = (tmp_path / f"{name}.csv" for name in ("houses", "new", "answers"))
    drawn = np.random.default_rng(0).integers(1, 9, (120, 2)).tolist()
    rows = "".join(f"{r},t{t},{10 * r + 5 * t}\n" for r, t in drawn)
    houses.write_text(f"rooms,town,price\n{rows}")
    new.write_text("town,rooms\nt3,5\nt1,8\n")
    run_dir = tmp_path / "run"
    table = ["experiment=regression", "data=table", f"data.path={houses}", "data.target=price"]
    wrong = train([*table, f"run_dir={run_dir}", "data.channels=3"], 3)
    assert wrong.error.endswith("set data.channels=9")
    trained([*table, "data.channels=9", *SHORT, "trainer.max_epochs=40"], run_dir)
    train([f"run={run_dir}", f"source={new}", f"out={out}"], command="predict")
    with out.open() as file:
        answers = {row["file"]: float(row["prediction"]) for row in csv.DictReader(file)}
    # In the file's own units.
    assert answers == pytest.approx({f"{new}:2": 65, f"{new}:3": 85}, abs=8)


def test_a_dry_run_on_shards_writes_nothing(train, tmp_path):
    pixel = io.BytesIO()
    Image.new("RGB", (8, 8)).save(pixel, "PNG")
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "train.tar", "w") as archive:
        for number in range(12):
            for kind, content in (("png", pixel.getvalue()), ("cls", b"%d" % (number % 2))):
                member = tarfile.TarInfo(f"{number}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    shards = ["experiment=resnet18", "data=shards", f"data.root={tmp_path}/data", "model=mlp"]
    train([*shards, "data.image_size=8", "dry_run=true"], folder=tmp_path)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["train.tar"]


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the extra transformers is not installed",
)
def test_a_language_model_of_transformers_trains(trained, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("to be or not to be, that is the question. " * 100)
    tiny = "{n_embd: 16, n_layer: 1, n_head: 2, n_positions: 32}"
    data = ["experiment=char_lm", "data=tokens", f"data.root={text}", "data.context=32"]
    model = ["model=transformers", "model.name=gpt2", "model.auto=AutoModelForCausalLM"]
    model += [f"model.config={tiny}", "optimizer=adamw", "optimizer.lr=0.01"]
    trained([*data, *model, *SHORT], tmp_path / "run")
    losses = values(tmp_path / "run", "train/epoch_loss")
    assert losses[-1] < losses[0] < 5.6  # it begins at log(256)
