"""A project of someone who uses Regimen and changes nothing in it: all in a folder of their own.

Model, data set, transform, callback, task and experiment are theirs; nothing is registered.
"""

import csv
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

FILES = {
    "sines/__init__.py": "",
    "sines/data.py": '''
        """Waves: how often does each one go up and down?"""

        import numpy as np
        import torch


        class Waves:
            classes = ("slow", "middle", "fast")

            def __init__(self, split, samples=90, transform=None):
                seed = ("train", "val", "test").index(split)
                random = np.random.default_rng(seed)
                self.targets = random.integers(3, size=samples)
                phase = random.uniform(0, 6.28, samples)
                time = np.linspace(0, 6.28, 32)
                waves = np.sin(time * (1 + 2 * self.targets[:, None]) + phase[:, None])
                self.waves = torch.tensor(waves, dtype=torch.float32)
                self.transform = transform

            def __len__(self):
                return len(self.waves)

            def __getitem__(self, index):
                wave = self.waves[index]
                wave = self.transform(wave) if self.transform else wave
                return wave, int(self.targets[index])


        class Jitter:
            """Add noise; which noise is Regimen's business."""

            def __init__(self, strength):
                self.strength = strength

            def __call__(self, wave):
                return wave + self.strength * torch.randn_like(wave)
        ''',
    "sines/model.py": '''
        """A network for waves."""

        from torch import nn


        class Net(nn.Module):
            def __init__(self, num_classes, length=32, width=16):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(length, width), nn.ReLU(), nn.Dropout(0.1))
                self.head = nn.Linear(width, num_classes)

            def forward(self, waves):
                return self.head(self.body(waves))
        ''',
    "sines/task.py": '''
        """A task whose loss nobody else has."""

        from torch.nn.functional import cross_entropy

        from trainer.task import StepOutput, Task


        class Guess(Task):
            def __init__(self, num_classes, caution=0.1):
                self.num_classes = num_classes
                self.caution = caution

            def metric_names(self):
                return ["loss", "loss_match", "loss_caution", "accuracy", "confidence"]

            def training_step(self, model, batch):
                waves, labels = batch
                logits = model(waves)
                chances = logits.softmax(1)
                losses = {
                    "match": cross_entropy(logits, labels),
                    "caution": self.caution * chances.square().sum(1).mean(),
                }
                best, said = chances.detach().max(1)
                hits = (said == labels).sum()
                sums = {"accuracy": (hits, len(labels)), "confidence": (best.sum(), len(labels))}
                return StepOutput(losses, sums=sums)
        ''',
    "sines/callbacks.py": '''
        """Write down how each epoch ended."""

        from trainer.callback import Callback


        class Diary(Callback):
            def __init__(self, title):
                self.title = title
                self.epochs = []

            def on_validation_end(self, trainer, metrics):
                self.epochs.append(metrics["val/accuracy"])

            def on_fit_end(self, trainer):
                text = "\\n".join([self.title, *map(str, self.epochs)])
                (trainer.run_dir / "diary.txt").write_text(text)

            def state_dict(self):
                return {"epochs": list(self.epochs)}

            def load_state_dict(self, state):
                self.epochs = list(state["epochs"])
        ''',
    "conf/model/net.yaml": """
        _target_: sines.model.Net
        num_classes: ${data.num_classes}
        width: 16
        """,
    "conf/data/waves.yaml": """
        num_classes: null
        train: {_target_: sines.data.Waves, split: train}
        val: {_target_: sines.data.Waves, split: val}
        test: {_target_: sines.data.Waves, split: test}
        """,
    "conf/transforms/jitter.yaml": """
        train:
          jitter: {_target_: sines.data.Jitter, strength: 0.3}
        eval: {}
        device: {}
        """,
    "conf/task/guess.yaml": """
        _target_: sines.task.Guess
        num_classes: ${data.num_classes}
        caution: 0.1
        """,
    "conf/callbacks/diary.yaml": """
        diary:
          _target_: sines.callbacks.Diary
          title: ${name}
        """,
    "conf/experiment/waves.yaml": """
        # @package _global_
        defaults:
          - override /model: net
          - override /data: waves
          - override /transforms: jitter
          - override /task: guess
          - override /optimizer: adamw
          - override /callbacks: [default, diary]

        name: waves
        optimizer:
          lr: 0.02
        loader:
          batch_size: 16
        trainer:
          max_epochs: 4
          log_every_n_steps: 2
        """,
}
COMMAND = ["--config-dir", "conf", "experiment=waves"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
    return folder


def call(project: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a person would, where the fork server of the other tests would not do."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def log_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def learned(run_dir: Path) -> list[dict[str, float]]:
    """Return the log without wall-clock facts."""
    clock = ("time/", "memory/")
    return [{k: v for k, v in line.items() if not k.startswith(clock)} for line in log_of(run_dir)]


@pytest.fixture(scope="module")
def finished(project: Path) -> Path:
    done = call(project, "scripts.train", *COMMAND)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (project / "runs" / "waves").iterdir()
    assert f"evaluate run={run_dir}" in done.stdout
    return run_dir


def test_it_trains(finished: Path) -> None:
    last = {k: v for line in log_of(finished) for k, v in line.items()}
    assert max(line["step"] for line in log_of(finished)) == 4 * 6
    assert last["val/accuracy"] > 0.8
    assert last["val/loss"] == pytest.approx(last["val/loss_match"] + last["val/loss_caution"])
    assert {"train/confidence", "test/confidence", "test/accuracy"} <= last.keys()
    diary = (finished / "diary.txt").read_text().splitlines()
    assert diary[0] == "waves"
    assert float(diary[-1]) == last["val/accuracy"]


def test_it_is_tested_again(train, project: Path, finished: Path) -> None:
    done = train([f"run={finished}"], folder=project, command="evaluate")
    assert done.code == 0, done.err
    again = json.loads((finished / "evaluation.json").read_text())
    assert again["test/confidence"] == log_of(finished)[-1]["test/confidence"]


def test_workers_and_a_resume_change_nothing(train, project: Path, finished: Path) -> None:
    run_dir = project / "stopped"
    train([*COMMAND, "trainer.max_steps=9", f"run_dir={run_dir}"], folder=project)
    resumed = [*COMMAND, "loader.num_workers=2", f"run_dir={run_dir}", "resume=auto"]
    done = train(resumed, folder=project)
    assert done.code == 0, done.err
    after = [line for line in learned(run_dir) if line["step"] > 10]
    assert after == [line for line in learned(finished) if line["step"] > 10]
    assert max(line["step"] for line in after) == 24
    diary = (run_dir / "diary.txt").read_text().splitlines()
    assert diary[-1] == (finished / "diary.txt").read_text().splitlines()[-1]


def test_a_dry_run_shows_it(train, project: Path) -> None:
    done = train([*COMMAND, "dry_run=true", "run_dir=plan"], folder=project)
    assert done.code == 0, done.err
    assert [path.name for path in (project / "plan").iterdir()] == ["plan.txt"]
    for shown in ("Waves", "slow, middle, fast", "sines.task.Guess", "Net", "24 in all", "Diary"):
        assert shown in done.out


@pytest.mark.slow
def test_a_sweep_of_it(project: Path) -> None:
    widths = ["model.width=4,16", "task.caution=0.5", "trainer.max_epochs=1"]
    done = call(project, "scripts.train", "-m", *COMMAND, *widths, "run_dir=sweep")
    assert done.returncode == 0, done.stderr
    with (project / "sweep" / "leaderboard.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["model.width"] for row in rows} == {"4", "16"}
    assert {row["status"] for row in rows} == {"finished"}
    scores = [float(row["val/accuracy"]) for row in rows]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        pytest.param("model.widht=3", "width", id="argument"),
        pytest.param("task._target_=sines.task.Gess", "Guess", id="target"),
        pytest.param(
            "callbacks.early_stopping.monitor=val/confidance", "val/confidence", id="name"
        ),
        pytest.param("experiment=wave", "waves", id="experiment"),
    ],
)
def test_a_mistake_in_it_is_answered(train, project: Path, override: str, named: str) -> None:
    done = train([*COMMAND, override, "run_dir=never"], folder=project)
    assert done.code == 2, done.err
    assert named in done.err
    assert "Traceback" not in done.err
    assert not (project / "never").exists()


def test_what_fails_in_it_shows_its_own_traceback(train, project: Path) -> None:
    done = train([*COMMAND, "+data.train.samples=none", "run_dir=broken"], folder=project)
    assert done.code == 1
    assert done.err.count("Traceback (most recent call last)") == 1
    assert str(Path("sines") / "data.py") in done.err
    assert done.err.splitlines()[-1].startswith("error: ")
