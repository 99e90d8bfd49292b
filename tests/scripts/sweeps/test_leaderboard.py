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
    given = overrides or {"optimizer.lr": f"{number}"}
    told = {"state": state, "results": {} if loss is None else {"val/loss": loss}} | facts
    return Job(number, Path("s", str(number)), given, **told)


def test_the_pruned_the_failed_and_the_waiting_come_last_and_a_study_has_its_metric():
    jobs = [ended(n, state) for n, state in enumerate(("not started", "failed", "running"))]
    both = {"best/val/accuracy": 0.9, "val/loss": 1.0}
    jobs += [ended(3, "pruned", 0.5), ended(4, results=both)]
    ranking = Ranking(CONFIG, jobs, "val/loss", decided=True)
    assert [job.number for job in ranking.ranked()] == [4, 3, 1, 0, 2]
    assert [job.number for job in jobs if job.failed] == [1]
    assert ranking.value(jobs[4]) == 1.0
    assert Ranking(CONFIG, jobs).value(jobs[4]) == 0.9


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
    losses = [("1", "0", 2.0), ("1", "1", 4.0), ("1", "2", None), ("2", "0", 1.0), ("3", "0", None)]
    jobs = [
        ended(n, "failed" if loss is None else "finished", loss, {"lr": lr, "seed": seed})
        for n, (lr, seed, loss) in enumerate(losses)
    ]
    ranking = Ranking(CONFIG, jobs)
    write_csv(tmp_path, ranking, ["seed"], len(jobs))
    rows = board(tmp_path)
    assert list(rows[0])[-4:] == ["run_dir", "mean", "std", "n"]
    (of_one,) = (row for row in rows if row["job"] == "0")
    assert [of_one[key] for key in ("mean", "std", "n")] == ["3.0", repr(2**0.5), "2"]
    show(tmp_path, ranking, ["seed"], ["lr", "seed"])
    out = capsys.readouterr().out
    shown = out[out.index("val/loss over seed") :].splitlines()[1:5]
    groups = ["lr mean std n", "2 1.0000 1", "1 3.0000 1.4142 2", "3 0"]
    assert [line.split() for line in shown] == [line.split() for line in groups]


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
            job.results = {"best/val/accuracy": max(curve)} if curve else {}
            job.run_dir.mkdir()
            pairs = enumerate(curve, 1)
            lines = [{"step": 10 * n, "val/accuracy": v, "val/loss": 1 - v} for n, v in pairs]
            text = "\n".join(map(json.dumps, lines)) + '\n{"step": 9'
            (job.run_dir / "metrics.jsonl").write_text(text)
            made.append(job)
        return made

    return jobs


def test_a_study_has_the_results_of_the_jobs_by_their_numbers(make):
    pytest.importorskip("optuna")
    lr, model = "optimizer.lr", "model"
    jobs = make(
        {"values": {lr: "0.001", model: "1"}, "curve": [0.2, 0.9, 0.8]},
        {"values": {lr: "9", model: "mlp"}, "state": "failed"},
        {"values": {lr: "1", model: "$x", "seed": "1"}, "curve": [0.95], "state": "pruned"},
        {"values": {lr: "0.01"}, "curve": [0.3, 0.4]},
    )
    study = study_of(Ranking(CONFIG, jobs, "val/accuracy"), [lr, model, "seed", "fixed"])
    facts = [(t.state.name, t.params, t.value, t.intermediate_values) for t in study.trials]
    assert facts == [
        ("COMPLETE", {"lr": 0.001, model: "1"}, 0.9, {10: 0.2, 20: 0.9, 30: 0.8}),
        ("FAIL", {}, None, {}),
        ("PRUNED", {"lr": 1.0, model: r"\$x", "seed": 1.0}, 0.95, {10: 0.95}),
        ("COMPLETE", {"lr": 0.01}, 0.4, {10: 0.3, 20: 0.4}),
    ]
    kinds = {name: str(kind) for name, kind in study.trials[2].distributions.items()}
    assert kinds["lr"] == "FloatDistribution(high=1.0, log=True, low=0.001, step=None)"
    assert (study.best_trial.number, study.direction.name) == (0, "MAXIMIZE")


def test_a_picture_of_a_sweep(make, tmp_path, capsys, monkeypatch):
    jobs = make(
        *({"values": {"model": NASTY[n % 2 :], "lr": f"{n}"}, "curve": [n / 9]} for n in range(9)),
        {"values": {"model": "mlp", "lr": "3"}, "state": "failed"},
    )
    file = tmp_path / "report.png"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for chosen in (jobs, jobs[9:]):
        write_report(tmp_path, Ranking(CONFIG, chosen, "val/accuracy"), ["model", "lr"])
    missing, none = capsys.readouterr().out.splitlines()
    assert missing == "report.png takes two packages: pip install matplotlib optuna"
    assert none == "no report.png: no job has a result"
    assert not file.exists()
    monkeypatch.undo()
    pytest.importorskip("matplotlib", reason="report.png takes matplotlib, the extra `report`")
    heights = []
    for count in (9, 7, 1):  # with importance; without; of one job
        write_report(tmp_path, Ranking(CONFIG, jobs[:count], "val/accuracy"), ["model", "lr"])
        assert capsys.readouterr().out == f"report: {file}\n"
        heights.append(Image.open(file).height)
    assert heights == sorted({*heights}, reverse=True)


def test_tensorboard_shows_jobs_by_what_varies_in_them(make, tmp_path):
    values = [
        {"optimizer.lr": "0.1", "seed": "1"},
        {"optimizer.lr": "0.1", "seed": "2"},
        {"optimizer.lr": "../../a\nb", "seed": "x" * 300},
        {"optimizer.lr": "0.2", "seed": "1"},
    ]
    jobs = make(*({"values": of_one} for of_one in values))
    for job in jobs[:3]:
        (job.run_dir / "tensorboard").mkdir()
    shown = tmp_path / "tensorboard"
    jobs[3].state = "running"
    link_jobs(tmp_path, jobs, ["optimizer.lr", "seed"])
    links = {path.name[:22]: os.readlink(path) for path in shown.iterdir()}
    assert links == {
        "lr=0.1,seed=1": "../0/tensorboard",
        "lr=0.1,seed=2": "../1/tensorboard",
        "lr=.._.._a_b,seed=xxxx": "../2/tensorboard",
        "lr=0.2,seed=1": "../3/tensorboard",
    }
    (shown / "mine").mkdir()
    link_jobs(tmp_path, jobs[:2], ["optimizer.lr"])  # the grid has changed
    assert {path.name for path in shown.iterdir()} == {"lr=0.1", "lr=0.1,job=1", "mine"}
    link_jobs(tmp_path, jobs[:1], [])
    assert {path.name for path in shown.iterdir()} == {"job 0", "mine"}
