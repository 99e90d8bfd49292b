"""Jobs side by side: their share of the machine, restarts, and the end of a sweep."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.sweeps import display, search
from scripts.sweeps import sweep as sweep_module
from scripts.sweeps.launchers import local
from scripts.sweeps.launchers.launcher import Launch
from scripts.sweeps.launchers.server import WARM_UP, Server
from scripts.sweeps.launchers.slots import Slots, device_names, share_of_threads, usable_cpus
from scripts.sweeps.launchers.warm import modules_of
from scripts.sweeps.process import Outcome
from scripts.sweeps.progress import JobProgress, in_words, progress_of, seconds_left
from trainer.files.storage import storage_error

Sweep = Callable[..., int]
Rows = Callable[[Path], list[dict[str, str]]]


def test_jobs_run_side_by_side(
    job: Path, sweep_of: Sweep, rows_of: Rows, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep_of("run_dir=there", "optimizer.lr=0.6", "seed=1,2", "sweep.jobs=2") == 0
    assert [row["status"] for row in rows_of(Path("there"))] == ["finished", "finished"]
    out, err = capfd.readouterr()
    assert "\nup to 2 jobs at a time, " in out
    assert "2 of 2 done; best val/accuracy 0.4000 (job " in out
    assert "job output" not in out + err
    assert Path("there/output/1.txt").read_text() == "job output 0.6\n"


def test_a_terminal_shows_one_table(
    job: Path, sweep_of: Sweep, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "30")
    argv = ["optimizer.lr=0.6,0.4", "sweep.jobs=2", "sweep.retries=1"]
    assert sweep_of("run_dir=there", *argv) == 0
    out = capfd.readouterr().out
    shown = out[: out.index("sweep there")]
    assert "job 1 starts again: killed by SIGKILL" in shown
    *_, first, second, _, facts, _ = [line.split() for line in shown.splitlines()]
    assert [word for word in first if word != "│"] == ["0", "finished", "0.6", "0.4000"]
    assert [word for word in second if word != "│"] == ["1", "finished", "0.4", "0.6000"]
    assert " ".join(facts) == "2 of 2 done; best val/accuracy 0.6000 (job 1)"


def test_a_job_that_fails_beside_others_says_why(
    job: Path, sweep_of: Sweep, rows_of: Rows, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep_of("run_dir=there", "optimizer.lr=3,0.1,1.5", "sweep.jobs=3") == 5
    assert [row["status"] for row in rows_of(Path("there"))] == ["finished", "failed", "failed"]
    assert capfd.readouterr().out.count("failed (exit 5): it diverged\n") == 2


def test_a_lost_job_is_restarted_up_to_its_retries(
    job: Path, sweep_of: Sweep, rows_of: Rows, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep_of("run_dir=there", "optimizer.lr=0.4,0.1", "sweep.retries=1") == 0
    assert {row["status"] for row in rows_of(Path("there"))} == {"finished"}
    assert "job 0 starts again: killed by SIGKILL (out of memory?)" in capfd.readouterr().out
    assert json.loads(Path("there/0/overrides.yaml").read_text())[-2:] == [
        "resume=auto",
        "run_dir='there/0'",
    ]


def test_a_search_runs_several_jobs_at_once(
    job: Path, sweep_of: Sweep, rows_of: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr(search, "check_built", lambda *_, alone: "accuracy")
    Path("conf/sweep").mkdir()
    Path("conf/sweep/optuna.yaml").write_text("sampler: grid\n")
    # The jobs of 0.6 end only once another has begun beside them.
    argv = ["+sweep=optuna", "optimizer.lr=0.6", "seed=choice(1,2)", "sweep.jobs=2"]
    assert sweep_of(*argv, "run_dir=there") == 0
    rows = rows_of(Path("there"))
    assert {row["seed"]: row["status"] for row in rows} == {"1": "finished", "2": "finished"}


def test_a_lost_job_leaves_the_others_alone(job: Path, sweep_of: Sweep, rows_of: Rows) -> None:
    argv = ["run_dir=there", "optimizer.lr=0.1,0.4,0.2", "sweep.jobs=3"]
    assert sweep_of(*argv) == 137
    states = {row["optimizer.lr"]: row["status"] for row in rows_of(Path("there"))}
    assert states == {"0.1": "finished", "0.2": "finished", "0.4": "killed"}
    assert sweep_of(*argv, "resume=auto") == 0
    assert {row["status"] for row in rows_of(Path("there"))} == {"finished"}


def test_a_failed_job_is_not_restarted(job: Path, sweep_of: Sweep) -> None:
    assert sweep_of("run_dir=there", "optimizer.lr=1.5", "sweep.retries=3") == 5
    assert Path("there/0/overrides.yaml").read_text().count("resume=auto") == 0


def test_fail_fast_starts_no_further_job(job: Path, sweep_of: Sweep, rows_of: Rows) -> None:
    argv = ["optimizer.lr=1.5,0.1,0.2,0.3", "sweep.jobs=1", "sweep.fail_fast=true"]
    assert sweep_of("run_dir=there", *argv) == 5
    assert [row["status"] for row in rows_of(Path("there"))].count("not started") == 3


def test_a_full_disk_under_the_leaderboard_harms_no_job(
    job: Path,
    sweep_of: Sweep,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(folder: Path, *facts: object) -> None:
        raise storage_error(folder / "leaderboard.csv", OSError(errno.ENOSPC, "full"))

    monkeypatch.setattr(sweep_module, "write_csv", full)
    assert sweep_of("run_dir=there", "optimizer.lr=0.1,0.2") == 0
    assert all(Path(f"there/{n}/status.json").exists() for n in (0, 1))
    assert caplog.text.count("no space left") == 1  # said once


def driver(job: Path) -> list[str]:
    code = "import sys; from scripts.sweeps import grid\n"
    code += "from scripts.sweeps.launchers import local, server\n"
    code += "grid.check_built = lambda *_: None\n"
    code += "from scripts.sweeps import sweep; sweep.report = lambda folder: None\n"
    code += "from scripts.cli.arguments import parse_arguments\n"
    code += f"sys.path.append({str(job.parent)!r})\n"
    code += "local.TRAIN, server.WARM_UP = 'small_job', None\n"
    code += "sys.exit(grid.sweep(parse_arguments(sys.argv[1:])))"
    return [sys.executable, "-c", code, "-m", "--config-path", "conf", "run_dir=there"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lives(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_job_outlives_its_sweep(job: Path, number: int, rows_of: Rows) -> None:
    argv = [*driver(job), "optimizer.lr=0.5", "seed=1,2,3", "sweep.jobs=2"]
    process = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        until(lambda: all(Path(f"there/{n}/started").exists() for n in (0, 1)))
        pids = [int(Path(f"there/{n}/pid").read_text()) for n in (0, 1)]
        assert all(os.getpgid(pid) == pid for pid in pids)
        process.send_signal(number)
        code = process.wait(60)
        until(lambda: not any(map(lives, pids)))
    finally:
        process.kill()
        process.wait()
    assert not Path("there/2").exists()
    states = {row["job"]: row["status"] for row in rows_of(Path("there"))}
    last = "running" if number == signal.SIGKILL else "failed"
    assert states == {"0": last, "1": last, "2": "not started"}
    if number == signal.SIGTERM:
        assert code == 143


def test_a_server_that_dies_is_replaced(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(number: int, lr: float) -> Launch:
        folder = Path("there") / str(number)
        argv = [f"optimizer.lr={lr}", f"run_dir='{folder}'"]
        return Launch(number, argv, folder, Path("there/output") / f"{number}.txt")

    Path("there").mkdir()
    server = Server()
    launcher = local.LocalLauncher(server, 2, 1)
    try:
        assert launcher.start(launch(0, 0.5))
        until(Path("there/0/started").exists)
        assert server._process is not None
        server._process.kill()
        (end,) = launcher.wait(60)
        assert (end.number, end.code) == (0, -signal.SIGKILL)
        assert launcher.start(launch(1, 0.1))
        (end,) = launcher.wait(60)
        assert (end.number, end.code) == (1, 0)
    finally:
        launcher.close()


@pytest.mark.slow
def test_forked_jobs_have_one_thread_and_no_device() -> None:
    server = Server()
    try:
        server.ready()
        assert server._process is not None
        assert len(os.listdir(f"/proc/{server._process.pid}/task")) == 1
        server.start(0, "scripts.train:main", ["--version"], {})
        assert server.wait(60)[0].code == 0
    finally:
        server.close()


def test_a_server_imports_what_its_jobs_name() -> None:
    tracker = {"_target_": "callbacks.trackers.csv.Csv"}
    configs: list[dict[str, Any]] = [
        {"model": {"_target_": "models.mlp.MLP"}, "callbacks": {"csv": tracker, "x": None}},
        {"model": {"_target_": "mine.Net", "parts": [{"_target_": "models.resnet.ResNet"}]}},
        {"optimizer": {"_target_": "torch.optim.SGD"}, "trainer": {"compile": False}},
    ]
    ours = ["models.mlp", "callbacks.trackers.csv", "models.resnet"]
    assert modules_of(configs) == ours
    assert modules_of([*configs, {"trainer": {"compile": True}}]) == [*ours, "torch._dynamo"]


RECORDED = """
import json, os, pathlib, sys
from scripts.composition.compose import _ahead
from scripts.composition.kept import keep_files

def warm_up(modules):
    keep_files()

def main():
    composed = [ahead.config["name"] for ahead in _ahead]
    heavy = [name for name in ("sympy", "torch._dynamo") if name in sys.modules]
    text = json.dumps([composed, os.environ.get("MINE"), heavy, "torch" in sys.modules])
    pathlib.Path(sys.argv[1].removeprefix("run_dir=")).write_text(text)
"""


@pytest.fixture
def record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[str, str]], list[Any]]]:
    """Start a job that records what it finds, from a server without imports."""
    (tmp_path / "recorded.py").write_text(RECORDED)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("MINE", "ours")
    server = Server()
    server.warm_up = "recorded:warm_up"
    file = tmp_path / "found.json"

    def start(environment: dict[str, str], warm_up: str | None = None) -> list[Any]:
        server.warm_up = warm_up or server.warm_up
        words = [f"run_dir={file}", "name=job_${oc.env:MINE}"]
        server.start(0, "recorded:main", words, environment, composed=True)
        assert server.wait(60)[0].code == 0
        found: list[Any] = json.loads(file.read_text())
        return found

    yield start
    server.close()


def test_a_job_finds_its_configuration_composed_in_its_own_environment(
    record: Callable[..., list[Any]],
) -> None:
    assert record({"MINE": "first"})[:2] == [["job_first"], "first"]
    assert record({})[:2] == [["job_ours"], "ours"]


@pytest.mark.slow
def test_a_server_does_not_import_the_compiler(record: Callable[..., list[Any]]) -> None:
    assert record({}, WARM_UP)[2:] == [[], True]


def test_each_job_has_its_share_of_threads(
    job: Path, sweep_of: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("scripts.sweeps.launchers.slots.usable_cpus", lambda: 7)
    assert sweep_of("run_dir=there", "optimizer.lr=0.7", "seed=1,2", "sweep.jobs=3") == 0
    assert json.loads(Path("there/0/environment.json").read_text()) == {
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": None,
        "REGIMEN_SWEEP_JOB": "1",
    }


def test_a_given_number_of_threads_is_kept() -> None:
    assert share_of_threads(4, "3") == {}
    assert share_of_threads(1, None) == {}
    assert share_of_threads(2 * usable_cpus(), None) == {"OMP_NUM_THREADS": "1"}


def test_each_job_has_a_device_of_its_own(
    job: Path, sweep_of: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "device_names", lambda count, shown: ["2", "5"])
    argv = ["optimizer.lr=0.7", "seed=1,2,3,4", "sweep.jobs=4"]
    assert sweep_of("run_dir=there", *argv) == 0
    files = [json.loads(Path(f"there/{n}/environment.json").read_text()) for n in range(4)]
    assert {shown["CUDA_VISIBLE_DEVICES"] for shown in files} == {"2", "5"}


def test_devices_are_distributed_over_jobs() -> None:
    slots = Slots(4, ["0", "1"], per_device=1)
    assert [slots.take(n, {}) for n in range(3)] == [["0"], ["1"], None]
    assert slots.take(3, {"accelerator": "cpu"}) == []
    slots.give_back(0)
    assert slots.take(2, {"devices": "auto"}) == ["0"]
    shared = Slots(4, ["0", "1"], per_device=2)
    assert [shared.take(n, {}) for n in range(5)] == [["0"], ["1"], ["0"], ["1"], None]
    several = Slots(4, ["0", "1", "2"])
    assert [several.take(n, {"devices": 2}) for n in range(2)] == [["0", "1"], None]
    assert several.take(1, {"devices": [0]}) == ["2"]


@pytest.mark.parametrize(
    ("count", "visible", "expected"),
    [
        pytest.param(2, None, ["0", "1"], id="all"),
        pytest.param(2, "3, 5", ["3", "5"], id="shown"),
        pytest.param(1, "GPU-ab,GPU-cd", ["GPU-ab"], id="by-name"),
        pytest.param(0, "", [], id="none"),
    ],
)
def test_names_of_devices(count: int, visible: str | None, expected: list[str]) -> None:
    assert device_names(count, visible) == expected


def test_the_progress_of_a_job(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert progress_of(tmp_path, {}, "val/loss") == JobProgress()
    lines = [{"step": 10, "epoch": 1, "val/loss": 0.5}, {"step": 15, "epoch": 1, "train/loss": 2.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 16, "ep')
    config = {"trainer": {"max_epochs": 4, "max_steps": 20}}
    assert progress_of(tmp_path, config, "val/loss") == JobProgress(0.75, 1, 0.5)


def test_a_long_job_tells_now_and_then_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.0, 20.0, 40.0, 50.0, 80.0])
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    line = {"step": 10, "epoch": 1, "val/loss": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    config = {"trainer": {"max_epochs": 4}}
    outcome = Outcome(3, tmp_path, {}, config=config)
    sweep: Any = SimpleNamespace(
        launcher=SimpleNamespace(quiet=False),
        ranking=SimpleNamespace(name="val/loss"),
        outcomes=[outcome],
        count=1,
    )
    lines = display._Lines(sweep)
    lines.started(outcome, [], 1)
    for _ in range(4):
        lines.refresh([outcome])
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("job")]
    assert told == ["job 3: 25%, epoch 1, val/loss 0.5000"] * 2


def test_the_remaining_time() -> None:
    assert seconds_left(30.0, 1.5, 6) == 90.0
    assert seconds_left(30.0, 0.0, 6) is None
    assert [in_words(s) for s in (None, 30, 600, 7200)] == [
        "", "about 30 s left", "about 10 min left", "about 2.0 h left",
    ]  # fmt: skip
