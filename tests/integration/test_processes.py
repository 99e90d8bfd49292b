"""Processes that train as one: ranks by hand, our launcher, and torchrun's for several nodes."""

import json
import multiprocessing.connection
import os
import re
import select
import shutil
import signal
import socket
import uuid
from collections import Counter
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from regimen.trainer.checkpoints.store import CheckpointStore
from same_run import differences, logged

JOB = [
    *("experiment=resnet18", "model=mlp", "model.hidden=[32,16]", "optimizer=sgd_nesterov"),
    *("loader.num_workers=0", "trainer.max_epochs=2", "trainer.log_every_n_steps=5"),
    *("strategy=ddp", "strategy.timeout=20", "callbacks.checkpoint.every_n_steps=3"),
    *("callbacks.model_summary=null", "run_dir=run"),
]
FAULTS = Path(__file__).with_name("process_faults.py")


def broken(how, **more):
    words = {"_target_": "faults.Break", "how": how, **more}
    return [f"+callbacks.break.{key}={value}" for key, value in words.items()]


NOTHING = broken("fail", step=0)  # a disturbed run's configuration, whose fault never comes


def status_of(run):
    status = json.loads((run / "status.json").read_text())
    return status["state"], status["code"]


def saved_updates(run):
    _, payload, _ = CheckpointStore(run / "checkpoints").newest()
    return payload["state"]["counters"]["updates"]


class Group:
    """Processes on their way, or their launchers."""

    def __init__(self, runs, folder, store=None, patience=5):
        self.runs, self.folder, self.store, self.patience = runs, folder, store, patience
        self.run_dir = folder / "run"

    @property
    def err(self):
        return "".join(run.err for run in self.runs)

    def wait(self):
        """Return the exit codes; one that hangs is told to stop, as torchrun does it."""
        processes = [run.process for run in self.runs]
        multiprocessing.connection.wait([process.sentinel for process in processes], 60)
        for process in processes:
            process.join(self.patience)  # those that notice by themselves
            if process.exitcode is None:
                process.terminate()
        return [run.wait(seconds=15).code for run in self.runs]

    def error(self, tracebacks=0):
        """Return the one `error:` line of all."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert tracebacks in (None, self.err.count("Traceback (most recent call last)")), self.err
        return line.removeprefix("error: ")


# Ranks: the test is the launcher, holds the store, sets the environment, and starts them.


@pytest.fixture(scope="module")
def ranks(start, tmp_path_factory):
    """Start ranks of one command; `own` are further arguments of single ranks."""

    def begin(world_size, *arguments, own=None, before=None, job=JOB, tmpfs=None):
        folder = before.folder if before else tmp_path_factory.mktemp("group")
        shutil.copy(FAULTS, folder / "faults.py")
        # A launcher keeps its store; nothing but the attempt tells the new processes.
        new = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        store = before.store if before else new
        common = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(int(before is not None)),
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
        return Group(runs, folder, store)

    return begin


@pytest.fixture(scope="module")
def whole(ranks):
    """Undisturbed runs, by number of ranks."""
    runs = {}

    def run(world_size):
        if world_size not in runs:
            group = runs[world_size] = ranks(world_size, *NOTHING)
            assert group.wait() == [0] * world_size, group.err
        return runs[world_size]

    return run


def test_a_group_is_one_run(whole):
    group = whole(2)
    assert status_of(group.run_dir) == ("finished", 0)
    assert [path.name for path in group.folder.glob("[!_]*") if path.is_dir()] == ["run"]
    assert group.runs[0].out.count("\nrun ") == 1
    assert group.runs[1].out == ""
    assert "error" not in group.err
    assert (group.run_dir / "train.log").read_text().count("run directory") == 1
    steps = [line["step"] for line in logged(group.run_dir)]
    assert steps == sorted(steps)
    assert len(list((group.run_dir / "tensorboard").iterdir())) == 1


LOST = "another process of the run was lost"
SILENT = "another process did not answer within 3 s (strategy.timeout)"


@pytest.mark.parametrize(
    ("how", "rank", "codes", "error"),
    [
        pytest.param("fail", 1, [1, 1], "a sample of nonsense", id="exception"),
        pytest.param("leave", 1, [6, 0], LOST, id="left"),
        pytest.param("die", 1, [6, -signal.SIGKILL], LOST, id="killed"),
        pytest.param("hang", 1, [6, 6], SILENT, id="hangs"),
        pytest.param("die", 0, [-signal.SIGKILL, 6, 6], LOST, id="main-process"),
    ],
)
def test_a_process_that_fails_is_lost_or_hangs_ends_all(ranks, how, rank, codes, error):
    more = ["strategy.timeout=3"] if how == "hang" else []
    group = ranks(len(codes), *broken(how, rank=rank), *more)
    assert group.wait() == codes
    assert group.error(tracebacks=int(how == "fail")).endswith(error)
    if rank:
        assert status_of(group.run_dir) == ("failed", codes[0])
    if how == "fail":
        assert "faults.py" in (group.run_dir / "train.log").read_text()  # where it came from


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
    assert status_of(group.run_dir) == ("preempted", 143)
    assert saved_updates(group.run_dir) == 8  # the other learns of it an update later


def test_ranks_with_different_configurations_are_refused(ranks):
    group = ranks(2, own={1: ["optimizer.lr=0.5"]})
    assert group.wait() == [2, 2]
    assert group.error() == "config differs on rank 1: optimizer.lr"
    assert not group.run_dir.exists()


def test_parameters_without_a_gradient_are_named(ranks):
    job = [argument for argument in JOB if not argument.startswith("model")]
    group = ranks(2, job=[*job, "model={_target_: faults.Branched}"])
    assert group.wait() == [2, 2]
    assert "unused.weight, unused.bias" in group.error()
    assert "strategy.find_unused_parameters=true" in group.error()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_group_started_again_ends_as_if_nothing_had_been(ranks, whole, world_size):
    first = ranks(world_size, *broken("die"))
    first.wait()
    second = ranks(world_size, *broken("die"), before=first)
    assert second.wait() == [0] * world_size, second.err
    assert re.search("resumed at step [36]", second.err)  # a kill can hit the save of step 6
    assert differences(whole(world_size).run_dir, second.run_dir, but=("config",)) == []


def test_shards_of_a_network_of_images(ranks):
    kept = [key for key in JOB if not key.startswith(("model", "strategy="))]
    job = [*kept, "model=small_cnn", "trainer.max_steps=6", "trainer.precision=fp64"]
    shards, plain = (ranks(2, job=[*job, f"strategy={name}"]) for name in ("fsdp", "ddp"))
    assert shards.wait() == plain.wait() == [0, 0], shards.err + plain.err
    assert "channels_last: true" in (shards.run_dir / "config.yaml").read_text()
    kinds = ("loss", "accuracy")
    one, other = (
        [{k: v for k, v in line.items() if k.endswith(kinds)} for line in logged(group.run_dir)]
        for group in (shards, plain)
    )
    assert one == [pytest.approx(line, abs=1e-10) for line in other]


# Our launcher: `strategy.devices=2` in one command.


@pytest.fixture
def launched(start, tmp_path):
    shutil.copy(FAULTS, tmp_path / "faults.py")
    return lambda *more: start([*JOB, "strategy.devices=2", *more], folder=tmp_path)


def waiting(run):
    """Wait until both processes do; return descriptors of them and their launcher's notes."""
    run.until(lambda: "here 0" in run.err and "here 1" in run.err)
    first, second = map(int, Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())
    notes = Path(Path(f"/proc/{first}/cmdline").read_bytes().split(b"\0")[-2].decode())
    return [os.pidfd_open(first), os.pidfd_open(second)], notes


def assert_ended(descriptors):
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 10)[0], "a process lives on"
        os.close(descriptor)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="INT"),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow, id="TERM"),
    ],
)
def test_a_signal_saves_and_ends_all(launched, tmp_path, number, code):
    run = launched(*broken("wait"))
    descriptors, notes = waiting(run)
    run.send(number)
    run.wait(code, 30)
    assert f"stopped by {number.name}; saved " in run.error
    assert saved_updates(tmp_path / "run") == 7
    assert status_of(tmp_path / "run") == ("preempted", code)
    assert_ended(descriptors)
    assert not notes.exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(launched):
    run = launched(*broken("wait_deaf"))
    descriptors, notes = waiting(run)
    run.send(signal.SIGINT)
    run.until((notes / "stop").exists)
    run.send(signal.SIGINT)
    run.wait(130, 10)
    assert_ended(descriptors)
    assert not notes.exists()


@pytest.mark.slow
def test_nothing_outlives_a_killed_launcher(launched):
    run = launched(*broken("wait"))
    descriptors, _ = waiting(run)
    run.kill()
    assert_ended(descriptors)


@pytest.mark.slow
def test_a_killed_process_is_replaced(launched, whole, tmp_path):
    faults = ["+callbacks.break._target_=faults.DieInTurn", "strategy.max_restarts=2"]
    run = launched(*faults).wait(0, 180)
    assert run.out.count("\nrun ") == 1
    for number, steps in ((1, "[36]"), (2, "(21|24)")):  # a kill can hit the save of a step
        assert f"restart {number} of 2" in run.err
        assert re.search(f"resumed at step {steps}", run.err)
    assert differences(whole(2).run_dir, tmp_path / "run", but=("config",)) == []


@pytest.mark.slow
def test_a_killed_process_ends_all(launched, tmp_path):
    run = launched(*broken("die")).wait(6)
    cause, _, command = run.error.partition("; go on with: ")
    words = r"process 1 \(pid \d+\) was killed by SIGKILL, often for lack of memory"
    assert re.fullmatch(words, cause)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["reason"], status["resume"]) == (cause, command)
    assert "resume=auto" in command


def processes_below(pid):
    """Return a process and all below it."""
    found = [pid]
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in file.read_text().split():
            found += processes_below(child)
    return found


def listening(pid):
    """Return the addresses at which a process and those below it listen, as the kernel has them."""
    own = set()
    for process in processes_below(pid):
        own |= {os.readlink(file) for file in Path(f"/proc/{process}/fd").iterdir()}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [one[1] for one in lines if one[3] == "0A" and f"socket:[{one[9]}]" in own]


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_nothing_listens_beyond_the_machine_or_is_unpickled_from_it(launched, name):
    run = launched(*broken("wait"), f"strategy={name}")
    descriptors, notes = waiting(run)
    assert notes.stat().st_mode & 0o777 == 0o700  # torch unpickles what its stores hold
    found = listening(run.pid)
    assert found  # gloo's
    assert {address.partition(":")[0] for address in found} == {"0100007F"}  # 127.0.0.1
    run.send(signal.SIGINT)
    run.wait(130, 30)
    assert_ended(descriptors)


def test_a_mistake_that_the_processes_find_is_told_once_where_it_was_written(launched, tmp_path):
    run = launched("optimizer.nesterof=true").wait(2)
    assert run.err.startswith("regimen ")
    assert run.err.splitlines()[1:] == [
        "error: optimizer.nesterof: torch.optim.SGD has no argument 'nesterof'; did you mean "
        "nesterov? [command line: optimizer.nesterof=true]"
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_sweep_makes_one_directory_a_job(launched, tmp_path):
    words = ["-m", "trainer.max_steps=2", "optimizer.lr=0.1,0.05", "sweep.jobs=2"]
    launched(*words, "sweep.report=false").wait(0, 300)
    for number in (0, 1):
        manifest = json.loads((tmp_path / "run" / str(number) / "manifest.json").read_text())
        assert (manifest["world_size"], manifest["exit"]["state"]) == (2, "finished")


# torchrun, a launcher for each node.


@pytest.fixture(scope="module")
def launch(start, tmp_path_factory):
    """Start a launcher for each node."""

    def begin(*job, nodes=2, processes=1, options=()):
        folder = tmp_path_factory.mktemp("nodes")
        shutil.copy(FAULTS, folder / "faults.py")
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            place = f"--rdzv-endpoint=localhost:{listener.getsockname()[1]}"
        words = [f"--nnodes={nodes}", place, "--rdzv-backend=c10d", f"--rdzv-id={uuid.uuid4().hex}"]
        words += [
            *options,
            f"--nproc-per-node={processes}",
            "-m",
            "regimen.scripts.train",
            *JOB,
            *job,
        ]
        words += ["data.train._target_=faults.Noted", "trainer.precision=fp64"]
        more = {"command": "torchrun", "environment": {"NOTES": str(folder / "seen")}}
        return Group([start(words, folder, **more) for _ in range(nodes)], folder, patience=60)

    return begin


def seen(group):
    """Return how often each sample was read, by rank."""
    return [Counter(file.read_text().split()) for file in sorted(group.folder.glob("seen-*"))]


@pytest.mark.slow
def test_two_nodes_train_as_one(launch):
    two = launch(*NOTHING)
    assert two.wait() == [0, 0], two.err
    assert status_of(two.run_dir) == ("finished", 0)
    assert json.loads((two.run_dir / "manifest.json").read_text())["world_size"] == 2
    assert [path.name for path in two.run_dir.parent.glob("[!_]*") if path.is_dir()] == ["run"]
    assert "".join(node.out for node in two.runs).count("\nrun ") == 1
    tried = Counter({"0": 2})  # each process tries the first sample before the run
    expected = Counter({str(index): 2 for index in range(1257)})  # two epochs
    assert len(seen(two)) == 2
    assert sum(seen(two), Counter()) == expected + tried
    one = launch(*NOTHING, nodes=1, processes=2)
    assert one.wait() == [0], one.err
    assert seen(one) == seen(two)
    assert differences(one.run_dir, two.run_dir, but=("config",)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "codes", "status"),
    [  # 1 is torchrun's code for whatever it was
        pytest.param("lose_the_node", [-signal.SIGKILL, 1], ("failed", 6), id="lost"),
        pytest.param("preempt_the_node", [1, 1], ("preempted", 143), id="preempted"),
    ],
)
def test_what_happens_to_one_node_ends_all(launch, how, codes, status):
    signals = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    run = launch(*broken(how), options=[signals])
    assert sorted(run.wait()) == codes
    assert status_of(run.run_dir) == status
    if how == "preempt_the_node":
        assert saved_updates(run.run_dir) >= 7
    else:
        assert run.error(tracebacks=None)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["regression", "segmentation", "char_lm"])
def test_an_evaluation_is_the_same_in_two_processes(of_experiment, evaluated, experiment):
    run = of_experiment(experiment)
    expected = evaluated(run)
    found = evaluated(run, "strategy=ddp", "strategy.devices=2")
    assert found.keys() == expected.keys()
    words = ("checkpoint", "split")
    assert [found.pop(name) for name in words] == [expected.pop(name) for name in words]
    assert found == pytest.approx(expected, rel=1e-6)
