"""The closing block: shares of the time, whole words at any width, commands that can be pasted."""

import logging
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from regimen.callbacks.checkpoint import Checkpoint
from regimen.scripts.cli.arguments import RunRequest
from regimen.scripts.runs.report import final_block, time_fractions
from regimen.scripts.runs.run import buffered_log
from regimen.trainer.files.atomic import LogFileHandler
from regimen.trainer.state import KINDS, MAX_TIME, PRUNED, Timer, TrainState

RESULTS = {"train/epoch_loss": 0.25, **{f"train/term_{number}": 0.5 for number in range(12)}}
RESULTS |= {"val/accuracy": 0.9, "test/accuracy": 0.8}
EARLY = "val/accuracy has not improved in 3 validations (best 0.970370)"


class Best(Checkpoint):
    def best_result(self):
        return "val/accuracy", 0.9, 40


@pytest.fixture
def experiment():
    state = TrainState(epoch=1, global_step=60, validated_at=40)
    saver = {"checkpoint": Best()}
    trainer = SimpleNamespace(state=state, callbacks=saver, average=None, done=False)
    config = SimpleNamespace(trainer=SimpleNamespace(max_time="0:10:00"))
    sets = {"train": range(1200), "val": None, "test": [1, 2]}
    return SimpleNamespace(trainer=trainer, config=config, data=SimpleNamespace(sets=sets))


SIX_SECONDS = dict.fromkeys(KINDS[:6], 1.0)


@pytest.mark.parametrize("columns", [None, 60, 120])
def test_the_block_fits_the_terminal_and_its_commands_can_be_pasted(
    experiment, tmp_path, monkeypatch, columns
):
    monkeypatch.chdir(tmp_path)
    Path("my run/tensorboard").mkdir(parents=True)
    bare = final_block(RunRequest({}, [], {}, []), experiment, Path("my run"), RESULTS, SIX_SECONDS)
    assert "\nevaluate" not in bare  # there is no checkpoint to test
    Path("my run/checkpoints").mkdir()
    Path("my run/checkpoints/last.pt").touch()
    experiment.trainer.state.stop_reason = MAX_TIME
    request = RunRequest({}, [], {}, ["experiment=resnet18"])
    facts = (RESULTS, SIX_SECONDS, columns)
    text = final_block(request, experiment, Path("my run"), *facts).strip()
    said = {}
    for line in text.splitlines():
        said.setdefault(line[:9].strip(), []).append(line[9:])
    commands = [line for line in text.splitlines() if line.startswith(("tensorboard", "evaluate"))]
    for line in commands:
        said.pop(line[:9].strip())
    look, evaluate = map(shlex.split, commands)
    go_on = shlex.split(said.pop("go on")[0])
    facts = [line for lines in said.values() for line in lines]
    assert max(map(len, facts)) + len("trained  ") <= (columns or 100)
    assert evaluate == ["evaluate", "run=my run"]
    assert look == ["tensorboard", "--logdir", "my run/tensorboard"]
    assert go_on[-2:] == ["run_dir='my run'", "resume=auto"]
    assert said["data"] == ["train range 1,200, test list 2"]
    ended = "ended by its time limit (trainer.max_time=0:10:00)"
    assert ", ".join(said["trained"]) == f"1 epoch, 60 updates, 6.0 s, {ended}"
    values = {k.removeprefix("train/"): v for k, v in RESULTS.items() if k.startswith("train/")}
    told = ", ".join(said["train"]).split(", ")
    assert told == [f"{name} {value:.4f}" for name, value in values.items()]


def test_why_a_run_ended_is_said_in_words(experiment):
    request = RunRequest({}, [], {}, ["experiment=resnet18"])
    how_far = "1 epoch, 60 updates, 6.0 s"
    pruned = ", pruned: its search ended it early"
    for reason, said in ((None, ""), (PRUNED, pruned), (EARLY, f", ended early: {EARLY}")):
        experiment.trainer.state.stop_reason = reason
        text = final_block(request, experiment, Path("run"), RESULTS, SIX_SECONDS)
        lines = [line[9:] for line in text.splitlines() if line.startswith("trained  ")]
        assert ", ".join(lines) == how_far + said
        assert "\nbest     val/accuracy 0.9000 at step 40\n" in text


def test_shares_are_of_the_whole_time_and_the_largest_comes_first():
    nothing = dict.fromkeys(KINDS, 0.0)
    spent = {"data": 4.2, "forward + backward": 5.0, "optimizer": 0.8, "callbacks": 0.001}
    told = "50% forward + backward, 42% waiting for data, 8% optimizer"
    assert ", ".join(time_fractions(nothing | spent)) == told
    assert time_fractions(nothing) == []


def test_each_moment_counts_once(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("regimen.trainer.state.perf_counter", lambda: clock.now)
    timer = Timer()
    clock.now = 1.0
    timer.lap("data")
    with timer.spending("evaluation"):
        clock.now = 3.0
        with timer.spending("checkpoints"):
            clock.now = 3.5
        clock.now = 7.0
    clock.now = 7.25
    assert (timer.total, timer.data) == (1.25, 1.0)  # evaluation and checkpoints are no training
    assert (timer.spent["evaluation"], timer.spent["checkpoints"]) == (5.5, 0.5)
    timer.reset()
    assert timer.total == timer.data == 0
    assert sum(timer.spent.values()) == clock.now


def test_the_log_of_a_run_has_what_was_said_before_its_file(tmp_path):
    logger = logging.getLogger("regimen")
    path = tmp_path / "train.log"
    with buffered_log() as log:
        logger.warning("before")
        log.setTarget(file := LogFileHandler(path))
        log.flush()
        logger.warning("within")
    logger.warning("behind")
    file.close()
    assert [line.split()[-1] for line in path.read_text().splitlines()] == ["before", "within"]
