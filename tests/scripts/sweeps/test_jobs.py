"""Jobs side by side: their share of the machine, restarts, and the end of a sweep."""

import errno
import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from regimen.conf.errors import ConfigError
from regimen.scripts.cli.arguments import parse_arguments
from regimen.scripts.cli.console import usable_cpus
from regimen.scripts.composition.compose import split_jobs
from regimen.scripts.sweeps import grid, launchers, leaderboard
from regimen.scripts.sweeps import sweep as sweep_module
from regimen.scripts.sweeps.launchers import LocalLauncher, thread_limit
from regimen.scripts.sweeps.leaderboard import Job
from regimen.trainer import device
from regimen.trainer.files.atomic import storage_error
from toy_runs import board, until


def read_json(path):
    return json.loads(Path(path).read_text())


def statuses():
    return {row["job"]: row["status"] for row in board()}


def test_lost_jobs_are_restarted_up_to_their_retries(job, sweep_of, capfd):
    argv = ["optimizer.lr=0.4,1.5", "seed=1,2,3", "sweep.jobs=3", "sweep.retries=1"]

    assert sweep_of("run_dir=there", *argv) == 5  # the first three are lost at once

    assert statuses() == {
        "0": "finished",
        "1": "finished",
        "2": "finished",
        "3": "failed",
        "4": "failed",
        "5": "failed",
    }
    out = capfd.readouterr().out
    assert "\njobs at a time: 3; threads of each: " in out
    assert "3 of 6 done; best val/accuracy 0.6000 (job " in out
    assert "job 0 starts again: killed by SIGKILL (out of memory?)" in out
    restarted = read_json("there/0/overrides.yaml")
    assert restarted[-2:] == ["resume=auto", "run_dir=there/0"]
    assert "resume=auto" not in read_json("there/3/overrides.yaml")  # it was not lost


def test_fail_fast_starts_no_further_job(job, sweep_of):
    argv = ["optimizer.lr=1.5,0.1,0.2,0.3", "sweep.jobs=1", "sweep.fail_fast=true"]

    assert sweep_of("run_dir=there", *argv) == 5

    assert list(statuses().values()).count("not started") == 3


def test_a_full_disk_under_the_leaderboard_harms_no_job(job, sweep_of, monkeypatch, caplog):
    def full(folder, *facts):
        raise storage_error(folder / "leaderboard.csv", OSError(errno.ENOSPC, "full"))

    monkeypatch.setattr(leaderboard, "write_csv", full)

    assert sweep_of("run_dir=there", "optimizer.lr=0.1,0.2") == 0

    assert Path("there/0/status.json").exists()
    assert Path("there/1/status.json").exists()
    assert caplog.text.count("no space left") == 1  # said once


def lives(pid):
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return False
    _, _, behind_name = stat.read_text().rpartition(")")
    state = behind_name.split()[0]
    return state != "Z"  # a zombie


@pytest.mark.parametrize(("number", "ended"), [("SIGKILL", -9), ("SIGTERM", 143), ("SIGINT", 130)])
def test_no_job_outlives_its_sweep(command, number, ended):
    argv = [*command, "optimizer.lr=0.5", "seed=1,2,3", "sweep.jobs=2"]
    folders = [Path("there/0"), Path("there/1")]
    process = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: all((folder / "started").exists() for folder in folders))
        pids = [int((folder / "pid").read_text()) for folder in folders]
        for pid in pids:
            assert os.getpgid(pid) == pid

        process.send_signal(signal.Signals[number])

        out, _ = process.communicate(timeout=60)
        until(lambda: not any(lives(pid) for pid in pids))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == ended
    assert not Path("there/2").exists()
    last = "running" if number == "SIGKILL" else "failed"
    assert statuses() == {"0": last, "1": last, "2": "not started"}
    if number != "SIGKILL":
        words = "train -m --config-path=conf optimizer.lr=0.5 seed=1,2,3 sweep.jobs=2"
        told = f"interrupted; go on with the sweep: {words} resume=auto run_dir=there\n"
        assert out.endswith(told)


def test_each_job_has_its_thread_limit_and_a_device_of_its_own(job, sweep_of, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launchers, "usable_cpus", lambda: range(9))
    devices = ("CUDA_VISIBLE_DEVICES", ["2", "5"])
    monkeypatch.setattr(grid, "check_built", lambda *_: (None, {}, devices))

    assert sweep_of("run_dir=there", "optimizer.lr=0.7", "seed=1,2,3,4", "sweep.jobs=4") == 0

    seen_devices = set()
    for number in range(4):
        environment = read_json(f"there/{number}/environment.json")
        seen_devices.add(environment.pop("CUDA_VISIBLE_DEVICES"))
        assert environment == {"OMP_NUM_THREADS": "2", "REGIMEN_SWEEP_JOB": "1"}
    assert seen_devices == {"2", "5"}


def test_a_given_number_of_threads_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert thread_limit(4) == {}
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert thread_limit(1) == {}
    assert thread_limit(2 * len(usable_cpus())) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setattr(launchers, "usable_cpus", lambda: range(12))
    assert thread_limit(2, processes=3) == {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    ("count", "per_device", "visible", "asked", "expected"),
    [
        pytest.param(2, 1, "", [{}, {}, {}], [["0"], ["1"], None], id="one-each"),
        pytest.param(2, 1, "", [{"accelerator": "cpu"}], [[]], id="none-needed"),
        pytest.param(0, 1, "", [{}], [[]], id="none-there"),
        pytest.param(2, 2, "", [{}] * 5, [["0"], ["1"], ["0"], ["1"], None], id="shared"),
        pytest.param(3, 1, "", [{"devices": 2}, {"devices": 2}], [["0", "1"], None], id="several"),
        pytest.param(3, 1, "", [{"devices": 2}, {"devices": [0]}], [["0", "1"], ["2"]], id="list"),
        pytest.param(1, 1, "GPU-ab, GPU-cd", [{}, {}], [["GPU-ab"], None], id="named"),
    ],
)
def test_devices_are_distributed_over_jobs(
    count, per_device, visible, asked, expected, monkeypatch, tmp_path
):
    monkeypatch.setattr(launchers, "start_process", lambda *_, **__: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(device, "device_types", lambda: ["cuda", "cpu"])
    monkeypatch.setattr(device, "device_count", lambda: count)
    launcher = LocalLauncher(5, per_device, device.visible())

    running = []
    found = []
    for number, strategy in enumerate(asked):
        job = Job(number, tmp_path, {}, config={"strategy": strategy})
        if launcher.start(job, [], running):
            running.append(job)
            found.append(job.devices)
        else:
            found.append(None)  # there is no room

    assert found == expected


def test_a_long_job_tells_now_and_then_where_it_is(tmp_path, capsys, monkeypatch):
    clock = iter([0.0, 20.0, 40.0, 40.0, 50.0, 80.0, 80.0])
    monkeypatch.setattr(sweep_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    lines = [
        '{"step": 10, "epoch": 1, "val/loss": 0.5}',
        '{"step": 15, "epoch": 1, "train/loss": 2.0}',
        '{"step": 16, "ep',  # is being written
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    job = Job(3, tmp_path, {}, config={"trainer": {"max_epochs": 4}})

    for _ in range(5):
        sweep_module.say_progress(job, "val/loss")

    out = capsys.readouterr().out
    told = [line for line in out.splitlines() if line.startswith("job")]
    assert told == ["job 3: epoch 1 of 4, step 15, val/loss 0.5"] * 2


def test_jobs_are_compared_anew_only_when_one_has_ended(job, sweep_of, monkeypatch):
    polls = []
    rankings = []
    poll_of_launcher = LocalLauncher.poll

    def poll(self, job):
        polls.append(job)
        return poll_of_launcher(self, job) if len(polls) > 30 else None

    class CountedRanking(leaderboard.Ranking):
        def __init__(self, *facts):
            super().__init__(*facts)
            rankings.append(self)

    monkeypatch.setattr(LocalLauncher, "poll", poll)
    monkeypatch.setattr(sweep_module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(sweep_module, "Ranking", CountedRanking)

    assert sweep_of("run_dir=there", "optimizer.lr=0.1,0.2") == 0

    assert len(polls) > 30
    assert len(rankings) == 3  # before the first job, and after each


def test_mistakes_of_targets_are_found_in_a_process_of_its_own():
    wrong = "callbacks.checkpoint.monitor=val/accurcy"
    arguments = parse_arguments(["-m", "model=mlp,small_cnn", "optimizer.lr=0.1,0.2", wrong])

    with pytest.raises(
        ConfigError, match=r"^callbacks.checkpoint.monitor: .* did you mean"
    ) as caught:
        grid.check_built(arguments, split_jobs(arguments))

    assert len(caught.value.problems) == 1


def test_one_job_of_each_combination_of_words_is_checked(monkeypatch):
    calls = []

    def built(given):
        calls.append([arguments.overrides for arguments in given])
        return [], "val/accuracy", {}, ("", [])

    monkeypatch.setattr(grid, "built", built)
    monkeypatch.setattr(grid, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    arguments = parse_arguments(["-m", "model=mlp,gan", "optimizer.lr=0.1,0.2"])

    found = grid.check_built(arguments, split_jobs(arguments))

    assert found == ("val/accuracy", {}, ("", []))
    assert calls == [[("model=mlp", "optimizer.lr=0.2"), ("model=gan", "optimizer.lr=0.2")]]


@pytest.mark.parametrize(
    ("place", "target"),
    [
        pytest.param("output/0.txt", "victim.txt", id="what a job prints"),
        pytest.param("output/0.txt", "missing.txt", id="what a job prints, to nothing yet"),
        pytest.param("output", "folder", id="the folder of what jobs print"),
        pytest.param("tensorboard", "folder", id="tensorboard"),
        pytest.param("0", "folder", id="the folder of a job"),
        pytest.param("7/checkpoints", "folder", id="within the folder of a job"),
        pytest.param("study.journal", "victim.txt", id="a study"),
        pytest.param("submitit", "folder", id="what a cluster is told"),
    ],
)
@pytest.mark.parametrize("used", [True, False])
def test_no_link_leads_out_of_a_sweep(job, sweep_of, place, target, used):
    folder = Path("folder")
    folder.mkdir()
    victim = Path("victim.txt")
    victim.write_text("mine")
    link = Path("there") / place
    link.parent.mkdir(parents=True)
    link.symlink_to(Path(target).absolute())
    argv = ["run_dir=there", "optimizer.lr=0.1,0.2"]
    if used:
        Path("there/leaderboard.csv").write_text("job,status\n")
        argv.append("resume=auto")

    with pytest.raises(ConfigError, match=f"{place} is a link that leads out of there"):
        sweep_of(*argv)

    assert victim.read_text() == "mine"
    assert not Path("missing.txt").exists()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["a link out", "a link inside", "a pipe"])
def test_a_job_prints_into_a_file_of_its_own_or_nowhere(tmp_path, kind):
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    log = tmp_path / "there/1/train.log"
    log.parent.mkdir(parents=True)
    log.write_text("job 1\n")
    output = tmp_path / "there/output/0.txt"
    output.parent.mkdir()
    if kind == "a link out":
        output.symlink_to(victim)
    elif kind == "a link inside":
        output.symlink_to("../1/train.log")
    else:
        os.mkfifo(output)

    process = launchers.start_process("platform", [], output)

    assert process.wait() == 0
    assert victim.read_text() == "mine"
    assert log.read_text() == "job 1\n"


def test_a_job_prints_into_no_folder_that_is_a_link(tmp_path):
    other = tmp_path / "0.txt"
    other.write_text("mine")
    output = tmp_path / "there/output/0.txt"
    (tmp_path / "there").mkdir()
    output.parent.symlink_to(tmp_path)

    process = launchers.start_process("platform", [], output)

    assert process.wait() == 0
    assert other.read_text() == "mine"


def test_the_links_of_a_sweep_are_made_in_no_other_folder(tmp_path):
    there = tmp_path / "there"
    (there / "0/tensorboard").mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (there / "tensorboard").symlink_to(elsewhere)
    jobs = [Job(0, there / "0", {"lr": "0.1"})]

    leaderboard.link_jobs(there, jobs, ["lr"])

    assert list(elsewhere.iterdir()) == []
