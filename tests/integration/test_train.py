"""`train` and `evaluate` from the command line, on real digits, and on parts that do not fit."""

import json
import re
from pathlib import Path

import pytest
import yaml

from same_run import differences, logged, repeated_steps

QUICK = ["experiment=resnet18", "model=mlp", "optimizer=sgd_nesterov", "trainer.max_epochs=2"]


@pytest.fixture(scope="module")
def finished(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    return train([*QUICK, "callbacks=[default,ema]", f"run_dir={folder}"]), folder


def test_files_of_a_run(finished):
    _, folder = finished
    names = "config.yaml overrides.yaml inference.json manifest.json train.log status.json"
    expected = {*names.split(), "metrics.jsonl", "tensorboard", "checkpoints"}
    assert {path.name for path in folder.iterdir()} - {".lock"} == expected
    checkpoints = {path.name for path in (folder / "checkpoints").iterdir()}
    assert {"last.pt", "best.pt", "index.json", "step-00000040.pt"} <= checkpoints
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["run_dir"] is config["resume"] is config["dry_run"] is None
    assert config["lr_scheduler"]["total_steps"] == "${total_steps}"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["seed"], manifest["exit"]["code"]) == (0, 0)
    assert repeated_steps(folder) == []
    keys = "train/loss val/loss val/accuracy test/accuracy lr/default time/samples_per_second"
    assert {*keys.split()} <= {key for line in logged(folder) for key in line}


def test_the_closing_block_names_the_next_steps(finished):
    run, folder = finished
    for text in (str(folder), "val/accuracy", "tensorboard --logdir", f"evaluate run={folder}"):
        assert text in run.out
    assert "the average of callbacks.ema" in run.out
    assert "error:" not in run.err
    versions, device, *lines = run.err.splitlines()
    assert re.fullmatch(r"regimen \S+, torch \S+", versions)
    assert re.fullmatch(r"device: .+, threads: \d+", device)
    assert not any("regimen 0." in line for line in lines)
    assert 0 < max(len(line) for line in lines if line.startswith("epoch ")) <= 100


def test_evaluate_repeats_the_figures(finished, evaluated):
    """Those of the average: it is what was validated, and is tested."""
    _, folder = finished
    found = [evaluated(folder), evaluated(folder, "split=val", "checkpoint=last")]
    (folder / "evaluation.json").unlink()
    lines = [line for line in logged(folder) if "test/loss" in line or "val/loss" in line]
    for again, line in zip(found, (lines[-1], lines[-2]), strict=True):
        figures = {key: line[key] for key in line if key.endswith(("/loss", "/accuracy"))}
        assert figures.items() <= again.items()


def test_a_run_repeats_from_its_own_config(finished, train, tmp_path):
    _, folder = finished
    arguments = ["--config-dir", str(folder), "--config-name", "config"]
    train([*arguments, f"run_dir={tmp_path / 'again'}"])
    assert differences(folder, tmp_path / "again") == []


REFUSED = [
    "+callbacks.unfreeze._target_=callbacks.unfreeze.Unfreeze",
    "+callbacks.unfreeze.stages={a:{pattern:x}}",
]


@pytest.mark.parametrize("options", [[], ["run_dir=run"], ["run_dir=here"]])
def test_a_mistake_that_only_the_built_run_shows_leaves_nothing(train, tmp_path, options):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes.txt").write_text("the user's own")
    run = train([*QUICK, *REFUSED, *options], 2, folder=tmp_path)
    assert run.err.count("error: ") == 1
    assert "callbacks.unfreeze.stages.a.pattern=x: matches no parameter" in run.err
    assert {path.name for path in tmp_path.rglob("*")} == {"here", "notes.txt"}


SHORT = ["experiment=resnet18", "model=mlp", "callbacks=none", "trainer.max_steps=2"]
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


@pytest.mark.parametrize("row", [pytest.param(row, id=str(row[0])) for row in TABLE["runs"]])
def test_what_a_run_meets_is_one_line_with_its_code(train, tmp_path, row):
    """Beside a module of the user's own, and two that cannot be imported."""
    (tmp_path / "users.py").write_text(USERS)
    (tmp_path / "broken.py").write_text("class Net(\n")
    (tmp_path / "lacking.py").write_text("import nowhere_to_be_found\n")
    overrides, code, *texts = row
    done = train([*SHORT, "run_dir=run", *overrides], code, folder=tmp_path)
    said = done.err.splitlines()[-1] if code == 1 else done.error
    assert [text for text in texts if text not in said] == []
    assert done.err.count("error: ") == 1
    assert done.err.count("Traceback (most recent call last)") == (code == 1)
    if code == 2 or (code == 1 and "dry_run=true" in overrides):
        assert not (tmp_path / "run").exists()
