"""Data sets that end processes, and parts that do not fit: one line, its code, never exit 0."""

import os
from pathlib import Path

import pytest
import yaml
from PIL import Image

QUICK = ["experiment=resnet18", "model=mlp", "callbacks=none", "trainer.max_steps=2"]
TABLE = yaml.safe_load((Path(__file__).parents[1] / "mistakes.yaml").read_text())

USERS = '''
import torch
from torch.utils.data import Dataset

from trainer.task import Task


class Signal(BaseException):
    pass


class Bad(Dataset):
    """Samples like the digits', of which number 7 raises what it is told to."""

    def __init__(self, raises=None, dtype="int64", when="sample", form="pair", **digits):
        if when == "start":
            raise SystemExit(0)
        self.raises, self.dtype, self.form = raises, getattr(torch, dtype), form

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 7 and self.raises:
            raise {"exit": SystemExit(0), "generator": GeneratorExit(), "base": Signal("on")}[
                self.raises
            ]
        image, label = torch.zeros(1, 16, 16), torch.tensor(index % 10, dtype=self.dtype)
        forms = {"dict": {"image": image, "label": label}, "words": (image, "cat"), "none": None}
        return forms.get(self.form, (image, label))


class Faulty(torch.nn.Module):
    def __init__(self, leave=False, **mlp):
        super().__init__()
        self.weight, self.leave = torch.nn.Parameter(torch.ones(1)), leave

    def forward(self, x):
        if self.leave:
            raise SystemExit(0)
        return self.weight.nonsense


class Narrow(torch.nn.Module):
    def __init__(self, num_classes, features):
        super().__init__()
        self.head = torch.nn.Linear(features, num_classes)

    def forward(self, images):
        return self.head(images.flatten(1))


class Nothing(Narrow):
    def forward(self, images):
        self.head(images.flatten(1))


class Endless:
    def __getitem__(self, index):
        return torch.zeros(1, 16, 16), 0


class Mapping(Task):
    def training_step(self, model, batch):
        images, labels = batch
        return {"loss": model(images).square().mean()}


class Stepless(Task):
    pass
'''


@pytest.fixture
def run(train, tmp_path):
    """Train beside a module of the user's own, `users.py`."""
    (tmp_path / "users.py").write_text(USERS)

    def go(*overrides):
        return train([*QUICK, *overrides, f"run_dir={tmp_path / 'run'}"], folder=tmp_path)

    return go


@pytest.mark.parametrize("row", [pytest.param(row, id=str(row[0])) for row in TABLE["runs"]])
def test_what_a_run_meets_is_one_line_with_its_code(run, tmp_path, row):
    overrides, code, *texts = row
    done = run(*overrides)
    assert done.code == code, done.err
    said = done.err if code == 1 else done.error
    assert [text for text in texts if text not in said] == []
    assert code != 2 or not (tmp_path / "run").exists()


def test_a_fault_in_the_users_own_model_is_shown_with_its_traceback(run):
    done = run("model={_target_: users.Faulty}")
    assert done.code == 1
    assert "users.py" in done.err
    assert done.err.count("error: ") == 1


@pytest.mark.parametrize("dry", ["dry_run=true", "dry_run=false"])
@pytest.mark.parametrize(
    ("override", "texts"),
    [
        pytest.param(
            "model={_target_: users.Narrow, num_classes: 10, features: 100}",
            ["users.Narrow.forward", "images=float32 [64, 1, 16, 16]", "in_features=256"],
            id="layer",
        ),
        pytest.param(
            "task={_target_: users.Mapping}",
            ["users.Mapping.training_step returned {loss: float32 []}", "return StepOutput(loss)"],
            id="dict",
        ),
    ],
)
def test_a_mistake_in_the_users_code_is_told_in_one_line(run, tmp_path, dry, override, texts):
    done = run(override, dry)
    assert done.code == 1, done.err
    assert done.err.count("Traceback (most recent call last)") == 1
    last = done.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert done.err.count("error: ") == 1
    assert [text for text in texts if text not in last] == []
    assert (tmp_path / "run").exists() == (dry == "dry_run=false")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        pytest.param("class Net(", "line 1, is not Python", id="syntax"),
        pytest.param("import nowhere_to_be_found", "install nowhere_to_be_found", id="import"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_its_target(run, tmp_path, text, named):
    (tmp_path / "broken.py").write_text(f"{text}\n")
    done = run("model={_target_: broken.Net}")
    assert done.code == 1, done.err
    assert done.err.count("Traceback (most recent call last)") == 1
    last = done.err.splitlines()[-1]
    assert named in last
    assert "broken.py, line 1" in last
    assert "imported for the _target_ 'broken.Net'" in last


def test_a_pipe_among_the_images_is_not_waited_for(train, tmp_path):
    root = tmp_path / "tree"
    for name in "ab":
        (root / "train" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (16, 16)).save(root / "train" / name / f"{number}.png")
    os.mkfifo(root / "train" / "b" / "pipe.png")
    pictures = ["data=image_folder", f"data.root={root}", "data.image_size=16"]
    done = train([*QUICK, *pictures, "loader.batch_size=8", f"run_dir={tmp_path / 'run'}"])
    assert done.code == 3, done.err
    assert "pipe.png" in done.error
    assert "not a regular file" in done.error


def test_a_run_that_begins_again_has_the_configuration_that_it_ran_with(run, tmp_path):
    assert run("data.train={_target_: users.Bad, raises: exit}").code == 3
    done = run("seed=3", "resume=auto")
    assert done.code == 0, done.err
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["seed"], config["data"]["train"]["_target_"]) == (3, "data.sources.Digits")
    assert "seed=3" in yaml.safe_load((tmp_path / "run" / "overrides.yaml").read_text())
