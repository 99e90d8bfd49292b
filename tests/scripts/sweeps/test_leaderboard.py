"""The table and the picture that a sweep ends with, and the links for TensorBoard."""

import json
import os
import sys
from pathlib import Path

import pytest
from PIL import Image

from regimen.callbacks.support import CallbackError
from regimen.scripts.sweeps.leaderboard import (
    SHOWN,
    Job,
    Ranking,
    link_jobs,
    short_keys,
    show,
    write_csv,
)
from regimen.scripts.sweeps.report import study_of, write_report
from toy_runs import board

CONFIG = {"callbacks": {}}
NASTY = "<script> $x_1^{2"


def ended(number, state="finished", loss=None, overrides=None, **facts):
    """Return a job that ended, with a validation loss or with given results."""
    if overrides is None:
        overrides = {"optimizer.lr": f"{number}"}
    results = {}
    if loss is not None:
        results["val/loss"] = loss
    facts = {"state": state, "results": results, **facts}
    return Job(number, Path("s", str(number)), overrides, **facts)


def test_the_pruned_the_failed_and_the_waiting_come_last():
    jobs = [
        ended(0, "not started"),
        ended(1, "failed"),
        ended(2, "running"),
        ended(3, "pruned", 0.5),
        ended(4, loss=1.0),
    ]

    ranking = Ranking(CONFIG, jobs, "val/loss", decided=True)

    assert [job.number for job in ranking.ranked()] == [4, 3, 1, 0, 2]
    assert [job.number for job in jobs if job.failed] == [1]


def test_a_study_has_its_metric_and_a_grid_that_of_its_checkpoints():
    job = ended(0, results={"best/val/accuracy": 0.9, "val/loss": 1.0})

    assert Ranking(CONFIG, [job], "val/loss", decided=True).value(job) == 1.0
    assert Ranking(CONFIG, [job]).value(job) == 0.9


@pytest.mark.parametrize(
    ("metric", "said", "best", "first"),
    [
        pytest.param("val/dice_loss", {}, {}, 0, id="the last word of the name"),
        pytest.param("val/map/error", {}, {}, 0, id="not the name of the set"),
        pytest.param("val/fid", {"fid": "min"}, {}, 0, id="the task says it"),
        pytest.param("val/fid", {}, {"metric": "val/fid", "mode": "max"}, 2, id="a job noted it"),
        pytest.param("val/top_score_acc", {}, {}, 2, id="rises"),
    ],
)
def test_jobs_are_compared_in_the_direction_that_their_checkpoints_are(metric, said, best, first):
    jobs = [ended(n, results={metric: n / 10}, best=best) for n in range(3)]
    assert Ranking(CONFIG, jobs, metric, task_modes=said).ranked()[0].number == first


def test_a_direction_that_nobody_says_is_asked_for():
    with pytest.raises(CallbackError, match=r"is a larger val/wobble better\? say mode=max or"):
        Ranking(CONFIG, [ended(0)], "val/wobble")


def test_groups_have_a_mean_and_a_deviation(tmp_path, capsys):
    jobs = [
        ended(0, loss=2.0, overrides={"lr": "1", "seed": "0"}),
        ended(1, loss=4.0, overrides={"lr": "1", "seed": "1"}),
        ended(2, "failed", overrides={"lr": "1", "seed": "2"}),
        ended(3, loss=1.0, overrides={"lr": "2", "seed": "0"}),
        ended(4, "failed", overrides={"lr": "3", "seed": "0"}),
    ]
    ranking = Ranking(CONFIG, jobs)

    write_csv(tmp_path, ranking, ["seed"], len(jobs))
    show(tmp_path, ranking, ["seed"], ["lr", "seed"])

    rows = {row["job"]: row for row in board(tmp_path)}
    first = rows["0"]
    assert list(first)[-4:] == ["run_dir", "mean", "std", "n"]
    assert first["mean"] == "3.0"
    assert first["std"] == repr(2**0.5)
    assert first["n"] == "2"
    out = capsys.readouterr().out
    _, *table = out[out.index("val/loss over seed") :].splitlines()
    assert [line.split() for line in table[:4]] == [
        ["lr", "mean", "std", "n"],
        ["2", "1.0000", "1"],
        ["1", "3.0000", "1.4142", "2"],
        ["3", "0"],
    ]


def test_keys_are_shortened_to_distinct_ends():
    assert short_keys(["optimizer.lr", "seed"]) == ["lr", "seed"]
    assert short_keys(["a.x.lr", "b.x.lr"]) == ["a.x.lr", "b.x.lr"]
    assert short_keys(["a.x.lr", "a.y.lr"]) == ["x.lr", "y.lr"]
    assert short_keys(["lr", "optimizer.lr"]) == ["lr", "optimizer.lr"]


def test_the_best_are_shown_and_reasons_stay_on_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    jobs = [ended(n, loss=n / 100, seconds=1.0) for n in range(SHOWN + 5)]
    jobs.append(ended(99, "failed", code=5, reason="so it was " * 30))
    ranking = Ranking(CONFIG, jobs)
    show(Path("s"), ranking, [], ["optimizer.lr"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["job", "status", "lr", "val/loss", "seconds"]
    assert lines[3].split() == ["0", "finished", "0", "0.0000", "1.0"]
    assert "and 6 more jobs in leaderboard.csv" in lines
    assert f"job 99 failed (exit 5): {'so it was ' * 30}" in lines


@pytest.fixture
def make(tmp_path):
    """Return a function that makes jobs: of each its values, and the curve of its accuracy."""

    def jobs(*jobs):
        made = []
        for number, facts in enumerate(jobs):
            curve = facts.get("curve", [])
            job = Job(number, tmp_path / str(number), facts["values"])
            job.state = facts.get("state", "finished")
            job.results = {}
            if curve:
                job.results["best/val/accuracy"] = max(curve)
            job.run_dir.mkdir()
            lines = []
            for place, accuracy in enumerate(curve, 1):
                line = {"step": 10 * place, "val/accuracy": accuracy, "val/loss": 1 - accuracy}
                lines.append(json.dumps(line))
            lines.append('{"step": 9')  # torn by a kill
            (job.run_dir / "metrics.jsonl").write_text("\n".join(lines))
            made.append(job)
        return made

    return jobs


def test_a_study_has_the_results_of_the_jobs_by_their_numbers(make):
    pytest.importorskip("optuna")
    jobs = make(
        {"values": {"optimizer.lr": "0.001", "model": "1"}, "curve": [0.2, 0.9, 0.8]},
        {"values": {"optimizer.lr": "9", "model": "mlp"}, "state": "failed"},
        {
            "values": {"optimizer.lr": "1", "model": "$x", "seed": "1"},
            "curve": [0.95],
            "state": "pruned",
        },
        {"values": {"optimizer.lr": "0.01"}, "curve": [0.3, 0.4]},
    )

    ranking = Ranking(CONFIG, jobs, "val/accuracy")
    study = study_of(ranking, ["optimizer.lr", "model", "seed", "fixed"])

    facts = []
    for trial in study.trials:
        facts.append((trial.state.name, trial.params, trial.value, trial.intermediate_values))
    assert facts == [
        ("COMPLETE", {"lr": 0.001, "model": "1"}, 0.9, {10: 0.2, 20: 0.9, 30: 0.8}),
        ("FAIL", {}, None, {}),
        ("PRUNED", {"lr": 1.0, "model": r"\$x", "seed": 1.0}, 0.95, {10: 0.95}),
        ("COMPLETE", {"lr": 0.01}, 0.4, {10: 0.3, 20: 0.4}),
    ]
    kind = study.trials[2].distributions["lr"]
    assert str(kind) == "FloatDistribution(high=1.0, log=True, low=0.001, step=None)"
    assert study.best_trial.number == 0
    assert study.direction.name == "MAXIMIZE"


@pytest.fixture
def ten_jobs(make):
    """Nine jobs whose names of models are hard to draw, and one that failed."""
    facts = []
    for number in range(9):
        values = {"model": NASTY[number % 2 :], "lr": f"{number}"}
        facts.append({"values": values, "curve": [number / 9]})
    return make(*facts, {"values": {"model": "mlp", "lr": "3"}, "state": "failed"})


def test_a_picture_that_cannot_be_drawn_is_told(ten_jobs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    failed = ten_jobs[9:]

    for jobs in (ten_jobs, failed):
        write_report(tmp_path, Ranking(CONFIG, jobs, "val/accuracy"), ["model", "lr"])

    missing, none = capsys.readouterr().out.splitlines()
    assert missing == "report.png takes two packages: pip install matplotlib optuna"
    assert none == "no report.png: no job has a result"
    assert not (tmp_path / "report.png").exists()


def test_a_picture_of_a_sweep(ten_jobs, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="report.png takes matplotlib, the extra `report`")
    file = tmp_path / "report.png"
    heights = []
    for count in (9, 7, 1):  # with importance; without; of one job
        write_report(tmp_path, Ranking(CONFIG, ten_jobs[:count], "val/accuracy"), ["model", "lr"])
        assert capsys.readouterr().out == f"report: {file}\n"
        heights.append(Image.open(file).height)

    most, fewer, fewest = heights
    assert most > fewer > fewest


def test_tensorboard_shows_jobs_by_what_varies_in_them(make, tmp_path):
    jobs = make(
        {"values": {"optimizer.lr": "0.1", "seed": "1"}},
        {"values": {"optimizer.lr": "0.1", "seed": "2"}},
        {"values": {"optimizer.lr": "../../a\nb", "seed": "x" * 300}},
        {"values": {"optimizer.lr": "0.2", "seed": "1"}},
    )
    for job in jobs[:3]:
        (job.run_dir / "tensorboard").mkdir()
    jobs[3].state = "running"
    shown = tmp_path / "tensorboard"

    link_jobs(tmp_path, jobs, ["optimizer.lr", "seed"])

    assert {path.name[:22]: os.readlink(path) for path in shown.iterdir()} == {
        "lr=0.1,seed=1": "../0/tensorboard",
        "lr=0.1,seed=2": "../1/tensorboard",
        "lr=.._.._a_b,seed=xxxx": "../2/tensorboard",
        "lr=0.2,seed=1": "../3/tensorboard",
    }


def test_links_of_another_grid_take_the_place_of_those_before(make, tmp_path):
    jobs = make(
        {"values": {"optimizer.lr": "0.1", "seed": "1"}},
        {"values": {"optimizer.lr": "0.1", "seed": "2"}},
    )
    for job in jobs:
        (job.run_dir / "tensorboard").mkdir()
    shown = tmp_path / "tensorboard"
    link_jobs(tmp_path, jobs, ["optimizer.lr", "seed"])
    (shown / "mine").mkdir()

    link_jobs(tmp_path, jobs, ["optimizer.lr"])
    assert {path.name for path in shown.iterdir()} == {"lr=0.1", "lr=0.1,job=1", "mine"}

    link_jobs(tmp_path, jobs[:1], [])
    assert {path.name for path in shown.iterdir()} == {"job 0", "mine"}
