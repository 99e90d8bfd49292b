"""The CIFAR-10 recipes for a few updates, on JPEG files made from digits."""

import json

import pytest
import torch

SMALL = [
    "data=cifar10_folder",
    "data.val_fraction=0.1",
    "model.widths=[8,16,16]",
    "loader.batch_size=30",
    "trainer.max_epochs=3",
    "trainer.compile=false",
    "callbacks.whitening.samples=60",
]


@pytest.mark.parametrize("experiment", ["cifar10_fast", "airbench94"])
def test_a_recipe_trains_on_a_cpu(train, digit_photographs, tmp_path, experiment):
    places = [f"data.root={digit_photographs}", f"run_dir={tmp_path / 'run'}"]
    run = train([f"experiment={experiment}", *SMALL, *places])
    assert run.code == 0, run.err
    text = (tmp_path / "run/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    losses = [line["train/epoch_loss"] for line in lines if "train/epoch_loss" in line]
    assert losses[-1] < losses[0]
    assert {"val/accuracy", "test/accuracy"} <= {key for line in lines for key in line}
    weights = torch.load(tmp_path / "run/checkpoints/last.pt", weights_only=True)["model"]
    assert torch.equal(weights["whiten.weight"][:12], -weights["whiten.weight"][12:])
    assert weights["whiten.bias"].abs().min() > 0
