"""Jobs on other machines: through submitit's local executor, and through a local Ray."""

import json
import os
import re
import shlex
import signal
import sys
import threading
from pathlib import Path

import pytest

from regimen.conf.errors import ConfigError
from regimen.scripts.sweeps.launchers import NodeJob
from regimen.scripts.sweeps.leaderboard import Job
from toy_runs import board, until

SUBMITIT = ["sweep.launcher=submitit", "+sweep.launcher_options.cluster=local"]


def test_a_grid_goes_through_submitit(job, sweep_of, capfd, caplog):
    pytest.importorskip("submitit")
    caplog.set_level("INFO")
    argv = ["run_dir=there", "optimizer.lr=0.6,0.4,1.5", *SUBMITIT, "sweep.retries=1"]
    # 0.6 waits until 0.4 has begun, which is killed once; 1.5 fails.
    assert sweep_of(*argv) == 5
    states = {row["optimizer.lr"]: row["status"] for row in board()}
    assert states == {"0.6": "finished", "0.4": "finished", "1.5": "failed"}
    out = capfd.readouterr().out
    assert "job 1 starts again: killed by SIGKILL" in out
    assert "job 2 failed (exit 5): it diverged" in out
    first, *_ = (text for text in caplog.messages if "what cancels them" in text)
    assert len(re.search(r": kill (\d+ \d+ \d+)$", first)[1].split()) == 3
    assert "resume=auto" in json.loads(Path("there/1/overrides.yaml").read_text())
    assert Path("there/output/0.txt").read_text() == "job output 0.6\n"


@pytest.fixture
def launched(job):
    def launch(*words):
        Path("there/0").mkdir(parents=True)
        return NodeJob.of(Job(0, Path("there/0"), {}), [*words, "run_dir=there/0"])

    return launch


@pytest.mark.parametrize("preempted", [True, False])
def test_a_job_that_is_preempted_or_cancelled_saves(launched, preempted):
    if preempted:
        pytest.importorskip("submitit")
    job = launched("optimizer.lr=0.5", "resume=some.pt")
    codes = []
    assert "resume=some.pt" in job.arguments()
    thread = threading.Thread(target=lambda: codes.append(job()))
    thread.start()
    until(Path("there/0/started").exists)
    again = job.checkpoint().function if preempted else job.stop(signal.SIGTERM)
    thread.join(60)
    assert codes == [143]
    if preempted:  # it goes on from the queue
        assert again.process is None
        assert again.arguments() == ["optimizer.lr=0.5", "run_dir=there/0", "resume=auto"]


def test_a_job_leaves_the_signal_of_submitit_alone(launched):
    module = Path("modules/look.py")
    module.write_text("import signal; print(signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN)")
    job = launched()
    job.module = "look"

    assert job() == 0

    assert Path("there/output/0.txt").read_text() == "True\n"


@pytest.mark.parametrize("name", ["submitit", "ray"])
def test_a_launcher_needs_its_package(name, job, sweep_of, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        sweep_of("optimizer.lr=0.1,0.2", f"sweep.launcher={name}")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param("+{}.bogus=1", "sweep.launcher_options: .*bogus", id="unknown"),
        pytest.param("+{}.tasks_per_node=2", "multiple values .*tasks_per_node", id="tasks"),
        pytest.param("{}.cluster=slurm", "slurm", id="no-slurm-here"),
    ],
)
def test_options_that_submitit_refuses_start_nothing(job, sweep_of, options, text):
    pytest.importorskip("submitit")
    words = [*SUBMITIT, options.format("sweep.launcher_options")]
    with pytest.raises(ConfigError, match=text):
        sweep_of("run_dir=there", "optimizer.lr=0.1,0.2", *words)
    assert not Path("there").exists()


@pytest.fixture
def ray_sweep(job, sweep_of, monkeypatch):
    """Run a sweep on a Ray of its own, whatever runs on this machine besides."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = ["sweep.launcher=ray", "+sweep.launcher_options.address=local"]
    yield lambda *argv: sweep_of("run_dir=there", *argv, *options)
    ray.shutdown()


@pytest.mark.slow
def test_a_grid_goes_through_ray(ray_sweep, caplog):
    caplog.set_level("INFO")
    assert ray_sweep("optimizer.lr=0.1,0.4,1.5", "sweep.retries=1") == 5
    states = {row["optimizer.lr"]: row["status"] for row in board()}
    assert states == {"0.1": "finished", "0.4": "finished", "1.5": "failed"}
    (said,) = (text for text in caplog.messages if "what cancels them" in text)
    assert f"kill {os.getpid()} (on " in said


@pytest.mark.slow
def test_a_signal_lets_the_jobs_of_ray_save(ray_sweep):
    def interrupt():
        until(Path("there/0/started").exists, 120)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert ray_sweep("optimizer.lr=0.5,0.1", "sweep.jobs=1") == 143
    thread.join()
    output = Path("there/output/0.txt").read_text()
    assert output == "job output 0.5\n"  # it was not killed: its own exit code is noted
    rows = {row["optimizer.lr"]: row for row in board()}
    assert rows["0.1"]["status"] == "not started"


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        pytest.param("submitit", "slurm_setup: ['touch canary']", id="shell-lines"),
        pytest.param("submitit", 'slurm_qos: "a\\ntouch canary"', id="a-line-in-a-word"),
        pytest.param("ray", "runtime_env: {py_executable: ./canary}", id="a-program"),
        pytest.param("ray", "address: '192.0.2.1:6379'", id="a-machine"),
    ],
)
def test_programs_of_a_launcher_come_from_the_command_line_only(job, sweep_of, launcher, options):
    name = options.partition(":")[0]
    file = Path("conf/sweep/theirs.yaml")
    file.parent.mkdir()
    file.write_text(f"launcher: {launcher}\nlauncher_options: {{{options}}}\n")
    for more in ([], ["sweep.launcher_options={num_cpus: 1}"]):
        with pytest.raises(ConfigError, match="comes from the command line only") as caught:
            sweep_of("optimizer.lr=0.1,0.2", "+sweep=theirs", *more)
        (problem,) = caught.value.problems
        assert (problem.key, caught.value.exit_code) == (f"sweep.launcher_options.{name}", 2)
    (typed,) = shlex.split((problem.hint or "").partition(": ")[2])
    with pytest.raises(ConfigError) as caught:  # what is printed is accepted: the next mistake
        sweep_of("optimizer.lr=0.1,0.2", "+sweep=theirs", typed, "sweep.group_by=nothing")
    assert "command line only" not in str(caught.value)
    assert not Path("runs").exists()
