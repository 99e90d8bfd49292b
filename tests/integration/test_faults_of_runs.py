"""Signals, full and vanished disks, two runs in one folder: told, survived, and gone on from."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.runs.status import read_status
from same_run import differences, repeated_steps


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


SIGNALS = (
    (signal.SIGTERM, 143, 2),
    (signal.SIGUSR1, 143, 0),
    (signal.SIGINT, 130, 2),
    (signal.SIGHUP, 143, 2),
)


@pytest.mark.parametrize(
    ("often", "steps"),
    [
        pytest.param([], (4, 8, 12, 24), id="several-in-one-epoch"),
        pytest.param(  # four fifths of the time is spent validating
            ["trainer.validate_every_n_steps=1", "trainer.limit_train_batches=10"],
            (2, 5, 9, 13),
            id="among-validations",
        ),
    ],
)
def test_a_signal_saves_and_the_same_command_goes_on(
    start, train, job, whole, tmp_path, often, steps
):
    if often:
        whole = tmp_path / "whole"
        train([*job, *often, f"run_dir={whole}"])
    path = tmp_path / "run"
    command = [*job, *often, f"run_dir={path}", "resume=auto"]
    for step, (number, code, workers) in zip(steps, SIGNALS, strict=True):
        step = max(step, logged_step(path) + 1)
        run = start([*command, f"loader.num_workers={workers}"])
        run.until(lambda step=step: logged_step(path) >= step)
        run.send(number)
        run.wait(code, 30)
        assert number.name in run.error
        assert "resume=auto" in run.error
        assert survivors(run.pid) == []
        status = read_status(path)
        assert (status["state"], status["code"]) == ("preempted", code)
        assert "resume=auto" in status["resume"]
        last = torch.load(path / "checkpoints" / "last.pt", weights_only=True)
        assert last["state"]["counters"]["global_step"] >= step
    train(command)
    assert differences(whole, path) == []
    assert repeated_steps(path) == []
    assert read_status(path)["state"] == "finished"


def test_a_second_interrupt_leaves_at_once(start, job, tmp_path):
    path = tmp_path / "run"
    run = start([*job, "trainer.max_epochs=200", "loader.num_workers=2", f"run_dir={path}"])
    run.until(lambda: logged_step(path) >= 8)
    for _ in range(2):
        run.send(signal.SIGINT)
    run.wait(130, 10)
    assert "Traceback" not in run.err
    assert survivors(run.pid) == []
    for file in (path / "checkpoints").glob("*.pt"):
        read_checkpoint(file)


def test_a_signal_before_the_first_update_says_that_there_is_nothing(start, job, tmp_path):
    path = tmp_path / "run"
    run = start([*job, f"run_dir={path}"])
    run.until((path / "config.yaml").exists)
    run.send(signal.SIGTERM)
    run.wait(143, 30)
    # If there are checkpoints, it came after the first update.
    assert (path / "checkpoints").exists() or "nothing to save" in run.error


def test_a_killed_run_reads_killed_and_goes_on(start, train, job, whole, tmp_path):
    path = tmp_path / "run"
    run = start([*job, "loader.num_workers=2", f"run_dir={path}"])
    run.until(lambda: logged_step(path) >= 8)
    run.send(signal.SIGSTOP)  # a pause changes nothing
    run.send(signal.SIGCONT)
    run.until(lambda: logged_step(path) >= 24)
    assert read_status(path)["state"] == "running"
    os.kill(run.pid, signal.SIGKILL)  # its workers live on for a moment
    run.wait(-signal.SIGKILL)
    assert read_status(path)["state"] == "killed"
    train([*job, "loader.num_workers=2", f"run_dir={path}", "resume=auto"])
    assert differences(whole, path, but=["config"]) == []


# 0.6 M parameters with their momentum: 5 MB.
LARGE = [
    "experiment=resnet18",
    "model=mlp",
    "model.hidden=[800,500]",
    "optimizer=sgd_nesterov",
    "loader.num_workers=0",
]


@pytest.fixture
def mountable(tmp_path):
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def test_a_full_disk_ends_in_one_line_and_keeps_the_earlier_checkpoint(train, mountable):
    job = [*LARGE, "trainer.max_epochs=2", f"run_dir={mountable}/run"]
    run = train(job, 7, tmpfs=(mountable, "size=8m"))
    pattern = r"cannot write .*/step-00000040.pt: no space left on device$"
    assert re.search(pattern, run.error)
    assert "enforce fail" not in run.err + run.out
    checkpoints = run.tree / "run" / "checkpoints"
    assert not list(checkpoints.glob(".tmp*"))
    path, *_ = CheckpointStore(checkpoints).newest()
    assert path.name == "step-00000020.pt"
    status = read_status(run.tree / "run")
    assert (status["state"], status["code"]) == ("failed", 7)


def test_logs_that_do_not_fit_are_one_warning_each(train, mountable):
    job = ["experiment=resnet18", "model=mlp", "loader.num_workers=0", "trainer.max_epochs=8"]
    job += ["callbacks=[progress,lr_monitor,throughput,memory]", "trainer.log_every_n_steps=1"]
    run = train([*job, f"run_dir={mountable}/run"], None, tmpfs=(mountable, "size=40k"))
    assert run.code in (0, 7), run.err
    assert "Traceback" not in run.err
    assert "Logging error" not in run.err
    assert run.err.count("metrics.jsonl") <= 2  # the test after the training opens it again
    assert "step 160" in run.err + run.out
    lines = (run.tree / "run" / "metrics.jsonl").read_text()
    assert lines.endswith("}\n")


@pytest.mark.parametrize("where", ["itself", "inside"])
def test_a_read_only_folder_is_answered_before_anything_is_trained(train, mountable, where):
    folder = mountable if where == "itself" else mountable / "run"
    run = train([*LARGE, f"run_dir={folder}"], 7, tmpfs=(mountable, "ro"))
    assert str(folder) in run.error
    assert "read-only file system" in run.error.lower()
    assert "step" not in run.out


def test_a_folder_that_vanishes_ends_in_one_line(start, job, tmp_path):
    path = tmp_path / "run"
    run = start([*job, "trainer.max_epochs=4", f"run_dir={path}"])
    run.until(lambda: (path / "checkpoints" / "step-00000010.pt").exists())
    path.rename(tmp_path / "elsewhere")  # at once, whatever is being written
    assert str(path) in run.wait(7).error


def test_of_two_runs_in_one_folder_the_second_is_refused(start, train, job, tmp_path):
    path = tmp_path / "run"
    first = start([*job, "trainer.max_epochs=200", f"run_dir={path}"])
    first.until((path / "manifest.json").exists)
    second = train([*job, f"run_dir={path}"], 2)
    first.until((path / "checkpoints" / "last.pt").exists)
    third = train([*job, "trainer.max_epochs=200", f"run_dir={path}", "resume=auto"], 2)
    for refused in (second, third):
        assert f"in use by pid {first.pid} on " in refused.error
    first.kill()


def test_two_runs_that_start_together_end_as_one(start, job, whole, tmp_path):
    path = tmp_path / "run"
    runs = [start([*job, f"run_dir={path}"]) for _ in range(2)]
    codes = sorted(run.wait().code for run in runs)
    assert codes == [0, 2], [run.err for run in runs]
    refused = next(run for run in runs if run.code == 2)
    assert "in use" in refused.error or "already holds a run" in refused.error
    assert differences(whole, path) == []


def test_without_a_run_dir_the_newest_unfinished_is_gone_on_with(
    start, train, job, whole, tmp_path
):
    run = start([*job, "name=resnet18"], folder=tmp_path)
    run.until(lambda: list(tmp_path.glob("runs/resnet18/*/checkpoints/step-00000010.pt")))
    run.send(signal.SIGTERM)
    run.wait(143)
    train([*job, "name=resnet18", "resume=auto"], folder=tmp_path)
    (folder,) = (tmp_path / "runs" / "resnet18").iterdir()
    assert differences(whole, folder) == []


@pytest.mark.parametrize("more", ["seed=0", "resume=auto", "dry_run=true", "-m seed=0,1"])
@pytest.mark.parametrize(
    ("words", "folder", "code", "text"),
    [
        pytest.param(["run_dir=/"], None, 2, "root of the file system", id="root"),
        pytest.param([f"run_dir={'x' * 300}"], None, 7, "file name too long", id="long"),
        # Nobody makes a folder there, root included.
        pytest.param([], "/sys", 7, "cannot write .*runs.*(permi|read-only)", id="takes-nothing"),
    ],
)
def test_a_run_directory_that_can_be_none_is_one_line(train, words, folder, code, text, more):
    assert re.search(text, train([*LARGE, *more.split(), *words], code, folder=folder).error)
