"""Several nodes: a torchrun launcher for each, all on this machine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections import Counter

import pytest

from same_run import differences
from trainer.checkpoints.store import CheckpointStore

pytestmark = pytest.mark.slow

JOB = [
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
        command += ["-m", "scripts.train", *JOB, *job, f"run_dir={self.run_dir}"]
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


def broken(how, step=7):
    return [
        "+callbacks.break._target_=own.Break",
        f"+callbacks.break.how={how}",
        f"+callbacks.break.step={step}",
    ]


@pytest.fixture(scope="module")
def two(launch):
    """A run of two nodes, whose fault never comes."""
    run = launch(*broken("fail", step=0))
    assert run.wait() == [0, 0], run.err
    return run


def test_two_nodes_train_as_one(launch, two):
    assert two.status["state"] == "finished"
    assert json.loads((two.run_dir / "manifest.json").read_text())["world_size"] == 2
    assert [path.name for path in two.run_dir.parent.glob("[!_]*") if path.is_dir()] == ["run"]
    assert two.out.count("\nrun ") == 1
    assert len(two.seen) == 2
    tried = Counter({"0": len(two.seen)})  # each process tries the first sample before the run
    expected = Counter({str(index): 2 for index in range(1257)})  # two epochs
    assert sum(two.seen, Counter()) == expected + tried
    one = launch(*broken("fail", step=0), nodes=1, processes=2)
    assert one.wait() == [0], one.err
    assert one.out.count("\nrun ") == 1
    assert one.seen == two.seen
    assert differences(one.run_dir, two.run_dir, but=("config",)) == []


def test_a_killed_process_is_replaced_on_its_node(launch, two):
    run = launch(*broken("die"), options=["--max-restarts=1"])
    assert run.wait() == [0, 0], run.err
    assert "restart 1 of 1" in run.err
    assert re.search("resumed at step [36]", run.err)  # a kill can hit the save of step 6
    assert differences(two.run_dir, run.run_dir, but=("config",)) == []


def test_a_failure_on_one_node_ends_all(launch):
    run = launch(*broken("fail"))
    assert run.wait() == [1, 1]  # torchrun's for whatever it was
    assert (run.status["state"], run.status["code"]) == ("failed", 1)
    assert run.status["reason"] == "process 1 failed: ValueError: a sample of nonsense"
    assert run.err.count("\nerror: ") == 1


def test_a_lost_node_ends_all(launch):
    run = launch(*broken("lose_the_node"))
    assert sorted(run.wait()) == [-signal.SIGKILL, 1]
    assert (run.status["state"], run.status["code"]) == ("failed", 6)
    assert "error: another process of the run was lost" in run.err


def test_a_preempted_node_saves_and_ends_all(launch):
    run = launch(
        *broken("preempt_the_node"),
        options=["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"],
    )
    assert run.wait() == [1, 1]
    assert (run.status["state"], run.status["code"]) == ("preempted", 143)
    _, payload, _ = CheckpointStore(run.run_dir / "checkpoints").newest()
    assert payload["state"]["counters"]["updates"] >= 7
