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
    assert list(rows[0]) == [
        "job",
        "status",
        "name",
        "optimizer.lr",
        "val/accuracy",
        "seconds",
        "run_dir",
    ]
    assert column(rows, "optimizer.lr") == ["0.2", "0.3", "1.5", "3"]
    assert column(rows, "status") == ["finished", "finished", "failed", "failed"]
    assert column(rows, "seconds") == ["1.5", "1.5", "", ""]
    best = rows[0]
    assert best["val/accuracy"] == "0.8"
    assert best["run_dir"] == str(folder / "3")
    out = capfd.readouterr().out
    assert "job output" not in out
    assert "job output 0.3" in (folder / "output" / "0.txt").read_text()
    # Of each job at its end and below the table: from status.json, or else from what it printed.
    assert out.count("it diverged") == 4


def column(rows, name):
    return [row[name] for row in rows]


def test_nothing_starts_before_every_configuration_is_sound(job):
    with pytest.raises(ConfigError) as caught:
        run("optimizer.lr=0.1,abc,-1", "trainer.max_epoch=1,2")

    keys = [problem.key for problem in caught.value.problems]
    # The rates 'abc' and -1, and the key of both values of it.
    assert keys == ["trainer.max_epoch", "trainer.max_epoch", "optimizer.lr", "optimizer.lr"]
    assert not Path("runs").exists()


@pytest.mark.parametrize("varied", ["resume=auto,null", "run_dir=a,b"])
def test_keys_that_identify_no_job_cannot_vary(job, varied):
    with pytest.raises(ConfigError, match="cannot vary between the jobs"):
        run(varied)


def starts_of(number):
    """Return how often a job of the sweep in `there` was started."""
    return Path(f"there/output/{number}.txt").read_text().count("job output")


def test_a_changed_grid_finds_the_folders_of_its_jobs(job):
    assert run("run_dir=there", "optimizer.lr=0.1,0.2,1.5") == 5
    keep_configs(Path("there"))

    assert run("optimizer.lr=0.3,1.5,0.2", "resume=auto", "run_dir=there") == 5

    rows = {row["optimizer.lr"]: row for row in board()}
    assert rows.keys() == {"0.2", "0.3", "1.5"}
    assert rows["0.2"]["job"] == "1"
    assert rows["0.2"]["val/accuracy"] == "0.8"
    assert rows["0.3"]["job"] == "3"
    assert rows["1.5"]["job"] == "2"
    assert starts_of(1) == 1  # it had finished
    assert starts_of(2) == 2


def test_a_finished_job_of_another_configuration_is_started_again(job):
    """Its own process decides what becomes of it."""
    assert run("run_dir=there", "optimizer.lr=0.2") == 0
    keep_configs(Path("there"))
    with Path("conf/train.yaml").open("a") as file:
        file.write("seed: 3\n")

    run("optimizer.lr=0.2", "resume=auto", "run_dir=there")

    assert starts_of(0) == 2


def test_the_newest_unfinished_sweep_is_resumed(job, capfd):
    argv = ["name=mine", "optimizer.lr=0.1,0.4", "resume=auto"]
    sweeps = Path("runs/mine/sweeps")
    assert run(*argv) == 137
    (folder,) = sweeps.iterdir()
    keep_configs(folder)
    reason = "job 1 killed (exit 137): killed by SIGKILL (out of memory?); go on with: train it\n"
    assert reason in capfd.readouterr().out

    assert run(*argv) == 0

    assert f"going on with the sweep {folder}\n" in capfd.readouterr().out
    assert (folder / "output" / "0.txt").read_text() == "job output 0.1\n"  # it ran once
    assert run(*argv) == 137  # a new one
    assert len(list(sweeps.iterdir())) == 2


def test_a_sweep_held_by_a_process_is_not_resumed(tmp_path):
    oldest = tmp_path / "2026-01-01_00-00-00"
    ninth = tmp_path / "2026-01-01_00-00-00-9"
    tenth = tmp_path / "2026-01-01_00-00-00-10"
    for folder in (oldest, ninth, tenth):
        folder.mkdir()
        (folder / "leaderboard.csv").write_text("job,status\n0,finished\n1,failed\n")
    assert newest_unfinished(tmp_path) == tenth

    (tenth / "leaderboard.csv").write_text("job,status\n0,finished\n")
    lock = RunLock(ninth)
    assert lock.acquire() is None

    assert newest_unfinished(tmp_path) == oldest
    lock.release()
    assert newest_unfinished(tmp_path) == ninth


def test_a_combination_is_one_job(job, caplog):
    assert run("run_dir=there", "optimizer.lr=0.1,0.10,1e-1", "seed=1,1") == 0

    (row,) = board()
    assert row["job"] == "0"
    assert row["run_dir"] == "there/0"
    assert Path("there/0/status.json").exists()
    assert "nothing varies" not in caplog.text


def test_a_folder_holds_one_sweep(job):
    run("run_dir=there", "optimizer.lr=0.1,0.2")
    with pytest.raises(ConfigError, match="holds a run or a sweep"):
        run("run_dir=there", "optimizer.lr=0.1")


def test_two_sweeps_of_the_same_second_keep_apart(job):
    for _ in range(3):
        run("name=mine", "optimizer.lr=0.1")
    assert len(list(Path("runs/mine/sweeps").iterdir())) == 3


@pytest.mark.parametrize("text", ["plain", "it's", "a b,c=d", "ü [x]", "back\\slash", "end\\"])
def test_quoted_text_is_read_as_it_was(text, tmp_path):
    assert compose([f"run_dir={quoted(text)}"]).config["run_dir"] == text


def test_a_sweep_of_one_job_says_how_to_have_several(job, caplog):
    run("run_dir=one", "optimizer.lr=0.1")
    assert "nothing varies: this is one job; several: optimizer.lr=0.1,0.01" in caplog.text


def facts_of(run):
    """Return a run's manifest without what belongs to its process."""
    manifest = json.loads((run / "manifest.json").read_text())
    for name in ("created", "started", "pid", "exit"):
        manifest.pop(name, None)
    return manifest


@pytest.mark.slow
def test_a_job_is_the_run_that_its_overrides_name(tmp_path):
    program = [sys.executable, "-P", "-m", "regimen.scripts.train"]
    words = ["experiment=resnet18", "model=mlp", "trainer.max_epochs=1", "model.hidden=[8]"]
    options = {"cwd": tmp_path, "timeout": 300, "capture_output": True, "check": True}
    options["env"] = {**os.environ, "OMP_NUM_THREADS": "1"}

    subprocess.run([*program, *words, "seed=3", "run_dir=alone"], **options)
    subprocess.run([*program, *words, "-m", "seed=2,3", "run_dir=all"], **options)

    alone = tmp_path / "alone"
    job = tmp_path / "all" / "1"
    own_words = (alone / "overrides.yaml").read_text().splitlines()
    job_words = (job / "overrides.yaml").read_text().splitlines()
    assert job_words[:-1] == own_words[:-1]  # but for the last, run_dir
    assert facts_of(job) == facts_of(alone)
    assert differences(alone, job) == []
