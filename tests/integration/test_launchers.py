"""Launchers of processes, ours and torchrun's for several nodes: one answer, nothing left."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections import Counter
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


NODES_JOB = [
    "experiment=resnet18",
    "model=mlp",
    "optimizer=sgd_nesterov",
    "model.hidden=[32,16]",
    "data.train._target_=own.Noted",
    "loader.num_workers=0",
    "trainer.max_epochs=2",
    "trainer.precision=fp64",
    "strategy=ddp",
    "strategy.timeout=20",
    "callbacks.checkpoint.every_n_steps=3",
    "callbacks.model_summary=null",
]
OWN = """
import os, signal, time
from data.sources import Digits
from trainer.callback import Callback


class Noted(Digits):
    def __getitem__(self, index):
        with open(f"{os.environ['NOTES']}-{os.environ['RANK']}", "a") as file:
            print(index, file=file)
        return super().__getitem__(index)


class Break(Callback):
    def __init__(self, how, step=7):
        self.how, self.step = how, step

    def on_update_end(self, trainer):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and (trainer.group.rank, trainer.state.updates) == (1, self.step):
            getattr(self, self.how)(trainer.state)

    def fail(self, state):
        raise ValueError("a sample of nonsense")

    def die(self, state):
        os.kill(os.getpid(), signal.SIGKILL)

    def lose_the_node(self, state):
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def preempt_the_node(self, state):
        os.kill(os.getppid(), signal.SIGUSR1)
        while state.signal is None:
            time.sleep(0.01)
"""


class Launchers:
    """torchrun launchers on their way, one for each node."""

    def __init__(self, folder, nodes, options, job):
        self.run_dir, self.notes = folder / "run", folder / "seen"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NOTES": str(self.notes)}
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", *options]
        command += ["-m", "scripts.train", *NODES_JOB, *job, f"run_dir={self.run_dir}"]
        with open(folder / "out", "ab") as out, open(folder / "err", "ab") as err:
            self.processes = [
                subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)
                for _ in range(nodes)
            ]

    def wait(self):
        """Return the exit codes."""
        return [process.wait(60) for process in self.processes]

    @property
    def out(self):
        return (self.run_dir.parent / "out").read_text()

    @property
    def err(self):
        return (self.run_dir.parent / "err").read_text()

    @property
    def status(self):
        return json.loads((self.run_dir / "status.json").read_text())

    @property
    def seen(self):
        """How often each sample was read, by rank."""
        files = sorted(self.notes.parent.glob("seen-*"))
        return [Counter(file.read_text().split()) for file in files]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Start a launcher for each node."""
    started = []

    def begin(*job, nodes=2, processes=1, options=()):
        folder = tmp_path_factory.mktemp("nodes")
        (folder / "own.py").write_text(OWN)
        place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
        place += [f"--rdzv-id={uuid.uuid4().hex}", f"--nproc-per-node={processes}"]
        started.append(Launchers(folder, nodes, [*place, *options], job))
        return started[-1]

    yield begin
    for launchers in started:
        for process in launchers.processes:
            process.terminate()
            process.wait()


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def broken_node(how, step=7):
    return [
        "+callbacks.break._target_=own.Break",
        f"+callbacks.break.how={how}",
        f"+callbacks.break.step={step}",
    ]


@pytest.fixture(scope="module")
def two(launch):
    """A run of two nodes, whose fault never comes."""
    run = launch(*broken_node("fail", step=0))
    assert run.wait() == [0, 0], run.err
    return run


@pytest.mark.slow
def test_two_nodes_train_as_one(launch, two):
    assert two.status["state"] == "finished"
    assert json.loads((two.run_dir / "manifest.json").read_text())["world_size"] == 2
    assert [path.name for path in two.run_dir.parent.glob("[!_]*") if path.is_dir()] == ["run"]
    assert two.out.count("\nrun ") == 1
    assert len(two.seen) == 2
    tried = Counter({"0": len(two.seen)})  # each process tries the first sample before the run
    expected = Counter({str(index): 2 for index in range(1257)})  # two epochs
    assert sum(two.seen, Counter()) == expected + tried
    one = launch(*broken_node("fail", step=0), nodes=1, processes=2)
    assert one.wait() == [0], one.err
    assert one.out.count("\nrun ") == 1
    assert one.seen == two.seen
    assert differences(one.run_dir, two.run_dir, but=("config",)) == []


@pytest.mark.slow
def test_a_killed_process_is_replaced_on_its_node(launch, two):
    run = launch(*broken_node("die"), options=["--max-restarts=1"])
    assert run.wait() == [0, 0], run.err
    assert "restart 1 of 1" in run.err
    assert re.search("resumed at step [36]", run.err)  # a kill can hit the save of step 6
    assert differences(two.run_dir, run.run_dir, but=("config",)) == []


@pytest.mark.slow
def test_a_failure_on_one_node_ends_all(launch):
    run = launch(*broken_node("fail"))
    assert run.wait() == [1, 1]  # torchrun's for whatever it was
    assert (run.status["state"], run.status["code"]) == ("failed", 1)
    assert run.status["reason"] == "process 1 failed: ValueError: a sample of nonsense"
    assert run.err.count("\nerror: ") == 1


@pytest.mark.slow
def test_a_lost_node_ends_all(launch):
    run = launch(*broken_node("lose_the_node"))
    assert sorted(run.wait()) == [-signal.SIGKILL, 1]
    assert (run.status["state"], run.status["code"]) == ("failed", 6)
    assert "error: another process of the run was lost" in run.err


@pytest.mark.slow
def test_a_preempted_node_saves_and_ends_all(launch):
    run = launch(
        *broken_node("preempt_the_node"),
        options=["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"],
    )
    assert run.wait() == [1, 1]
    assert (run.status["state"], run.status["code"]) == ("preempted", 143)
    _, payload, _ = CheckpointStore(run.run_dir / "checkpoints").newest()
    assert payload["state"]["counters"]["updates"] >= 7
