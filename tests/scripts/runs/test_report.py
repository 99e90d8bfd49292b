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
    return SimpleNamespace(
        trainer=trainer,
        config=config,
        data=SimpleNamespace(sets=sets),
        test_loaders={"test": sets["test"]},
    )


SIX_SECONDS = dict.fromkeys(KINDS[:6], 1.0)


REQUEST = RunRequest({}, [], {}, ["experiment=resnet18"])
LABEL = len("trained  ")  # the width of the column of labels


def by_label(text):
    """Return the lines of the block, without their labels, by label."""
    found = {}
    for line in text.splitlines():
        label = line[:LABEL].strip()
        found.setdefault(label, []).append(line[LABEL:])
    return found


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run directory with a blank in its name."""
    monkeypatch.chdir(tmp_path)
    path = Path("my run")
    (path / "tensorboard").mkdir(parents=True)
    (path / "checkpoints").mkdir()
    (path / "checkpoints/last.pt").touch()
    return path


def test_a_run_without_a_checkpoint_is_not_evaluated(experiment, run_dir):
    (run_dir / "checkpoints/last.pt").unlink()
    (run_dir / "checkpoints").rmdir()

    text = final_block(RunRequest({}, [], {}, []), experiment, run_dir, RESULTS, SIX_SECONDS)

    assert "\nevaluate" not in text


@pytest.mark.parametrize("columns", [None, 60, 120])
def test_the_commands_of_the_block_can_be_pasted(experiment, run_dir, columns):
    experiment.trainer.state.stop_reason = MAX_TIME

    text = final_block(REQUEST, experiment, run_dir, RESULTS, SIX_SECONDS, columns)

    commands = {}
    for line in text.splitlines():
        if line.startswith(("tensorboard", "evaluate")):
            program, *arguments = shlex.split(line)
            commands[program] = arguments
    assert commands == {
        "tensorboard": ["--logdir", "my run/tensorboard"],
        "evaluate": ["run=my run"],
    }
    (go_on,) = by_label(text)["go on"]
    assert shlex.split(go_on)[-2:] == ["run_dir='my run'", "resume=auto"]


@pytest.mark.parametrize(("columns", "width"), [(None, 100), (60, 60), (120, 120)])
def test_the_block_fits_the_terminal(experiment, run_dir, columns, width):
    experiment.trainer.state.stop_reason = MAX_TIME

    text = final_block(REQUEST, experiment, run_dir, RESULTS, SIX_SECONDS, columns)

    for line in text.splitlines():
        # A command is one line, however long it is, so that it can be pasted.
        if not line.startswith(("tensorboard", "evaluate", "go on")):
            assert len(line) <= width
    told = by_label(text.strip())
    assert told["data"] == ["train range 1,200, test list 2"]
    ended = "ended by its time limit (trainer.max_time=0:10:00)"
    assert ", ".join(told["trained"]) == f"1 epoch, 60 updates, 6.0 s, {ended}"
    expected = []
    for name, value in RESULTS.items():
        if name.startswith("train/"):
            expected.append(f"{name.removeprefix('train/')} {value:.4f}")
    assert ", ".join(told["train"]) == ", ".join(expected)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (None, ""),
        (PRUNED, ", pruned: its search ended it early"),
        (EARLY, f", ended early: {EARLY}"),
    ],
)
def test_why_a_run_ended_is_said_in_words(experiment, reason, said):
    experiment.trainer.state.stop_reason = reason

    text = final_block(REQUEST, experiment, Path("run"), RESULTS, SIX_SECONDS)

    trained = by_label(text)["trained"]
    assert ", ".join(trained) == f"1 epoch, 60 updates, 6.0 s{said}"
    assert "\nbest     val/accuracy 0.9000 at step 40\n" in text


def test_a_test_split_without_labels_has_no_figures(experiment):
    trained = {name: value for name, value in RESULTS.items() if not name.startswith("test/")}

    text = final_block(REQUEST, experiment, Path("run"), trained, SIX_SECONDS)

    assert by_label(text)["test"] == ["no label of the test split counts: there are no figures"]


def test_shares_are_of_the_whole_time_and_the_largest_comes_first():
    nothing = dict.fromkeys(KINDS, 0.0)
    spent = {"data": 4.2, "forward + backward": 5.0, "optimizer": 0.8, "callbacks": 0.001}

    assert time_fractions({**nothing, **spent}) == [
        "50% forward + backward",
        "42% waiting for data",
        "8% optimizer",
    ]
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

    assert timer.data == 1.0
    assert timer.total == 1.25  # evaluation and checkpoints are no training
    assert timer.spent["evaluation"] == 5.5
    assert timer.spent["checkpoints"] == 0.5
    timer.reset()
    assert timer.total == timer.data == 0
    assert sum(timer.spent.values()) == clock.now


def test_the_log_of_a_run_has_what_was_said_before_its_file(tmp_path):
    logger = logging.getLogger("regimen")
    path = tmp_path / "train.log"
    file = LogFileHandler(path)

    with buffered_log() as log:
        logger.warning("before")
        log.setTarget(file)
        log.flush()
        logger.warning("within")
    logger.warning("behind")

    file.close()
    messages = [line.split()[-1] for line in path.read_text().splitlines()]
    assert messages == ["before", "within"]
