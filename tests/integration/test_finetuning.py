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
    three = ["data=image_folder", f"data.root={images}", "data.channels=1", "data.image_size=16"]
    three += ["data.mean=[0.3]", "data.std=[0.3]", "transforms=basic", "loader.batch_size=16"]
    run_dir = tmp_path / "tuned"
    base = tmp_path / "base"  # of one epoch on all ten digits
    train([*BASE, "trainer.max_epochs=1", f"run_dir={base}"])
    tuned = [BASE[0], "model=finetune", "model@model.model=small_cnn", f"model.weights={base}"]
    line = [*tuned, *three, f"run_dir={run_dir}"]
    train([*line, "trainer.max_epochs=2"])
    log = (run_dir / "train.log").read_text()
    assert f"initial weights {base}: 18 tensors loaded; resized: head.weight, head.bias" in log
    saved = torch.load(run_dir / "checkpoints" / "last.pt", weights_only=True)
    assert saved["model"]["head.weight"].shape[0] == 3

    # Once trained, a run needs neither the weights nor the network that it began from.
    shutil.rmtree(base)
    again = evaluated(run_dir)
    last = logged(run_dir)[-1]
    assert [again[key] == last[key] for key in ("test/accuracy", "test/loss")] == [True, True]
    train([*line, "trainer.max_epochs=3", "resume=auto"])
    assert max(line["step"] for line in logged(run_dir)) == 3 * 6


@pytest.mark.slow
def test_photographs_with_a_pretrained_network(train, digit_photographs, tmp_path):
    """In one line, here with weights from a file and few of them."""
    weights = tmp_path / "resnet18.pt"
    torch.manual_seed(1)
    trained = torchvision.models.resnet18().state_dict()
    torch.save(trained, weights)
    run_dir = tmp_path / "run"
    line = ["experiment=images_finetune", f"data.root={digit_photographs}", "data.image_size=32"]
    line += ["model.model.name=resnet18", "loader.num_workers=0", "trainer.max_epochs=2"]
    line += ["trainer.log_every_n_steps=1", f"run_dir={run_dir}"]
    gone = train([*line, "model.weights=gone.pt"], 2)
    assert "model.weights: no file gone.pt; it takes a .pt or .safetensors file" in gone.error
    train([*line, f"model.weights={weights}"])
    assert "resized: fc.weight, fc.bias" in (run_dir / "train.log").read_text()
    rates = [line for line in logged(run_dir) if "lr/head" in line]
    assert rates
    for line in rates:
        assert line["lr/head"] == pytest.approx(10 * line["lr/default"])
    saved = torch.load(run_dir / "checkpoints" / "last.pt", weights_only=True)["model"]
    assert saved.keys() == trained.keys()
    same = {name for name in saved if torch.equal(saved[name], trained[name])}
    assert same == {name for name in saved if "bn" in name or "downsample.1" in name}


def test_a_table_is_learned_and_predicted_for(train, tmp_path):
    houses, new, out = (tmp_path / f"{name}.csv" for name in ("houses", "new", "answers"))
    drawn = np.random.default_rng(0).integers(1, 9, (120, 2)).tolist()
    rows = "".join(f"{r},t{t},{10 * r + 5 * t}\n" for r, t in drawn)
    houses.write_text(f"rooms,town,price\n{rows}")
    new.write_text("town,rooms\nt3,5\nt1,8\n")
    run_dir = tmp_path / "run"
    table = ["experiment=regression", "data=table", f"data.path={houses}", "data.target=price"]
    wrong = train([*table, f"run_dir={run_dir}", "data.channels=3"], 3)
    assert wrong.error.endswith("set data.channels=9")
    train([*table, "data.channels=9", "trainer.max_epochs=40", f"run_dir={run_dir}"])
    train([f"run={run_dir}", f"source={new}", f"out={out}"], command="predict")
    with out.open() as file:
        answers = {row["file"]: float(row["prediction"]) for row in csv.DictReader(file)}
    # In the file's own units.
    assert answers == pytest.approx({f"{new}:2": 65, f"{new}:3": 85}, abs=8)
