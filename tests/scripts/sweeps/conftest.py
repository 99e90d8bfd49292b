"""A small configuration, and a job that does as it is told, for tests of whole sweeps."""

import sys

import pytest

from scripts.cli.arguments import parse_arguments
from scripts.sweeps import grid, launchers
from scripts.sweeps import sweep as sweep_module
from scripts.sweeps.grid import searches, sweep
from scripts.sweeps.search import search

# Stands for `scripts.train`: does what optimizer.lr tells it, and leaves a status as a run does.
JOB = """
import json, os, pathlib, signal, sys, time

def main():
    overrides = [word for word in sys.argv[1:] if "=" in word and word[0] != "-"]
    (target,) = [word for word in overrides if word.startswith("run_dir=")]
    folder = pathlib.Path(target.removeprefix("run_dir="))
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("manifest.json").write_text("{}")
    folder.joinpath("overrides.yaml").write_text(json.dumps(overrides))
    lr = float(dict(o.split("=", 1) for o in overrides)["optimizer.lr"])
    started = folder.joinpath("started")
    print("job output", lr, flush=True)
    if lr == 0.4 and not started.exists():
        started.touch()
        folder.joinpath("status.json").write_text('{"state": "running", "resume": "train it"}')
        os.kill(os.getpid(), signal.SIGKILL)
    if lr == 0.5:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda *_: sys.exit(143))
        folder.joinpath("pid").write_text(str(os.getpid()))
        started.touch()
        while True:
            time.sleep(60)
    if lr == 0.6:  # ends only once another has begun: they run side by side
        other = folder.parent / str(1 - int(folder.name)) / "started"
        started.touch()
        while not other.exists():
            time.sleep(0.01)
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "REGIMEN_SWEEP_JOB")
    shown = {k: os.environ.get(k) for k in names}
    folder.joinpath("environment.json").write_text(json.dumps(shown))
    if lr > 1:
        print("error: it diverged", file=sys.stderr)
        status = {"state": "failed", "code": 5, "reason": "it diverged"}
    else:
        results = {"best/val/accuracy": 1 - lr, "val/accuracy": 0.0}
        status = {"state": "finished", "results": results, "seconds": 1.5}
    if lr < 3:
        folder.joinpath("status.json").write_text(json.dumps(status))
    sys.exit(0 if lr <= 1 else 5 if lr < 3 else 3)

if __name__ == "__main__":
    main()
"""

# A small configuration composes quickly.
PRIMARY = """
name: train
data: {}
model: {_target_: torch.nn.Identity}
task: {_target_: torch.nn.Identity}
optimizer: {lr: 0.1}
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Replace the job by a small module, and work in an empty folder."""
    script = tmp_path / "modules" / "small_job.py"
    script.parent.mkdir()
    script.write_text(JOB)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text(PRIMARY)
    monkeypatch.setenv("PYTHONPATH", str(script.parent))
    monkeypatch.setattr(launchers, "TRAIN", "small_job")
    monkeypatch.setattr(grid, "check_built", lambda *_: (None, ("", [])))
    monkeypatch.setattr(sweep_module, "write_report", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return script


@pytest.fixture
def command(job):
    """Return the command of a sweep of the small job in a process of its own."""
    code = "import sys; from scripts.sweeps import grid, launchers, sweep\n"
    code += "grid.check_built = lambda *_: (None, ('', []))\n"
    code += "sweep.write_report = lambda *_: None\n"
    code += "from scripts.cli.arguments import parse_arguments\n"
    code += "launchers.TRAIN = 'small_job'\n"
    code += "sys.exit(grid.sweep(parse_arguments(sys.argv[1:])))"
    return [sys.executable, "-c", code, "-m", "--config-path", "conf", "run_dir=there"]


@pytest.fixture
def sweep_of():
    """Run a sweep in this process."""

    def run(*argv):
        arguments = parse_arguments(["-m", "--config-path", "conf", *argv])
        return search(arguments) if searches(arguments) else sweep(arguments)

    return run
