"""The recipes of docs/recipes.md, done as they stand there, with few epochs."""

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
QUICKER = {  # which networks and how many jobs is no part of a recipe
    "experiment=resnet18 run_dir": "experiment=resnet18 model=mlp run_dir",
    "data.fold=0,1,2,3,4": "data.fold=0,1",
}
FEW = ["trainer.max_epochs=2", "loader.num_workers=0", "loader.batch_size=16"]
pytestmark = pytest.mark.slow


@pytest.fixture
def done(train, tmp_path):
    """Write a section's files, run its commands, and return its folder."""

    def do(title, *more):
        for kind, text in re.findall(r"```(\w+)\n(.*?)```", SECTIONS[title], re.DOTALL):
            if kind in ("python", "yaml"):
                path = tmp_path / text.partition("\n")[0].removeprefix("# ")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
                continue
            for large, small in QUICKER.items():
                text = text.replace(large, small)
            for line in text.splitlines():
                words = shlex.split(line.partition(" # ")[0])
                if words[0] == "python":
                    said = subprocess.run(
                        [sys.executable, *words[1:-2]], cwd=tmp_path, stdout=subprocess.PIPE
                    )
                    assert said.returncode == 0
                    (tmp_path / words[-1]).write_bytes(said.stdout)
                    continue
                if words[0] == "xargs":
                    *words, _, path = words[1:]
                    words += (tmp_path / path).read_text().split()
                limits = [*FEW, *more] if words[0] == "train" else []
                train([*words[1:], *limits], folder=tmp_path, command=words[0])
        return tmp_path

    return do


def _last(folder, key):
    """Return the last value of a key in the newest run of a folder."""
    files = sorted(folder.rglob("metrics.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    lines = [json.loads(line) for line in files[-1].read_text().splitlines()]
    return [line[key] for line in lines if key in line][-1]


def test_a_tag_for_each_word(done):
    folder = done("A tag for each word", "trainer.max_epochs=15", "optimizer.lr=0.02")
    assert len(list(folder.rglob("config.yaml"))) == 2
    assert _last(folder, "val/token_accuracy") > 0.9


def test_forecasts_are_in_the_units_of_the_series(done):
    folder = done("Forecasts with scaled targets", "trainer.max_epochs=20")
    with open(folder / "forecast.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 100 - 24 - 6 + 1
    numbers = [float(n) for row in rows for n in re.findall(r"-?\d+\.\d+", str(row))]
    assert 15 < np.mean(numbers) < 25


def test_a_student_learns_from_a_teacher(done):
    folder = done("Distillation")
    assert _last(folder, "train/loss_teacher") > 0
    assert _last(folder, "train/loss_labels") > 0
    assert _last(folder, "val/accuracy") > 0.1


def test_folds_of_ones_own_data(done):
    folder = done("Folds of data of your own", "sweep.report=false")
    (board,) = folder.rglob("leaderboard.csv")
    with open(board, newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["data.fold"] for row in rows) == ["0", "1"]
    assert {row["status"] for row in rows} == {"finished"}


def test_weights_that_balance_classes(done):
    folder = done("Class weights: balanced")
    name, _, values = (folder / "weights.txt").read_text().strip().partition("=")
    weights = json.loads(values)
    assert name == "task.loss.weight.values"
    assert len(weights) == 10
    assert np.allclose(weights, 1, atol=0.1)  # the digits are nearly balanced
    assert len(np.unique(load_digits().target)) == len(weights)
