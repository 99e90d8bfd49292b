"""The closing block: whole words at any width, commands that can be pasted."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from callbacks.checkpoint import Checkpoint
from scripts.cli.request import Request
from scripts.runs.account import Account
from scripts.runs.report import final_block, result_line
from trainer.state import MAX_TIME, PRUNED, TrainState

RESULTS = {
    "train/epoch_loss": 0.25,
    **{f"train/term_{number}": 0.5 for number in range(12)},
    "val/accuracy": 0.9,
    "test/accuracy": 0.8,
}
CONFIG = {
    "trainer": {"log_every_n_steps": 50, "validate_every_n_epochs": 1},
    "loader": {"num_workers": 2},
    "callbacks": {},
}
EARLY = "val/accuracy has not improved in 3 validations (best 0.970370)"


class Best(Checkpoint):
    def best_result(self) -> tuple[str, float, int] | None:
        return "val/accuracy", 0.9, 40


@pytest.fixture
def experiment() -> Any:
    trainer = SimpleNamespace(
        state=TrainState(epoch=1, global_step=60, validated_at=40),
        callbacks={"checkpoint": Best()},
        average=None,
        done=False,
    )
    config = SimpleNamespace(trainer=SimpleNamespace(max_time="0:10:00"))
    return SimpleNamespace(
        trainer=trainer, config=config, data=SimpleNamespace(sets={"test": object()})
    )


def account() -> Account:
    kinds = ("forward + backward", "data", "optimizer", "evaluation", "checkpoints", "callbacks")
    return Account(dict.fromkeys(kinds, 1.0))  # type: ignore[arg-type]


def block(experiment: Any, run_dir: Path, columns: int | None = None) -> str:
    request = Request(CONFIG, [], {}, ["experiment=resnet18"])
    return final_block(request, experiment, run_dir, RESULTS, account(), columns)


def commands_in(text: str, name: str) -> list[str]:
    joined = text.replace("\\\n", " ")
    (line,) = re.findall(rf"^{name} +(.*)$", joined, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("columns", [None, 60, 80, 120, 200])
def test_commands_can_be_pasted(experiment: Any, tmp_path: Path, columns: int | None) -> None:
    run_dir = tmp_path / "my run"
    (run_dir / "tensorboard").mkdir(parents=True)
    experiment.trainer.state.stop_reason = MAX_TIME
    text = block(experiment, run_dir, columns)
    assert commands_in(text, "again") == ["evaluate", f"run={run_dir}"]
    assert commands_in(text, "look") == ["regimen", "tensorboard", "--logdir", str(run_dir)]
    assert commands_in(text, "go on")[-2:] == [f"run_dir='{run_dir}'", "resume=auto"]


@pytest.mark.parametrize("columns", [None, 60, 80, 120, 200])
def test_facts_are_broken_between_words(experiment: Any, columns: int | None) -> None:
    experiment.trainer.state.stop_reason = EARLY
    text = block(experiment, Path("run"), columns)
    lines = text.strip().splitlines()
    assert max(map(len, lines)) <= (columns or 100)
    names = [line[:8].strip() for line in lines]
    assert ("" in names) == (columns is not None)  # elsewhere each line can be found by its name
    said: dict[str, list[str]] = {}
    for name, line in zip(names, lines, strict=True):
        said.setdefault(name or [*said][-1], []).append(line[9:])
    assert " ".join(said["trained"]) == f"1 epoch, 60 updates, 6.0 s; ended early: {EARLY}"
    assert "  ".join(said["train"]).split("  ") == [
        f"{name.removeprefix('train/')} {value:.4f}"
        for name, value in RESULTS.items()
        if name.startswith("train/")
    ]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        pytest.param(None, None, id="horizon"),
        pytest.param(MAX_TIME, "ended by its time limit (trainer.max_time=0:10:00)", id="time"),
        pytest.param(PRUNED, "pruned: its search ended it early", id="pruned"),
        pytest.param(EARLY, f"ended early: {EARLY}", id="early"),
    ],
)
def test_why_a_run_ended_is_said_in_words(
    experiment: Any, reason: str | None, said: str | None
) -> None:
    experiment.trainer.state.stop_reason = reason
    line = result_line(experiment, RESULTS, account()).replace("\n", ", ")
    told = "best val/accuracy 0.9000 at step 40, test/accuracy 0.8000, 1 epoch, 60 updates, 6.0 s"
    assert line == ", ".join(filter(None, [told, said]))
