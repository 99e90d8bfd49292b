"""Ranks of the real command line: they fail, stop and start again together.

The test is the launcher: it holds the store, sets the environment, and starts the ranks.
"""

import json
import multiprocessing.connection
import re
import signal

import pytest
from torch.distributed import TCPStore

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
    "strategy.timeout=20",
    "callbacks.checkpoint.every_n_steps=3",
    "callbacks.model_summary=null",
    "run_dir=run",
]
FAULTS = """
import os, signal, sys, time
import torch
from trainer.callback import Callback


class Break(Callback):
    def __init__(self, how, rank=1, step=7):
        self.how, self.rank, self.step = how, rank, step

    def on_update_end(self, trainer):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and (trainer.group.rank, trainer.state.updates) == (self.rank, self.step):
            getattr(self, self.how)()

    def fail(self):
        raise ValueError("a sample of nonsense")

    def leave(self):
        os._exit(0)

    def hang(self):
        print("hanging", file=sys.stderr, flush=True)
        while True:
            time.sleep(1)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def terminate(self):
        os.kill(os.getpid(), signal.SIGTERM)


class Branched(torch.nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.used = torch.nn.Linear(256, num_classes)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x.flatten(1))
"""


class Group:
    """Ranks on their way."""

    def __init__(self, runs, store, folder):
        self.runs, self.store, self.folder = runs, store, folder

    @property
    def run_dir(self):
        return self.folder / "run"

    @property
    def status(self):
        return json.loads((self.run_dir / "status.json").read_text())

    @property
    def err(self):
        return "".join(run.err for run in self.runs)

    def wait(self, seconds=60):
        """Return the exit codes; a rank that hangs is told to stop, as torchrun does it."""
        processes = [run.process for run in self.runs]
        multiprocessing.connection.wait([process.sentinel for process in processes], seconds)
        for process in processes:
            process.join(5)  # those that notice by themselves
            if process.exitcode is None:
                process.terminate()
        return [run.wait(15).code for run in self.runs]

    def error(self, tracebacks=0):
        """Return the one `error:` line of all ranks."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        shown = self.err.count("Traceback (most recent call last)")
        assert shown == tracebacks, self.err
        return lines[0].removeprefix("error: ")


@pytest.fixture(scope="module")
def ranks(start, tmp_path_factory):
    """Start ranks of one command; `own` are further arguments of single ranks."""

    def begin(
        world_size, *arguments, own=None, folder=None, attempt=0, store=None, job=JOB, tmpfs=None
    ):
        folder = folder or tmp_path_factory.mktemp("group")
        (folder / "faults.py").write_text(FAULTS)
        store = store or TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        common = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        runs = [
            start(
                [*job, *arguments, *(own or {}).get(rank, [])],
                folder=folder,
                environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                tmpfs=tmpfs if rank == 0 else None,
            )
            for rank in range(world_size)
        ]
        return Group(runs, store, folder)

    return begin


def broken(how, rank=1):
    return [
        "+callbacks.break._target_=faults.Break",
        f"+callbacks.break.how={how}",
        f"+callbacks.break.rank={rank}",
    ]


@pytest.fixture(scope="module")
def whole(ranks):
    """Undisturbed runs, by number of ranks."""
    runs = {}

    def run(world_size):
        if world_size not in runs:
            # The same configuration as the disturbed runs', whose fault never comes.
            group = ranks(world_size, *broken("fail", rank=99))
            assert group.wait() == [0] * world_size, group.err
            runs[world_size] = group
        return runs[world_size]

    return run


def test_a_group_is_one_run(whole):
    group = whole(2)
    assert group.status["state"] == "finished"
    assert [path.name for path in group.folder.glob("[!_]*") if path.is_dir()] == ["run"]
    assert group.runs[0].out.count("\nrun ") == 1
    assert group.runs[1].out == ""
    assert "error" not in group.err
    log = (group.run_dir / "train.log").read_text()
    assert log.count("run directory") == 1
    steps = [json.loads(line)["step"] for line in (group.run_dir / "metrics.jsonl").open()]
    assert steps == sorted(steps)
    assert len(list((group.run_dir / "tensorboard").iterdir())) == 1


def test_an_exception_ends_all(ranks):
    group = ranks(2, *broken("fail"))
    assert group.wait() == [1, 1]
    assert group.error(tracebacks=1).endswith(": ValueError: a sample of nonsense")
    assert (group.status["state"], group.status["code"]) == ("failed", 1)
    assert "a sample of nonsense" in group.status["reason"]
    assert "faults.py" in (group.run_dir / "train.log").read_text()  # where it came from


@pytest.mark.parametrize("how", ["leave", "die"])
def test_a_lost_process_ends_all(ranks, how):
    group = ranks(2, *broken(how))
    codes = group.wait()
    assert codes == [6, {"leave": 0, "die": -signal.SIGKILL}[how]]
    assert group.error() == "another process of the run was lost"
    assert (group.status["state"], group.status["code"]) == ("failed", 6)


def test_a_process_that_hangs_ends_all(ranks):
    group = ranks(2, *broken("hang"), "strategy.timeout=3")
    assert group.wait() == [6, 6]
    assert group.error() == "another process did not answer within 3 s (strategy.timeout)"


def test_the_main_process_is_lost(ranks):
    group = ranks(3, *broken("die", rank=0))
    assert group.wait() == [-signal.SIGKILL, 6, 6]
    assert group.error() == "another process of the run was lost"


def test_a_full_disk_of_the_main_process_ends_all(ranks, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    arguments = [f"run_dir={small / 'run'}", "callbacks.tensorboard=null"]
    group = ranks(2, *arguments, tmpfs=(small, "size=128k"))
    assert group.wait() == [7, 7]
    assert "no space left" in group.error()
    assert "no checkpoint at step" in group.err  # tried before, and the run went on


def test_a_signal_to_one_process_stops_and_saves_all(ranks):
    group = ranks(2, *broken("terminate"))
    assert group.wait() == [143, 143]
    assert "stopped by SIGTERM; saved " in group.error()
    assert (group.status["state"], group.status["code"]) == ("preempted", 143)
    _, payload, _ = CheckpointStore(group.run_dir / "checkpoints").newest()
    assert payload["state"]["counters"]["updates"] == 8  # the other learns of it an update later


def test_ranks_with_different_configurations_are_refused(ranks):
    group = ranks(2, own={1: ["optimizer.lr=0.5"]})
    assert group.wait() == [2, 2]
    assert group.error() == "config differs on rank 1: optimizer.lr"
    assert not group.run_dir.exists()


def test_a_mistake_in_the_configuration_is_told_once(ranks):
    group = ranks(2, "optimizer.lrr=1")
    assert group.wait() == [2, 2]
    assert "optimizer.lr" in group.error()


def test_parameters_without_a_gradient_are_named(ranks, tmp_path):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    node = "_target_: faults.Branched\nnum_classes: ${data.num_classes}\n"
    (tmp_path / "conf" / "model" / "branched.yaml").write_text(node)
    job = [argument for argument in JOB if not argument.startswith("model")]
    group = ranks(2, job=[*job, "model=branched", f"--config-dir={tmp_path / 'conf'}"])
    assert group.wait() == [2, 2]
    assert "unused.weight, unused.bias" in group.error()
    assert "strategy.find_unused_parameters=true" in group.error()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_group_started_again_ends_as_if_nothing_had_been(ranks, whole, world_size):
    first = ranks(world_size, *broken("die"))
    first.wait()
    # The launcher keeps its store; nothing but the attempt tells the new processes.
    second = ranks(world_size, *broken("die"), folder=first.folder, attempt=1, store=first.store)
    assert second.wait() == [0] * world_size, second.err
    assert re.search("resumed at step [36]", second.err)  # a kill can hit the save of step 6
    undisturbed = whole(world_size).run_dir
    assert differences(undisturbed, second.run_dir, but=("config",)) == []


def test_shards_of_a_network_of_images(ranks):
    kept = [key for key in JOB if not key.startswith(("model", "strategy="))]
    job = [*kept, "model=small_cnn", "trainer.max_steps=6", "trainer.precision=fp64"]
    shards, whole = (ranks(2, job=[*job, f"strategy={name}"]) for name in ("fsdp", "ddp"))
    assert shards.wait() == whole.wait() == [0, 0], shards.err + whole.err
    assert "channels_last: true" in (shards.run_dir / "config.yaml").read_text()
    for one, other in zip(metrics(shards), metrics(whole), strict=True):
        assert one == pytest.approx(other, abs=1e-10)


def metrics(group):
    lines = [json.loads(line) for line in (group.run_dir / "metrics.jsonl").open()]
    return [{k: v for k, v in line.items() if "loss" in k or "accuracy" in k} for line in lines]
