"""A small configuration, and a job that does as it is told, for tests of whole sweeps."""

import sys

import pytest

from regimen.scripts.cli.arguments import parse_arguments
from regimen.scripts.sweeps import grid, launchers
from regimen.scripts.sweeps.grid import searches, sweep
from regimen.scripts.sweeps.search import search

# Stands for `regimen.scripts.train`: does what optimizer.lr tells it, and leaves a status as a
# run does.
JOB = """
import json, os, pathlib, signal, sys, time

overrides = [word for word in sys.argv[1:] if "=" in word and word[0] != "-"]
given = dict(word.split("=", 1) for word in overrides)
folder, lr = pathlib.Path(given["run_dir"]), float(given["optimizer.lr"])
started, status = folder / "started", folder / "status.json"
folder.mkdir(parents=True, exist_ok=True)
(folder / "manifest.json").write_text("{}")
(folder / "overrides.yaml").write_text(json.dumps(overrides))
print("job output", lr, flush=True)
if lr == 0.4 and not started.exists():
    started.touch()
    status.write_text('{"state": "running", "resume": "train it"}')
    os.kill(os.getpid(), signal.SIGKILL)
if lr == 0.5:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: sys.exit(143))
    (folder / "pid").write_text(str(os.getpid()))
    started.touch()
    while True:
        time.sleep(60)
if lr == 0.6:  # ends only once another has begun: they run side by side
    started.touch()
    while not (folder.parent / str(1 - int(folder.name)) / "started").exists():
        time.sleep(0.01)
names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "REGIMEN_SWEEP_JOB")
(folder / "environment.json").write_text(json.dumps({k: os.environ.get(k) for k in names}))
results = {"best/val/accuracy": 1 - lr, "val/accuracy": 0.0}
ended = {"state": "finished", "results": results, "seconds": 1.5}
if lr > 1:
    print("error: it diverged", file=sys.stderr)
    ended = {"state": "failed", "code": 5, "reason": "it diverged"}
if lr < 3:
    status.write_text(json.dumps(ended))
sys.exit(0 if lr <= 1 else 5 if lr < 3 else 3)
"""

# A small configuration composes quickly.
PRIMARY = """
name: train
data: {}
model: {_target_: torch.nn.Identity}
task: {_target_: torch.nn.Identity}
optimizer: {lr: 0.1}
sweep: {report: false}
"""
SWEEP = """
import sys
from regimen.scripts.cli.arguments import parse_arguments
from regimen.scripts.sweeps import grid, launchers
grid.check_built = lambda *_: (None, {}, ('', []))
launchers.TRAIN = 'small_job'
sys.exit(grid.sweep(parse_arguments(sys.argv[1:])))
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Replace the job by a small module, and work in an empty folder."""
    for name, text in (("modules/small_job.py", JOB), ("conf/train.yaml", PRIMARY)):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setattr(launchers, "TRAIN", "small_job")
    monkeypatch.setattr(grid, "check_built", lambda *_: (None, {}, ("", [])))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def command(job):
    """Return the command of a sweep of the small job in a process of its own."""
    return [sys.executable, "-c", SWEEP, "-m", "--config-path", "conf", "run_dir=there"]


@pytest.fixture
def sweep_of():
    """Run a sweep in this process."""

    def run(*argv):
        arguments = parse_arguments(["-m", "--config-path", "conf", *argv])
        return search(arguments) if searches(arguments) else sweep(arguments)

    return run
