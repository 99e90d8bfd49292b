"""Run the real command line, many times in little time.

A server process imports what the command imports and then forks once for each run, so that a run
costs its training and not 5 s of imports. The server has computed nothing, so no thread is lost.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
PRELOADED = """
pytest sklearn.datasets torch._dynamo torch.distributed.run torchvision.transforms.v2
regimen.scripts.train regimen.scripts.evaluate regimen.scripts.composition.compose
regimen.scripts.runs.run regimen.scripts.runs.answers regimen.trainer.inference.run
regimen.trainer.tasks.classification regimen.models.mlp regimen.models.small_cnn
regimen.callbacks.checkpoint regimen.callbacks.early_stopping regimen.callbacks.ema
regimen.callbacks.lr_monitor regimen.callbacks.model_summary regimen.callbacks.progress
regimen.callbacks.tensorboard regimen.callbacks.throughput
"""


def run_command(command, arguments, folder, output, environment, tmpfs):
    """Be a command such as `train` in a process of its own session."""
    gc.freeze()  # what was imported is never collected, nor copied to look at it
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup pytest` would ignore
    multiprocessing.set_start_method("fork", force=True)  # as where the command is typed
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(output.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT, 0o666), number)
    os.environ.update(environment)
    os.chdir(folder)
    if tmpfs is not None:
        mount(*tmpfs)
    torchrun = command == "torchrun"
    sys.argv = [*([] if torchrun else ["regimen"]), command, *arguments]
    if "STANDARD_INPUT" in environment:
        # Open until the process ends.
        sys.stdin = open(environment["STANDARD_INPUT"])  # noqa: SIM115
    name = "torch.distributed.run" if torchrun else "regimen.scripts.commands"
    module = importlib.import_module(name)

    if "TRAIN_AS_ON_A_GPU" in environment:
        train_as_on_a_gpu()

    def keep_tree():
        if tmpfs is not None:  # what is mounted here nobody else sees
            shutil.copytree(tmpfs[0], output.with_suffix(".tree"))

    atexit.register(keep_tree)  # for one of several processes, which ends by `os._exit`
    try:
        module.main()
    finally:
        keep_tree()


def train_as_on_a_gpu():
    """Take the CPU for a device that the host waits for, with the optimizers that go with it."""
    from regimen.trainer.assembly import parts
    from regimen.trainer.update import guard, means

    means.is_async = guard.is_async = lambda device: True
    plain = parts.build_optimizers

    def build_optimizers(model, *args, **more):
        on_meta = any(parameter.is_meta for parameter in model.parameters())  # a check's stand-ins
        return plain(model, *args, **more | {"prefer_fused": not on_meta})

    parts.build_optimizers = build_optimizers


def mount(folder, options):
    """Mount a small file system for this process alone."""
    ctypes.CDLL(None).unshare(NEW_MOUNTS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)


@dataclass
class Running:
    """A run on its way."""

    process: object
    output: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def pid(self):
        return self.process.pid

    @property
    def out(self):
        return self.output.with_suffix(".out").read_text()

    @property
    def err(self):
        return self.output.with_suffix(".err").read_text()

    @property
    def tree(self):
        """What a mounted file system held at the end."""
        return self.output.with_suffix(".tree")

    def send(self, number):
        """Send a signal to the whole process group."""
        os.killpg(self.pid, number)

    def until(self, condition, seconds=60):
        """Wait until something is so; the run must live that long."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.exitcode is None, f"ended with {self.process.exitcode}: {self.err}"
            assert time.monotonic() < deadline, f"waited in vain: {self.err}"
            time.sleep(0.002)

    def wait(self, code=None, seconds=120):
        """Wait for the end, which has this exit code if one is given."""
        self.process.join(seconds)
        self.code = self.process.exitcode
        assert self.code is not None, f"hangs: {self.err}"
        assert code in (None, self.code), f"ended with {self.code}: {self.out}\n{self.err}"
        return self

    def kill(self):
        """End the run and its workers at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.join()

    @property
    def error(self):
        """The one `error:` line, without its beginning."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err, self.err
        return lines[0].removeprefix("error: ")


@pytest.fixture(scope="session")
def job():
    """Two epochs of 20 updates with whatever has a state: BatchNorm, dropout, an average."""
    return [
        "experiment=resnet18",
        "model=small_cnn",
        "model.dropout=0.2",
        "optimizer=sgd_nesterov",
        "callbacks=[default,ema]",
        "loader.num_workers=0",
        "trainer.log_every_n_steps=4",
        "callbacks.checkpoint.every_n_steps=5",
        "callbacks.checkpoint.save_top_k=-1",
        "trainer.max_epochs=2",
    ]


@pytest.fixture(scope="session")
def server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED.split())
    return context


@pytest.fixture(scope="session")
def start(server, tmp_path_factory):
    """Start `train ARGUMENTS`, or another command; ended with the session at the latest."""
    outputs = tmp_path_factory.mktemp("outputs")
    running = []

    def begin(arguments, folder=None, environment=None, tmpfs=None, command="train"):
        output = outputs / str(len(running))
        folder = folder or tmp_path_factory.mktemp("cwd")
        values = (command, list(arguments), folder, output, environment or {}, tmpfs)
        process = server.Process(target=run_command, args=values)
        process.start()
        running.append(Running(process, output))
        running[-1].until(output.with_suffix(".err").exists)
        return running[-1]

    yield begin
    for run in running:
        run.kill()


@pytest.fixture(scope="session")
def train(start):
    """Run `train ARGUMENTS`, or another command, to its end: a success if no code is given."""
    return lambda arguments, code=0, **options: start(arguments, **options).wait(code)


@pytest.fixture(scope="session")
def evaluated(train):
    """Run `evaluate run=FOLDER OVERRIDES` and return what it writes into its file."""

    def run(folder, *overrides):
        train([f"run={folder}", *overrides], command="evaluate")
        return json.loads((folder / "evaluation.json").read_text())

    return run


@pytest.fixture(scope="session")
def whole(train, job, tmp_path_factory):
    """A finished run of two epochs, with all its checkpoints: 5, 10, ... 40. Do not change it."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    train([*job, f"run_dir={path}"])
    return path


@pytest.fixture(scope="session")
def of_experiment(train, tmp_path_factory):
    """Return the run of an experiment after one update; each is trained once."""

    @functools.cache
    def run(experiment, *more):
        path = tmp_path_factory.mktemp("runs") / experiment
        limits = ["trainer.max_steps=1", "loader.num_workers=0", "trainer.limit_val_batches=1"]
        train([f"experiment={experiment}", *limits, *more, f"run_dir={path}"])
        return path

    return run


@pytest.fixture
def killed(whole, tmp_path):
    """A copy of the run as a kill -9 after its last checkpoint would have left it."""
    path = tmp_path / "killed"
    shutil.copytree(whole, path)
    status = path / "status.json"
    status.write_text(status.read_text().replace('"finished"', '"running"'))
    return path
