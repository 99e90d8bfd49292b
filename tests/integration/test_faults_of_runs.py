"""Signals, full and vanished disks, two runs in one folder: told, survived, and gone on from."""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from same_run import differences, repeated_steps
from trainer.checkpoints.reader import read_checkpoint
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


@pytest.mark.parametrize(
    ("often", "steps"),
    [
        pytest.param([], (4, 8, 24, 28), id="two in one epoch"),
        pytest.param(  # four fifths of the time is spent validating
            ["trainer.validate_every_n_steps=1", "trainer.limit_train_batches=10"],
            (2, 5, 9, 13, 17),
            id="among validations",
        ),
    ],
)
def test_stops_repeat_and_lose_nothing(start, train, job, whole, tmp_path, often, steps):
    if often:
        whole = tmp_path / "whole"
        assert train([*job, *often, f"run_dir={whole}"]).code == 0
    path = tmp_path / "run"
    command = [*job, *often, f"run_dir={path}", "resume=auto"]
    for step in steps:
        run = start(command)
        run.until(lambda step=step: logged_step(path) >= step)
        run.send(signal.SIGTERM)
        assert run.wait(30).code in (143, 0), run.err
    assert train(command).code == 0
    assert differences(whole, path) == []
    assert repeated_steps(path) == []


def test_a_second_interrupt_leaves_at_once(start, job, tmp_path):
    path = tmp_path / "run"
    run = start([*job, "trainer.max_epochs=200", "loader.num_workers=2", f"run_dir={path}"])
    run.until(lambda: logged_step(path) >= 8)
    for _ in range(2):
        run.send(signal.SIGINT)
    assert run.wait(10).code == 130
    assert "Traceback" not in run.err
    assert survivors(run.pid) == []
    for file in (path / "checkpoints").glob("*.pt"):
        read_checkpoint(file)


def test_a_signal_before_the_first_update_says_that_there_is_nothing(start, job, tmp_path):
    path = tmp_path / "run"
    run = start([*job, f"run_dir={path}"])
    run.until((path / "config.yaml").exists)
    run.send(signal.SIGTERM)
    assert run.wait(30).code == 143, run.err
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
    run.wait()
    assert read_status(path)["state"] == "killed"
    again = train([*job, "loader.num_workers=2", f"run_dir={path}", "resume=auto"])
    assert again.code == 0, again.err
    assert differences(whole, path, but=["config"]) == []


# 0.6 M parameters with their momentum: 5 MB.
LARGE = [
    *("experiment=resnet18", "model=mlp", "model.hidden=[800,500]"),
    *("optimizer=sgd_nesterov", "loader.num_workers=0"),
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
    run = train(
        [*LARGE, "trainer.max_epochs=2", f"run_dir={mountable}/run"], tmpfs=(mountable, "size=8m")
    )
    assert run.code == 7, run.err
    pattern = r"cannot write .*/step-00000040.pt: no space left on device$"
    assert re.search(pattern, run.error)
    assert "enforce fail" not in run.err + run.out
    checkpoints = run.tree / "run" / "checkpoints"
    assert not list(checkpoints.glob(".tmp*"))
    found = CheckpointStore(checkpoints).newest()
    assert found is not None
    assert found[0].name == "step-00000020.pt"
    status = read_status(run.tree / "run")
    assert (status["state"], status["code"]) == ("failed", 7)


def test_logs_that_do_not_fit_are_one_warning_each(train, mountable):
    job = ["experiment=resnet18", "model=mlp", "loader.num_workers=0", "trainer.max_epochs=8"]
    job += ["callbacks=[progress,lr_monitor,throughput,memory]", "trainer.log_every_n_steps=1"]
    run = train([*job, f"run_dir={mountable}/run"], tmpfs=(mountable, "size=40k"))
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
    run = train(["experiment=resnet18", "model=mlp", f"run_dir={folder}"], tmpfs=(mountable, "ro"))
    assert run.code == 7, run.err
    assert str(folder) in run.error
    assert "read-only file system" in run.error.lower()
    assert "step" not in run.out


def test_a_folder_that_vanishes_ends_in_one_line(start, job, tmp_path):
    path = tmp_path / "run"
    run = start([*job, "trainer.max_epochs=4", f"run_dir={path}"])
    run.until(lambda: (path / "checkpoints" / "step-00000010.pt").exists())
    shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)
    run.wait()
    assert run.code == 7, run.err
    assert str(path) in run.error


def test_of_two_runs_in_one_folder_the_second_is_refused(start, train, job, tmp_path):
    path = tmp_path / "run"
    first = start([*job, "trainer.max_epochs=200", f"run_dir={path}"])
    first.until((path / "manifest.json").exists)
    second = train([*job, f"run_dir={path}"])
    first.until((path / "checkpoints" / "last.pt").exists)
    third = train([*job, "trainer.max_epochs=200", f"run_dir={path}", "resume=auto"])
    for refused in (second, third):
        assert refused.code == 2, refused.err
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
    assert run.wait().code == 143
    again = train([*job, "name=resnet18", "resume=auto"], folder=tmp_path)
    assert again.code == 0, again.err
    (folder,) = (tmp_path / "runs" / "resnet18").iterdir()
    assert differences(whole, folder) == []


TINY = ["experiment=resnet18", "model=mlp", "loader.num_workers=0", "trainer.max_epochs=1"]
SWEEP = ["-m", "optimizer.lr=0.1,0.2"]


@pytest.mark.parametrize("more", [[], ["resume=auto"], ["dry_run=true"], SWEEP], ids=str)
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
    run = train([*TINY, *more, *words], folder=folder)
    assert run.code == code, run.err
    assert re.search(text, run.error)
