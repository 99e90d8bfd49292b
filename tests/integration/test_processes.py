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
    "experiment=resnet18",
    "model=mlp",
    "model.hidden=[32,16]",
    "optimizer=sgd_nesterov",
    "loader.num_workers=0",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=5",
    "strategy=ddp",
    "strategy.timeout=20",
    "callbacks.checkpoint.every_n_steps=3",
    "callbacks.model_summary=null",
    "run_dir=run",
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
        self.runs = runs
        self.folder = folder
        self.store = store
        self.patience = patience
        self.run_dir = folder / "run"

    @property
    def err(self):
        return "".join(run.err for run in self.runs)

    def wait(self):
        """Return the exit codes; one that hangs is told to stop, as torchrun does it."""
        processes = [run.process for run in self.runs]
        sentinels = [process.sentinel for process in processes]
        multiprocessing.connection.wait(sentinels, 60)
        for process in processes:
            process.join(self.patience)  # those that notice by themselves
            if process.exitcode is None:
                process.terminate()
        return [run.wait(seconds=15).code for run in self.runs]

    def error(self, tracebacks=0):
        """Return the one `error:` line of all, below so many tracebacks; None: however many."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        if tracebacks is not None:
            found = self.err.count("Traceback (most recent call last)")
            assert found == tracebacks, self.err
        return line.removeprefix("error: ")


# Ranks: the test is the launcher, holds the store, sets the environment, and starts them.


@pytest.fixture(scope="module")
def ranks(start, tmp_path_factory):
    """Start ranks of one command; `own` are further arguments of single ranks."""

    def begin(world_size, *arguments, own=None, before=None, job=JOB, tmpfs=None):
        own = own or {}
        attempt = 0
        if before is None:
            folder = tmp_path_factory.mktemp("group")
            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        else:
            # A launcher keeps its store; nothing but the attempt tells the new processes.
            folder = before.folder
            store = before.store
            attempt = 1
        shutil.copy(FAULTS, folder / "faults.py")
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
        runs = []
        for rank in range(world_size):
            words = [*job, *arguments, *own.get(rank, [])]
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            small = tmpfs if rank == 0 else None
            runs.append(start(words, folder=folder, environment=environment, tmpfs=small))
        return Group(runs, folder, store)

    return begin


@pytest.fixture(scope="module")
def whole(ranks):
    """Undisturbed runs, by number of ranks."""
    runs = {}

    def run(world_size):
        if world_size not in runs:
            group = ranks(world_size, *NOTHING)
            assert group.wait() == [0] * world_size, group.err
            runs[world_size] = group
        return runs[world_size]

    return run


def folders_of(path):
    """Return the folders in a folder, but for those of Python's caches."""
    return [entry.name for entry in path.glob("[!_]*") if entry.is_dir()]


def test_a_group_is_one_run(whole):
    group = whole(2)

    assert status_of(group.run_dir) == ("finished", 0)
    assert folders_of(group.folder) == ["run"]
    main, other = group.runs
    assert main.out.count("\nrun ") == 1
    assert other.out == ""
    assert "error" not in group.err
    log = (group.run_dir / "train.log").read_text()
    assert log.count("run directory") == 1
    steps = [line["step"] for line in logged(group.run_dir)]
    assert steps == sorted(steps)
    events = list((group.run_dir / "tensorboard").iterdir())
    assert len(events) == 1


LOST = "another process of the run was lost"
SILENT = "another process did not answer within 3 s (strategy.timeout)"


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


@pytest.mark.parametrize(
    ("how", "rank", "codes", "error"),
    [
        pytest.param("leave", 1, [6, 0], LOST, id="left"),
        pytest.param("die", 1, [6, -signal.SIGKILL], LOST, id="killed"),
        pytest.param("die", 0, [-signal.SIGKILL, 6, 6], LOST, id="main-process"),
    ],
)
def test_a_process_that_is_lost_ends_all(ranks, how, rank, codes, error):
    group = ranks(len(codes), *broken(how, rank=rank))

    assert group.wait() == codes
    assert group.error().endswith(error)
    if rank != 0:
        assert status_of(group.run_dir) == ("failed", codes[0])


def test_a_process_that_fails_ends_all(ranks):
    group = ranks(2, *broken("fail", rank=1))

    assert group.wait() == [1, 1]
    assert group.error(tracebacks=1).endswith("a sample of nonsense")
    assert status_of(group.run_dir) == ("failed", 1)
    log = (group.run_dir / "train.log").read_text()
    assert "faults.py" in log  # where it came from


def test_a_process_that_hangs_ends_all(ranks):
    group = ranks(2, *broken("hang", rank=1), "strategy.timeout=3")

    assert group.wait() == [6, 6]
    assert group.error().endswith(SILENT)
    assert status_of(group.run_dir) == ("failed", 6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_group_started_again_ends_as_if_nothing_had_been(ranks, whole, world_size):
    first = ranks(world_size, *broken("die"))
    first.wait()

    second = ranks(world_size, *broken("die"), before=first)

    assert second.wait() == [0] * world_size, second.err
    assert re.search("resumed at step [36]", second.err)  # a kill can hit the save of step 6
    undisturbed = whole(world_size)
    assert differences(undisturbed.run_dir, second.run_dir, but=("config",)) == []


def test_shards_of_a_network_of_images(ranks):
    kept = [key for key in JOB if not key.startswith(("model", "strategy="))]
    job = [*kept, "model=small_cnn", "trainer.max_steps=6", "trainer.precision=fp64"]

    shards = ranks(2, job=[*job, "strategy=fsdp"])
    plain = ranks(2, job=[*job, "strategy=ddp"])

    assert shards.wait() == [0, 0], shards.err
    assert plain.wait() == [0, 0], plain.err
    assert "channels_last: true" in (shards.run_dir / "config.yaml").read_text()
    found = losses_and_accuracies(shards.run_dir)
    expected = losses_and_accuracies(plain.run_dir)
    assert found == [pytest.approx(line, abs=1e-10) for line in expected]


# Our launcher: `strategy.devices=2` in one command.


def losses_and_accuracies(run_dir):
    """Return what was logged of these, line by line."""
    lines = []
    for line in logged(run_dir):
        lines.append({name: line[name] for name in line if name.endswith(("loss", "accuracy"))})
    return lines


@pytest.fixture
def launched(start, tmp_path):
    shutil.copy(FAULTS, tmp_path / "faults.py")

    def begin(*more):
        return start([*JOB, "strategy.devices=2", *more], folder=tmp_path)

    return begin


def waiting(run):
    """Wait until both processes do; return descriptors of them and their launcher's notes."""
    run.until(lambda: "here 0" in run.err and "here 1" in run.err)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text()
    first, second = [int(pid) for pid in children.split()]
    command = Path(f"/proc/{first}/cmdline").read_bytes().split(b"\0")
    notes = Path(command[-2].decode())
    return [os.pidfd_open(first), os.pidfd_open(second)], notes


def assert_ended(descriptors):
    for descriptor in descriptors:
        readable, _, _ = select.select([descriptor], [], [], 10)
        assert readable, "a process lives on"
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


def test_processes_end_without_tearing_the_interpreter_down(launched):
    run = launched("+callbacks.late._target_=faults.LeaveThings", "trainer.max_epochs=1")

    run.wait(0)

    for rank in (0, 1):
        assert run.err.index(f"thread {rank}") < run.err.index(f"exit function {rank}")


def test_ranks_of_another_launcher_end_without_tearing_the_interpreter_down(ranks):
    group = ranks(2, "+callbacks.late._target_=faults.LeaveThings", "trainer.max_epochs=1")

    assert group.wait() == [0, 0], group.err

    for rank in (0, 1):
        assert group.err.index(f"thread {rank}") < group.err.index(f"exit function {rank}")


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
    run = launched("+callbacks.break._target_=faults.DieInTurn", "strategy.max_restarts=2")
    run.wait(0, 180)

    assert run.out.count("\nrun ") == 1
    assert "restart 1 of 2" in run.err
    assert "restart 2 of 2" in run.err
    # A kill can hit the save of a step.
    assert re.search("resumed at step [36]", run.err)
    assert re.search("resumed at step (21|24)", run.err)
    undisturbed = whole(2)
    assert differences(undisturbed.run_dir, tmp_path / "run", but=("config",)) == []


@pytest.mark.slow
def test_a_killed_process_ends_all(launched, tmp_path):
    run = launched(*broken("die")).wait(6)

    cause, _, command = run.error.partition("; go on with: ")
    words = r"process 1 \(pid \d+\) was killed by SIGKILL, often for lack of memory"
    assert re.fullmatch(words, cause)
    assert "resume=auto" in command
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["reason"] == cause
    assert status["resume"] == command


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
        descriptors = Path(f"/proc/{process}/fd").iterdir()
        own |= {os.readlink(descriptor) for descriptor in descriptors}
    addresses = []
    for table in ("tcp", "tcp6"):
        _, *lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()
        for line in lines:
            columns = line.split()
            address = columns[1]
            is_listening = columns[3] == "0A"
            inode = columns[9]
            if is_listening and f"socket:[{inode}]" in own:
                addresses.append(address)
    return addresses


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_nothing_listens_beyond_the_machine_or_is_unpickled_from_it(launched, name):
    run = launched(*broken("wait"), f"strategy={name}")
    descriptors, notes = waiting(run)

    assert notes.stat().st_mode & 0o777 == 0o700  # torch unpickles what its stores hold
    addresses = listening(run.pid)
    assert addresses  # gloo's
    hosts = {address.partition(":")[0] for address in addresses}
    assert hosts == {"0100007F"}  # 127.0.0.1

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

    for number in ("0", "1"):
        manifest = json.loads((tmp_path / "run" / number / "manifest.json").read_text())
        assert manifest["world_size"] == 2
        assert manifest["exit"]["state"] == "finished"


# torchrun, a launcher for each node.


@pytest.fixture(scope="module")
def launch(start, tmp_path_factory):
    """Start a launcher for each node."""

    def begin(*job, nodes=2, processes=1, options=()):
        folder = tmp_path_factory.mktemp("nodes")
        shutil.copy(FAULTS, folder / "faults.py")
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            _, port = listener.getsockname()
        words = [
            f"--nnodes={nodes}",
            f"--rdzv-endpoint=localhost:{port}",
            "--rdzv-backend=c10d",
            f"--rdzv-id={uuid.uuid4().hex}",
            *options,
            f"--nproc-per-node={processes}",
            "-m",
            "regimen.scripts.train",
            *JOB,
            *job,
            "data.train._target_=faults.Noted",
            "trainer.precision=fp64",
        ]
        environment = {"NOTES": str(folder / "seen")}
        runs = []
        for _ in range(nodes):
            runs.append(start(words, folder, command="torchrun", environment=environment))
        return Group(runs, folder, patience=60)

    return begin


def seen(group):
    """Return how often each sample was read, by rank."""
    files = sorted(group.folder.glob("seen-*"))
    return [Counter(file.read_text().split()) for file in files]


@pytest.mark.slow
def test_two_nodes_train_as_one(launch):
    two = launch(*NOTHING)
    assert two.wait() == [0, 0], two.err
    one = launch(*NOTHING, nodes=1, processes=2)
    assert one.wait() == [0], one.err

    assert status_of(two.run_dir) == ("finished", 0)
    manifest = json.loads((two.run_dir / "manifest.json").read_text())
    assert manifest["world_size"] == 2
    assert folders_of(two.folder) == ["run"]
    out = "".join(node.out for node in two.runs)
    assert out.count("\nrun ") == 1

    by_rank = seen(two)
    assert len(by_rank) == 2
    tried = Counter({"0": 2})  # each process tries the first sample before the run
    two_epochs = Counter({str(index): 2 for index in range(1257)})
    assert by_rank[0] + by_rank[1] == two_epochs + tried
    assert seen(one) == by_rank
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
    for name in ("checkpoint", "split"):  # the others are numbers
        assert found.pop(name) == expected.pop(name)
    assert found == pytest.approx(expected, rel=1e-6)
