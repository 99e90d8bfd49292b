"""The launcher: processes of its own, one answer, nothing left behind."""

import json
import os
import re
import select
import signal
from pathlib import Path

import pytest

from same_run import differences
from trainer.checkpoints.store import CheckpointStore

JOB = [
    "experiment=resnet18",
    "model=mlp",
    "optimizer=sgd_nesterov",
    "model.hidden=[32,16]",
    "loader.num_workers=0",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=5",
    "strategy=ddp",
    "strategy.devices=2",
    "strategy.timeout=20",
    "callbacks.checkpoint.every_n_steps=3",
    "callbacks.model_summary=null",
]
FAULTS = """
import os, signal, sys, time
from trainer.callback import Callback


class Break(Callback):
    def __init__(self, how, rank=1, step=7):
        self.how, self.rank, self.step = how, rank, step

    def on_update_end(self, trainer):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and trainer.state.updates == self.step:
            if self.how == "wait":  # for the test
                print(f"here {trainer.group.rank}", file=sys.stderr, flush=True)
                while trainer.state.signal is None:
                    time.sleep(0.01)
            if self.how == "die" and trainer.group.rank == self.rank:
                os.kill(os.getpid(), signal.SIGKILL)


class DieInTurn(Callback):
    # Lose process 1 early in the first attempt, and process 0 later in the second.

    def on_update_end(self, trainer):
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if (attempt, trainer.group.rank, trainer.state.updates) in ((0, 1, 7), (1, 0, 25)):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def broken(how, rank=1):
    return [
        "+callbacks.break._target_=faults.Break",
        f"+callbacks.break.how={how}",
        f"+callbacks.break.rank={rank}",
    ]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "faults.py").write_text(FAULTS)
    return tmp_path


def status(run):
    return json.loads((run / "status.json").read_text())


def children(pid):
    """Return the processes that a process started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def descriptors_of_children(run):
    """Hold on to a launcher's processes."""
    found = [os.pidfd_open(pid) for pid in children(run.pid)]
    assert len(found) == 2
    return found


def assert_ended(descriptors):
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 10)[0], "a process lives on"
        os.close(descriptor)


def notes_of(run):
    """Return the folder of a launcher's notes, from its processes' command lines."""
    first = children(run.pid)[0]
    return Path(Path(f"/proc/{first}/cmdline").read_bytes().split(b"\0")[-2].decode())


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    """A finished run, and the folder that it was started in."""
    folder = tmp_path_factory.mktemp("cwd")
    return train(JOB, folder=folder), folder


def test_a_run_of_two_processes(whole):
    run, folder = whole
    assert run.code == 0, run.err
    assert run.out.count("\nrun ") == 1
    (path,) = (folder / "runs" / "resnet18").iterdir()
    assert status(path)["state"] == "finished"
    assert json.loads((path / "manifest.json").read_text())["world_size"] == 2


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="INT"),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow, id="TERM"),
        pytest.param(signal.SIGHUP, 143, marks=pytest.mark.slow, id="HUP"),
    ],
)
def test_a_signal_saves_and_ends_all(start, folder, number, code):
    run = start([*JOB, *broken("wait"), "run_dir=run"], folder=folder)
    run.until(lambda: "here 0" in run.err and "here 1" in run.err)
    notes = notes_of(run)
    run.send(number)
    run.wait(30)
    assert run.code == code, run.err
    assert f"stopped by {number.name}; saved " in run.error
    _, payload, _ = CheckpointStore(folder / "run" / "checkpoints").newest()
    assert payload["state"]["counters"]["updates"] == 7
    assert (status(folder / "run")["state"], status(folder / "run")["code"]) == ("preempted", code)
    assert not notes.exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(start, folder):
    fault = FAULTS.replace("trainer.state.signal is None", "True")
    (folder / "faults.py").write_text(fault)
    run = start([*JOB, *broken("wait"), "run_dir=run"], folder=folder)
    run.until(lambda: "here 0" in run.err and "here 1" in run.err)
    descriptors, notes = descriptors_of_children(run), notes_of(run)
    run.send(signal.SIGINT)
    run.until((notes / "stop").exists)
    run.send(signal.SIGINT)
    assert run.wait(10).code == 130
    assert_ended(descriptors)
    assert not notes.exists()


@pytest.mark.slow
def test_a_killed_process_is_replaced(start, folder, whole):
    faults = ["+callbacks.break._target_=faults.DieInTurn", "strategy.max_restarts=2"]
    run = start([*JOB, *faults, "run_dir=run"], folder=folder).wait(180)
    assert run.code == 0, run.err
    assert "restart 1 of 2" in run.err
    assert re.search("resumed at step [36]", run.err)  # a kill can hit the save of step 6
    assert "restart 2 of 2" in run.err
    assert re.search("resumed at step (21|24)", run.err)
    (undisturbed,) = (whole[1] / "runs" / "resnet18").iterdir()
    assert differences(undisturbed, folder / "run", but=("config",)) == []


@pytest.mark.slow
def test_a_killed_process_ends_all(train, folder):
    run = train([*JOB, *broken("die"), "run_dir=run"], folder=folder)
    assert run.code == 6
    cause, _, command = run.error.partition("; go on with: ")
    assert re.fullmatch(
        r"process 1 \(pid \d+\) was killed by SIGKILL, often for lack of memory", cause
    )
    assert status(folder / "run")["reason"] == cause
    assert status(folder / "run")["resume"] == command
    assert "resume=auto" in command


@pytest.mark.slow
def test_nothing_outlives_a_killed_launcher(start, folder):
    run = start([*JOB, *broken("wait"), "run_dir=run"], folder=folder)
    run.until(lambda: "here 0" in run.err and "here 1" in run.err)
    descriptors = descriptors_of_children(run)
    run.kill()
    assert_ended(descriptors)


def test_a_mistake_that_the_processes_find_is_told_where_it_was_written(train, folder):
    run = train([*JOB, "optimizer.nesterof=true"], folder=folder)
    assert run.code == 2
    first, error = run.err.splitlines()
    assert first.startswith("regimen ")
    assert error == (
        "error: optimizer.nesterof: torch.optim.SGD has no argument 'nesterof'; did you mean "
        "nesterov? [command line: optimizer.nesterof=true]"
    )
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_a_sweep_makes_one_directory_a_job(start, folder):
    grid = ["-m", *JOB, "trainer.max_epochs=1", "optimizer.lr=0.1,0.05", "sweep.jobs=2"]
    run = start([*grid, "run_dir=sweep"], folder=folder).wait(300)
    assert run.code == 0, run.err
    for number in (0, 1):
        manifest = json.loads((folder / "sweep" / str(number) / "manifest.json").read_text())
        assert (manifest["world_size"], manifest["exit"]["state"]) == (2, "finished")
    assert {"0", "1"} <= {path.name for path in (folder / "sweep").iterdir() if path.is_dir()}
    assert not (folder / "runs").exists()
