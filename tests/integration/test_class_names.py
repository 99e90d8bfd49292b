"""The names of classes are those of the run, wherever its data are opened again."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

SMALL = [
    "experiment=resnet18",
    "model=mlp",
    "model.hidden=[8]",
    "transforms=basic",
    "data=image_folder",
    "data.image_size=8",
    "data.channels=1",
    "data.mean=[0.5]",
    "data.std=[0.5]",
    "loader.batch_size=8",
    "loader.num_workers=0",
    "optimizer.lr=0.05",
]
PETS = {"cat": 40, "dog": 210}  # how bright their pictures are


def write(root, split, names, count=8):
    """Write pictures that only their brightness tells apart."""
    draws = np.random.default_rng(0)
    for name, pet in names.items():
        folder = root / split / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = PETS[pet] + draws.integers(-30, 30, (8, 8))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")


@pytest.fixture(scope="module")
def pets(train, tmp_path_factory):
    """A run on cats and dogs, and its pictures: do not change them."""
    root = tmp_path_factory.mktemp("pets")
    for split in ("train", "val", "test"):
        write(root, split, {"cat": "cat", "dog": "dog"})
    limits = [f"data.root={root}", "trainer.max_epochs=4", f"run_dir={root / 'run'}"]
    train([*SMALL, *limits])
    return root


def renamed(root, old, new):
    for split in ("train", "val", "test"):
        (root / split / old).rename(root / split / new)


@pytest.fixture
def zebras(pets):
    """The run, whose cats are now called zebras, and sorted behind the dogs; later cats again."""
    renamed(pets, "cat", "zebra")
    yield pets
    renamed(pets, "zebra", "cat")


def test_renamed_classes_are_refused_wherever_a_run_is_used(train, zebras, tmp_path):
    run = zebras / "run"
    assert json.loads((run / "status.json").read_text())["results"]["test/accuracy"] == 1.0
    facts = (run / "inference.json").read_text()
    told = train([f"run={run}"], 3, command="evaluate").error
    assert "data.test: its classes are not those that the run was trained on" in told
    assert "'zebra' among them" in told
    words = [f"run={run}", "source=val", f"out={tmp_path / 'p.csv'}"]
    assert "data.val: its classes" in train(words, 3, command="predict").error
    longer = [*SMALL, f"data.root={zebras}", "trainer.max_epochs=5"]
    told = train([*longer, f"run_dir={run}", "resume=auto"], 4).error
    assert "resume: data.train: its classes are not those" in told
    last = run / "checkpoints" / "last.pt"  # into another run
    told = train([*longer, f"run_dir={tmp_path / 'new'}", f"resume={last}"], 4).error
    assert "resume: data.train: its classes are not those" in told
    assert (run / "inference.json").read_text() == facts


def test_numbers_follow_the_names_of_the_run(train, pets, evaluated, tmp_path):
    write(tmp_path, "train", {"dog": "dog"})
    write(tmp_path, "test", {"dog": "dog"})
    results = evaluated(pets / "run", f"data.test.root={tmp_path}")
    assert results["test/accuracy"] == 1.0  # by its own numbers a dog would be a cat
    train(
        [
            f"run={pets / 'run'}",
            "source=test",
            f"out={tmp_path / 'p.csv'}",
            f"data.test.root={tmp_path}",
        ],
        command="predict",
    )
    with open(tmp_path / "p.csv", newline="") as file:
        assert {row["prediction"] for row in csv.DictReader(file)} == {"dog"}


def test_a_key_that_feeds_nothing_does_not_test_the_old_data(train, pets, tmp_path):
    for command in ("evaluate", "predict"):
        words = [f"run={pets / 'run'}", f"data.root={tmp_path}"]
        more = ["source=test", f"out={tmp_path / 'p.csv'}"] if command == "predict" else []
        told = train([*words, *more], 2, command=command).error
        assert "data.root: feeds nothing in this run: data.test.root=..." in told
    stored = ["--config-dir", str(pets / "run"), "--config-name", "config"]
    assert "data.train.root=..." in train([*stored, f"data.root={tmp_path}"], 2).error
