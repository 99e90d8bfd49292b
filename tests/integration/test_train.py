"""`train` and `evaluate` from the command line, on real digits, and on parts that do not fit."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from toy_pictures import write_digits

QUICK = ["experiment=resnet18", "model=mlp", "optimizer=sgd_nesterov", "trainer.max_epochs=2"]


@pytest.fixture(scope="module")
def finished(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    run = train([*QUICK, f"run_dir={folder}"])
    assert run.code == 0, run.err
    return run, folder


def log_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def learned(folder):
    """The log without wall-clock facts."""
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))}
        for line in log_of(folder)
    ]


def test_files_of_a_run(finished):
    _, folder = finished
    found = {path.name for path in folder.iterdir()} - {".lock"}
    assert found == {
        "config.yaml",
        "overrides.yaml",
        "inference.json",
        "manifest.json",
        "train.log",
        "status.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
    }
    checkpoints = {path.name for path in (folder / "checkpoints").iterdir()}
    assert {"last.pt", "best.pt", "index.json", "step-00000040.pt"} <= checkpoints
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["run_dir"] is config["resume"] is config["dry_run"] is None
    assert config["lr_scheduler"]["total_steps"] == "${total_steps}"
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["seed"] == 0
    assert manifest["exit"]["code"] == 0


def test_metrics_are_logged_once(finished):
    _, folder = finished
    pairs = [(line["step"], key) for line in log_of(folder) for key in line if "/" in key]
    assert len(pairs) == len(set(pairs))
    keys = {key for _, key in pairs}
    expected = {"train/loss", "val/loss", "val/accuracy", "test/accuracy", "lr/default"}
    assert expected | {"time/samples_per_second"} <= keys


def test_the_closing_block_names_the_next_steps(finished):
    run, folder = finished
    for text in (str(folder), "val/accuracy", "tensorboard --logdir", f"evaluate run={folder}"):
        assert text in run.out
    assert "error:" not in run.err
    versions, *_ = run.err.splitlines()
    assert re.fullmatch(r"regimen \S+ · torch \S+ · (\w+, )?\d+ threads?", versions)
    assert run.err.count("regimen 0.") == 1
    epochs = [line for line in run.err.splitlines() if line.startswith("epoch ")]
    assert epochs
    assert max(map(len, epochs)) <= 100


def test_evaluate_repeats_the_figures(finished):
    _, folder = finished
    command = [sys.executable, "-m", "scripts.evaluate", f"run={folder}"]
    subprocess.run(command, check=True, capture_output=True)
    again = json.loads((folder / "evaluation.json").read_text())
    (folder / "evaluation.json").unlink()
    tested = log_of(folder)[-1]
    assert (again["test/accuracy"], again["test/loss"]) == (
        tested["test/accuracy"],
        tested["test/loss"],
    )


def test_a_run_repeats_from_its_own_config(finished, train, tmp_path):
    _, folder = finished
    arguments = ["--config-dir", str(folder), "--config-name", "config"]
    run = train([*arguments, f"run_dir={tmp_path / 'again'}"])
    assert run.code == 0, run.err
    assert learned(tmp_path / "again") == learned(folder)


def test_micro_batches_and_workers_change_nothing(finished, train, tmp_path):
    _, folder = finished
    split = ["trainer.gradient_accumulation_steps=3", "loader.num_workers=2"]
    run = train([*QUICK, *split, f"run_dir={tmp_path / 'split'}"])
    assert run.code == 0, run.err
    for mine, theirs in zip(learned(tmp_path / "split"), learned(folder), strict=True):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, rel=2e-3)


def test_a_dry_run_writes_its_plan_and_nothing_else(train, tmp_path):
    overrides = ["callbacks=[default,pruning]", "dry_run=true"]
    run = train([*QUICK, *overrides, f"run_dir={tmp_path / 'plan'}"])
    assert run.code == 0, run.err
    assert [path.name for path in (tmp_path / "plan").iterdir()] == ["plan.txt"]
    text = (tmp_path / "plan" / "plan.txt").read_text()
    for shown in (
        "64 = 1 device x 1 micro-batch x 64",
        "40 in all",
        "99,978",
        "SGD",
        "host memory",
        "callbacks.pruning prunes from step 10 to 30, every 5",
        "head.weight: 1,280 weights",
    ):
        assert shown in text
        assert shown in run.out


REFUSED = [
    "+callbacks.unfreeze._target_=callbacks.unfreeze.Unfreeze",
    "+callbacks.unfreeze.stages={a:{pattern:x}}",
]


@pytest.mark.parametrize("options", [[], ["run_dir=run"], ["run_dir=here"]])
def test_a_mistake_that_only_the_built_run_shows_leaves_nothing(train, tmp_path, options):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes.txt").write_text("the user's own")
    run = train([*QUICK, *REFUSED, *options], folder=tmp_path)
    assert run.code == 2
    assert run.err.count("error: ") == 1
    assert "callbacks.unfreeze.stages.a.pattern=x: matches no parameter" in run.err
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["notes.txt"]


def test_divergence_ends_the_run(train, tmp_path):
    run = train([*QUICK, "lr_scheduler=constant", "optimizer.lr=1e30", f"run_dir={tmp_path / 'x'}"])
    assert run.code == 5
    assert "optimizer.lr" in run.error
    assert json.loads((tmp_path / "x" / "status.json").read_text())["code"] == 5


@pytest.fixture(scope="module")
def image_tree(tmp_path_factory):
    """Real digits as image files, three classes, without a validation split."""
    root = tmp_path_factory.mktemp("images")
    return write_digits(root, {"train": 30, "test": 10}, 3, 16, colour=True, named="class {}")


FOLDER = ["model=mlp", "data=image_folder", "trainer.max_epochs=3", "loader.batch_size=16"]


@pytest.mark.parametrize(
    ("override", "code", "text"),
    [
        pytest.param("data.root=/nowhere", 3, "data.root", id="missing-root"),
        pytest.param("data.num_classes=2", 2, "data.num_classes", id="too-few-classes"),
        pytest.param("+model.num_classes=5", 2, "model.num_classes", id="wrong-head"),
        pytest.param("data=image_folder", 2, "data.root", id="no-root"),
    ],
)
def test_data_that_do_not_fit(train, image_tree, tmp_path, override, code, text):
    root = [] if override in ("data=image_folder",) else [f"data.root={image_tree}"]
    arguments = [*FOLDER, *root, "data.image_size=16", override, f"run_dir={tmp_path / 'run'}"]
    run = train(arguments)
    assert run.code == code, run.err
    assert text in run.error
    assert not (tmp_path / "run" / "manifest.json").exists() or code == 2


def test_a_broken_image_is_named(train, image_tree, tmp_path):
    broken = image_tree / "train" / "class 0" / "broken.png"
    broken.write_bytes(b"no image")
    try:
        run = train([*FOLDER, f"data.root={image_tree}", f"run_dir={tmp_path / 'run'}"])
    finally:
        broken.unlink()
    assert run.code == 3
    assert "broken.png" in run.error


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


@pytest.fixture
def misfit(train, tmp_path):
    """Train beside a module of the user's own, `users.py`."""
    (tmp_path / "users.py").write_text(USERS)

    def go(*overrides):
        return train([*SHORT, *overrides, f"run_dir={tmp_path / 'run'}"], folder=tmp_path)

    return go


@pytest.mark.parametrize("row", [pytest.param(row, id=str(row[0])) for row in TABLE["runs"]])
def test_what_a_run_meets_is_one_line_with_its_code(misfit, tmp_path, row):
    overrides, code, *texts = row
    done = misfit(*overrides)
    assert done.code == code, done.err
    said = done.err if code == 1 else done.error
    assert [text for text in texts if text not in said] == []
    assert code != 2 or not (tmp_path / "run").exists()


def test_a_fault_in_the_users_own_model_is_shown_with_its_traceback(misfit):
    done = misfit("model={_target_: users.Faulty}")
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
def test_a_mistake_in_the_users_code_is_told_in_one_line(misfit, tmp_path, dry, override, texts):
    done = misfit(override, dry)
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
def test_a_module_that_cannot_be_imported_is_named_with_its_target(misfit, tmp_path, text, named):
    (tmp_path / "broken.py").write_text(f"{text}\n")
    done = misfit("model={_target_: broken.Net}")
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
    done = train([*SHORT, *pictures, "loader.batch_size=8", f"run_dir={tmp_path / 'run'}"])
    assert done.code == 3, done.err
    assert "pipe.png" in done.error
    assert "not a regular file" in done.error


def test_a_run_that_begins_again_has_the_configuration_that_it_ran_with(misfit, tmp_path):
    assert misfit("data.train={_target_: users.Bad, raises: exit}").code == 3
    done = misfit("seed=3", "resume=auto")
    assert done.code == 0, done.err
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["seed"], config["data"]["train"]["_target_"]) == (3, "data.sources.Digits")
    assert "seed=3" in yaml.safe_load((tmp_path / "run" / "overrides.yaml").read_text())
