"""A run that goes on from an earlier checkpoint has one history from there on."""

import json
import shlex
import shutil
import signal

import pytest

from same_run import differences, repeated_steps


@pytest.fixture
def copy(whole, tmp_path):
    """A finished run of 40 steps, to be gone back in."""
    return shutil.copytree(whole, tmp_path / "copy")


def step_file(run, step):
    return run / "checkpoints" / f"step-{step:08d}.pt"


def test_going_back_and_on_ends_where_the_run_had_ended(train, job, whole, copy):
    run = train([*job, f"resume={step_file(copy, 10)}"])
    assert run.code == 0, run.err
    assert "resumed at step 10" in run.err
    assert "what the run had beyond step 10 is in" in run.err
    assert differences(whole, copy) == []
    assert repeated_steps(copy) == []
    (left,) = (copy / "abandoned").iterdir()
    moved = sorted(path.name for path in (left / "checkpoints").glob("step-*"))
    assert moved == [f"step-{step:08d}.pt" for step in range(15, 45, 5)]
    lines = (left / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] > 10 for line in lines} == {True}


@pytest.mark.parametrize("policy", ["override", "keep"])
def test_a_stop_after_going_back_goes_on_by_the_printed_command(
    train, start, job, whole, copy, tmp_path, policy
):
    change = [*job, "optimizer.lr=0.013", f"resume_policy={policy}"]
    undisturbed = shutil.copytree(whole, tmp_path / "undisturbed")
    assert train([*change, f"resume={step_file(undisturbed, 10)}"]).code == 0
    stopped = start([*change, f"resume={step_file(copy, 10)}"])
    metrics = copy / "metrics.jsonl"
    left = copy / "abandoned"
    stopped.until(lambda: list(left.glob("*/metrics.jsonl")) and not list(left.glob("*.json")))
    stopped.until(lambda: '"step": 12' in metrics.read_text())
    stopped.send(signal.SIGTERM)
    assert stopped.wait().code == 143
    command = shlex.split(stopped.error.partition("go on with: ")[2])
    again = train(command[1:])
    assert again.code == 0, again.err
    assert "already finished" not in again.err
    assert differences(undisturbed, copy) == []
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    (rate,) = {line["lr/default"] for line in lines if line["step"] == 12 and "lr/default" in line}
    assert (rate < 0.02) == (policy == "override")


def test_a_refused_return_leaves_the_run_alone(train, job, copy):
    before = {path: path.read_bytes() for path in copy.rglob("*.jsonl")}
    change = ["optimizer=adamw", "resume_policy=override"]
    run = train([*job, f"resume={step_file(copy, 10)}", *change])
    assert run.code == 4
    assert {path: path.read_bytes() for path in before} == before
    assert step_file(copy, 40).exists()
    assert not (copy / "abandoned").exists()


def test_a_new_run_from_anothers_checkpoint_has_its_own_ranking_and_files(
    train, job, copy, tmp_path
):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    new = tmp_path / "new"
    run = train([*job, f"resume={step_file(copy, 30)}", f"run_dir={new}"])
    assert run.code == 0, run.err
    assert {path: path.read_bytes() for path in before} == before
    best = json.loads((new / "checkpoints" / "index.json").read_text())["names"]["best"]
    assert best["step"] > 30
    assert (new / "checkpoints" / "best.pt").exists()
    steps = [json.loads(line)["step"] for line in (new / "metrics.jsonl").read_text().splitlines()]
    assert min(steps) > 30
    assert "lost" not in run.err
    assert not (new / "abandoned").exists()
