"""Many jobs from one command line: which there are, and how they go on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from regimen.conf.errors import ConfigError
from regimen.conf.yaml_file import dump
from regimen.scripts.cli.arguments import parse_arguments, quoted
from regimen.scripts.composition.compose import compose, split_jobs
from regimen.scripts.sweeps.grid import sweep
from regimen.scripts.sweeps.sweep import newest_unfinished
from regimen.trainer.runs.lock import RunLock
from same_run import differences
from toy_runs import board


def jobs(*argv):
    found = split_jobs(parse_arguments(["-m", *argv]))
    return [[override.text for override in job] for job in found]


def run(*argv):
    return sweep(parse_arguments(["-m", "--config-path", "conf", *argv]))


def keep_configs(folder):
    """Write the configuration of each job that ran, as a run does."""
    for path in folder.glob("*/overrides.yaml"):
        overrides = yaml.safe_load(path.read_text())
        config = compose(["--config-path", "conf", *overrides]).config
        (path.parent / "config.yaml").write_text(dump({**config, "run_dir": None}))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param(["seed=1,2"], [["seed=1"], ["seed=2"]], id="list"),
        pytest.param(["seed=range(1,4)"], [["seed=1"], ["seed=2"], ["seed=3"]], id="range"),
        pytest.param(["model=choice(mlp,gan)"], [["model=mlp"], ["model=gan"]], id="choice"),
        pytest.param(["seed=1"], [["seed=1"]], id="one"),
        pytest.param(["name=\"'a,b'\""], [["name=\"'a,b'\""]], id="quoted"),
        pytest.param(["~a.b", "seed=1,2"], [["~a.b", "seed=1"], ["~a.b", "seed=2"]], id="delete"),
        pytest.param(["+model.x=1,2"], [["+model.x=1"], ["+model.x=2"]], id="add"),
        pytest.param(["a.b=[1,2],[3]"], [["a.b=[1,2]"], ["a.b=[3]"]], id="lists"),
        pytest.param(["strategy=glob(d*)"], [["strategy=ddp"], ["strategy=dp"]], id="glob"),
        # Of a key that is given twice the last word counts.
        pytest.param(["seed=1,2", "seed=3"], [["seed=3"]], id="a value after a list"),
        pytest.param(["seed=3", "seed=1,2"], [["seed=1"], ["seed=2"]], id="a list after a value"),
        pytest.param(["seed=1,2", "+seed=3,4"], [["+seed=3"], ["+seed=4"]], id="two lists"),
        pytest.param(["seed=range(1,4)", "++seed=3"], [["++seed=3"]], id="a value after a range"),
        pytest.param(["model.x=1,2", "~model.x"], [["~model.x"]], id="deleted after a list"),
        pytest.param(["model=mlp,gan", "model=mlp"], [["model=mlp"]], id="a choice after choices"),
        pytest.param(["sweep=null,ray", "~sweep"], [["~sweep"]], id="no choice after choices"),
        pytest.param(
            ["optimizer.lr=1,2", "optimizer={lr:3}"], [["optimizer={lr:3}"]], id="in a section"
        ),
        pytest.param(
            ["optimizer={lr:1},{lr:2}", "optimizer.lr=3"], [["optimizer.lr=3"]], id="of sections"
        ),
        pytest.param(
            ["model.x=1,2", "model=mlp"],
            [["model.x=1", "model=mlp"], ["model.x=2", "model=mlp"]],
            id="a choice leaves the values within",
        ),
        pytest.param(
            ["optimizer={lr:1},{lr:2}", "optimizer={eps:3}"],
            [["optimizer={lr:1}", "optimizer={eps:3}"], ["optimizer={lr:2}", "optimizer={eps:3}"]],
            id="sections are merged",
        ),
    ],
)
def test_the_jobs_of_a_command_line(argv, expected):
    assert jobs(*argv) == expected


@pytest.mark.parametrize(
    ("override", "text"),
    [
        pytest.param("optimizer.lr=interval(0,1)", "sweep=optuna", id="interval"),
        pytest.param("seed=range(0,1000000)", "10000 jobs", id="too-many"),
        pytest.param("hydra.sweep.dir=a,b", "cannot be set", id="hydra"),
        pytest.param("seed=range(5,5)", r"^seed: range\(5,5\) gives no value", id="empty-range"),
        pytest.param("model=glob(zzz*)", r"no value; choose of .*mlp", id="empty-glob"),
    ],
)
def test_values_without_a_job_are_refused(override, text):
    with pytest.raises(ConfigError, match=text):
        jobs(override)


def test_a_sweep_goes_on_ranks_its_jobs_and_returns_the_first_failure(job, capfd):
    assert run("name=mine", "optimizer.lr=0.3,1.5,3,0.2") == 5
    (folder,) = Path("runs/mine/sweeps").iterdir()
    rows = board(folder)
    assert ",".join(rows[0]) == "job,status,name,optimizer.lr,val/accuracy,seconds,run_dir"
    assert [row["optimizer.lr"] for row in rows] == ["0.2", "0.3", "1.5", "3"]
    assert [row["status"] for row in rows] == ["finished", "finished", "failed", "failed"]
    assert rows[0]["val/accuracy"] == "0.8"
    assert rows[0]["run_dir"] == str(folder / "3")
    assert [row["seconds"] for row in rows] == ["1.5", "1.5", "", ""]
    out = capfd.readouterr().out
    assert "job output" not in out
    assert "job output 0.3" in (folder / "output" / "0.txt").read_text()
    # Of each job at its end and below the table: from status.json, or else from what it printed.
    assert out.count("it diverged") == 4


def test_nothing_starts_before_every_configuration_is_sound(job):
    with pytest.raises(ConfigError) as caught:
        run("optimizer.lr=0.1,abc,-1", "trainer.max_epoch=1,2")
    keys = [p.key for p in caught.value.problems]
    assert keys == ["trainer.max_epoch"] * 2 + ["optimizer.lr"] * 2
    assert not Path("runs").exists()


@pytest.mark.parametrize("varied", ["resume=auto,null", "run_dir=a,b"])
def test_keys_that_identify_no_job_cannot_vary(job, varied):
    with pytest.raises(ConfigError, match="cannot vary between the jobs"):
        run(varied)


def test_a_changed_grid_finds_the_folders_of_its_jobs(job):
    assert run("run_dir=there", "optimizer.lr=0.1,0.2,1.5") == 5
    keep_configs(Path("there"))
    assert run("optimizer.lr=0.3,1.5,0.2", "resume=auto", "run_dir=there") == 5
    rows = {row["optimizer.lr"]: row for row in board()}
    assert {lr: row["job"] for lr, row in rows.items()} == {"0.2": "1", "0.3": "3", "1.5": "2"}
    assert rows["0.2"]["val/accuracy"] == "0.8"
    said = [Path(f"there/output/{n}.txt").read_text().count("job output") for n in (1, 2)]
    assert said == [1, 2]  # the first had finished
    keep_configs(Path("there"))
    with Path("conf/train.yaml").open("a") as file:
        file.write("seed: 3\n")  # another configuration: the job's own process decides
    run("optimizer.lr=0.2", "resume=auto", "run_dir=there")
    assert Path("there/output/1.txt").read_text().count("job output") == 2


def test_the_newest_unfinished_sweep_is_resumed(job, capfd):
    argv = ["name=mine", "optimizer.lr=0.1,0.4", "resume=auto"]
    assert run(*argv) == 137
    (folder,) = Path("runs/mine/sweeps").iterdir()
    keep_configs(folder)
    reason = "job 1 killed (exit 137): killed by SIGKILL (out of memory?); go on with: train it\n"
    assert reason in capfd.readouterr().out
    assert run(*argv) == 0
    out = capfd.readouterr().out
    assert f"going on with the sweep {folder}\n" in out
    assert (folder / "output" / "0.txt").read_text() == "job output 0.1\n"  # it ran once
    assert run(*argv) == 137
    assert len(list(Path("runs/mine/sweeps").iterdir())) == 2


def test_a_sweep_held_by_a_process_is_not_resumed(tmp_path):
    stamps = ["2026-01-01_00-00-00", "2026-01-01_00-00-00-9", "2026-01-01_00-00-00-10"]
    for stamp in stamps:
        (tmp_path / stamp).mkdir()
        (tmp_path / stamp / "leaderboard.csv").write_text("job,status\n0,finished\n1,failed\n")
    assert newest_unfinished(tmp_path) == tmp_path / stamps[2]
    (tmp_path / stamps[2] / "leaderboard.csv").write_text("job,status\n0,finished\n")
    lock = RunLock(tmp_path / stamps[1])
    assert lock.acquire() is None
    assert newest_unfinished(tmp_path) == tmp_path / stamps[0]
    lock.release()
    assert newest_unfinished(tmp_path) == tmp_path / stamps[1]


def test_a_combination_is_one_job_and_a_folder_holds_one_sweep(job, caplog):
    assert run("run_dir=there", "optimizer.lr=0.1,0.10,1e-1", "seed=1,1") == 0
    assert [(row["job"], row["run_dir"]) for row in board()] == [("0", "there/0")]
    assert (Path("there") / "0" / "status.json").exists()
    assert "nothing varies" not in caplog.text
    with pytest.raises(ConfigError, match="holds a run or a sweep"):
        run("run_dir=there", "optimizer.lr=0.1")
    run("run_dir=one", "optimizer.lr=0.1")
    assert "nothing varies: this is one job; several: optimizer.lr=0.1,0.01" in caplog.text


def test_two_sweeps_of_the_same_second_keep_apart(job):
    for _ in range(3):
        run("name=mine", "optimizer.lr=0.1")
    assert len(list(Path("runs/mine/sweeps").iterdir())) == 3


@pytest.mark.parametrize("text", ["plain", "it's", "a b,c=d", "ü [x]", "back\\slash", "end\\"])
def test_quoted_text_is_read_as_it_was(text, tmp_path):
    assert compose([f"run_dir={quoted(text)}"]).config["run_dir"] == text


@pytest.mark.slow
def test_a_job_is_the_run_that_its_overrides_name(tmp_path):
    fixed = ["experiment=resnet18", "model=mlp", "trainer.max_epochs=1", "model.hidden=[8]"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for varied in (["seed=3", "run_dir=alone"], ["-m", "seed=2,3", "run_dir=all"]):
        argv = [sys.executable, "-P", "-m", "regimen.scripts.train", *fixed, *varied]
        subprocess.run(argv, cwd=tmp_path, env=env, timeout=300, capture_output=True, check=True)
    alone = tmp_path / "alone"
    job = tmp_path / "all" / "1"
    own = {"created", "started", "pid", "exit"}
    texts = [(run / "overrides.yaml").read_text().splitlines()[:-1] for run in (job, alone)]
    assert texts[0] == texts[1]  # but for the last, run_dir
    manifests = [json.loads((run / "manifest.json").read_text()) for run in (job, alone)]
    facts = [{k: v for k, v in of_one.items() if k not in own} for of_one in manifests]
    assert facts[0] == facts[1]
    assert differences(alone, job) == []
