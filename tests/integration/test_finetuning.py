"""Trained weights carried into another run, and data in others' formats."""

import csv
import shutil

import numpy as np
import pytest
import torch
import torchvision

from same_run import logged
from toy_pictures import write_digits

BASE = ["experiment=resnet18", "model=small_cnn", "trainer.log_every_n_steps=1"]


def test_a_run_s_weights_for_other_classes(train, evaluated, tmp_path):
    counts = {"train": 30, "val": 15, "test": 15}
    images = write_digits(tmp_path / "three", counts, 3, size=16, named="digit {}")
    base = tmp_path / "base"  # of one epoch on all ten digits
    train([*BASE, "trainer.max_epochs=1", f"run_dir={base}"])
    run_dir = tmp_path / "tuned"
    words = [
        "experiment=resnet18",
        "model=finetune",
        "model@model.model=small_cnn",
        f"model.weights={base}",
        "data=image_folder",
        f"data.root={images}",
        "data.channels=1",
        "data.image_size=16",
        "data.mean=[0.3]",
        "data.std=[0.3]",
        "transforms=basic",
        "loader.batch_size=16",
        f"run_dir={run_dir}",
    ]

    train([*words, "trainer.max_epochs=2"])

    log = (run_dir / "train.log").read_text()
    assert f"initial weights {base}: 18 tensors loaded; resized: head.weight, head.bias" in log
    saved = torch.load(run_dir / "checkpoints" / "last.pt", weights_only=True)
    assert saved["model"]["head.weight"].shape[0] == 3

    # Once trained, a run needs neither the weights nor the network that it began from.
    shutil.rmtree(base)
    again = evaluated(run_dir)
    last = logged(run_dir)[-1]
    assert again["test/accuracy"] == last["test/accuracy"]
    assert again["test/loss"] == last["test/loss"]
    train([*words, "trainer.max_epochs=3", "resume=auto"])
    assert max(line["step"] for line in logged(run_dir)) == 3 * 6


@pytest.mark.slow
def test_photographs_with_a_pretrained_network(train, digit_photographs, tmp_path):
    """In one line, here with weights from a file and few of them."""
    weights = tmp_path / "resnet18.pt"
    torch.manual_seed(1)
    trained = torchvision.models.resnet18().state_dict()
    torch.save(trained, weights)
    run_dir = tmp_path / "run"
    words = [
        "experiment=images_finetune",
        f"data.root={digit_photographs}",
        "data.image_size=32",
        "model.model.name=resnet18",
        "loader.num_workers=0",
        "trainer.max_epochs=2",
        "trainer.log_every_n_steps=1",
        f"run_dir={run_dir}",
    ]

    gone = train([*words, "model.weights=gone.pt"], 2)
    train([*words, f"model.weights={weights}"])

    assert "model.weights: no file gone.pt; it takes a .pt or .safetensors file" in gone.error
    assert "resized: fc.weight, fc.bias" in (run_dir / "train.log").read_text()
    rates = [line for line in logged(run_dir) if "lr/head" in line]
    assert rates
    for line in rates:
        assert line["lr/head"] == pytest.approx(10 * line["lr/default"])
    saved = torch.load(run_dir / "checkpoints" / "last.pt", weights_only=True)["model"]
    assert saved.keys() == trained.keys()
    unchanged = {name for name in saved if torch.equal(saved[name], trained[name])}
    norms = {name for name in saved if "bn" in name or "downsample.1" in name}
    assert unchanged == norms


def test_a_table_is_learned_and_predicted_for(train, tmp_path):
    """A price of 10 for each room and 5 for the number of the town."""
    houses = tmp_path / "houses.csv"
    lines = ["rooms,town,price"]
    for rooms, town in np.random.default_rng(0).integers(1, 9, (120, 2)):
        lines.append(f"{rooms},t{town},{10 * rooms + 5 * town}")
    houses.write_text("\n".join(lines) + "\n")
    new = tmp_path / "new.csv"
    new.write_text("town,rooms\nt3,5\nt1,8\n")
    out = tmp_path / "answers.csv"
    run_dir = tmp_path / "run"
    words = ["experiment=regression", "data=table", f"data.path={houses}", "data.target=price"]

    wrong = train([*words, f"run_dir={run_dir}", "data.channels=3"], 3)
    train([*words, "data.channels=9", "trainer.max_epochs=40", f"run_dir={run_dir}"])
    train([f"run={run_dir}", f"source={new}", f"out={out}"], command="predict")

    assert wrong.error.endswith("set data.channels=9")
    with out.open() as file:
        answers = {row["file"]: float(row["prediction"]) for row in csv.DictReader(file)}
    # In the file's own units.
    assert answers == pytest.approx({f"{new}:2": 65, f"{new}:3": 85}, abs=8)
