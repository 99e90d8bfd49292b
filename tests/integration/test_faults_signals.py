"""Signals: the update is finished, saved and said; the same command goes on as if nothing was."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from same_run import differences, repeated_steps
from trainer.checkpoints.store import CheckpointStore
from trainer.runs.status import read_status


def logged_step(run):
    """Return the last step in `metrics.jsonl`, 0 if there is none."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["step"]
    except (OSError, IndexError, ValueError):
        return 0


def survivors(group):
    """Return the living processes of a group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(") ")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(stat.parent.name)
    return found


@pytest.mark.parametrize(
    ("number", "code", "workers"),
    [
        pytest.param(signal.SIGTERM, 143, 2, id="TERM"),
        pytest.param(signal.SIGUSR1, 143, 0, id="USR1"),
        pytest.param(signal.SIGINT, 130, 2, id="INT"),
        pytest.param(signal.SIGHUP, 143, 2, id="HUP"),
    ],
)
def test_a_signal_saves_and_the_same_command_goes_on(
    start, train, job, whole, tmp_path, number, code, workers
):
    path = tmp_path / "run"
    command = [*job, f"loader.num_workers={workers}", f"run_dir={path}"]
    run = start(command)
    run.until(lambda: logged_step(path) >= 12)
    run.send(number)
    run.wait(30)
    assert run.code == code, run.err
    assert signal.Signals(number).name in run.error
    assert "resume=auto" in run.error
    assert survivors(run.pid) == []
    status = read_status(path)
    assert (status["state"], status["code"]) == ("preempted", code)
    assert "resume=auto" in status["resume"]
    last = torch.load(path / "checkpoints" / "last.pt", weights_only=True)
    assert last["state"]["counters"]["global_step"] >= 12
    again = train([*command, "resume=auto"])
    assert again.code == 0, again.err
    assert differences(whole, path, but=["config"]) == []
    assert repeated_steps(path) == []
    assert read_status(path)["state"] == "finished"


def test_two_stops_in_one_epoch_add_up(start, train, job, whole, tmp_path):
    path = tmp_path / "run"
    command = [*job, f"run_dir={path}", "resume=auto"]
    for step in (4, 8, 24, 28):
        run = start(command)
        run.until(lambda step=step: logged_step(path) >= step)
        run.send(signal.SIGTERM)
        assert run.wait(30).code in (143, 0), run.err
    assert train(command).code == 0
    assert differences(whole, path) == []


def test_stops_among_validations_repeat_and_lose_none(start, train, job, tmp_path):
    often = [*job, "trainer.validate_every_n_steps=1", "trainer.limit_train_batches=10"]
    assert train([*often, f"run_dir={tmp_path / 'whole'}"]).code == 0
    path = tmp_path / "run"
    command = [*often, f"run_dir={path}", "resume=auto"]
    for step in (2, 5, 9, 13, 17):  # four fifths of the time is spent validating
        run = start(command)
        run.until(lambda step=step: logged_step(path) >= step)
        run.send(signal.SIGTERM)
        assert run.wait(30).code in (143, 0), run.err
    assert train(command).code == 0
    assert differences(tmp_path / "whole", path) == []
    assert repeated_steps(path) == []


def test_a_second_interrupt_leaves_at_once(start, job, tmp_path):
    path = tmp_path / "run"
    run = start([*job, "trainer.max_epochs=200", "loader.num_workers=2", f"run_dir={path}"])
    run.until(lambda: logged_step(path) >= 8)
    run.send(signal.SIGINT)
    run.send(signal.SIGINT)
    assert run.wait(10).code == 130
    assert "Traceback" not in run.err
    assert survivors(run.pid) == []
    for file in (path / "checkpoints").glob("*.pt"):
        CheckpointStore(path / "checkpoints").load(file)


def test_a_signal_before_the_first_update_says_that_there_is_nothing(start, job, tmp_path):
    path = tmp_path / "run"
    run = start([*job, f"run_dir={path}"])
    run.until((path / "config.yaml").exists)
    run.send(signal.SIGTERM)
    run.wait(30)
    assert run.code == 143, run.err
    if not (path / "checkpoints").exists():  # or else it came after the first update
        assert "nothing to save" in run.error


def test_a_killed_run_reads_killed_and_goes_on(start, train, job, whole, tmp_path):
    path = tmp_path / "run"
    run = start([*job, "loader.num_workers=2", f"run_dir={path}"])
    run.until(lambda: logged_step(path) >= 24)
    assert read_status(path)["state"] == "running"
    os.kill(run.pid, signal.SIGKILL)  # its workers live on for a moment
    run.wait()
    assert read_status(path)["state"] == "killed"
    again = train([*job, "loader.num_workers=2", f"run_dir={path}", "resume=auto"])
    assert again.code == 0, again.err
    assert differences(whole, path, but=["config"]) == []


def test_a_pause_changes_nothing(start, job, whole, tmp_path):
    path = tmp_path / "run"
    run = start([*job, f"run_dir={path}"])
    run.until(lambda: logged_step(path) >= 8)
    run.send(signal.SIGSTOP)
    run.send(signal.SIGCONT)
    assert run.wait().code == 0
    assert differences(whole, path) == []
