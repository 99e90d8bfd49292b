"""The table that a sweep ends with."""

from pathlib import Path

import pytest

from scripts.sweeps.leaderboard import SHOWN, Job, Ranking, short_keys, show, write_csv

CONFIG: dict[str, dict[str, object]] = {"callbacks": {}}


def outcome(number: int, state: str = "finished", **facts: object) -> Job:
    job = Job(number, Path("s") / str(number), {"optimizer.lr": f"{number}"}, state=state)
    for name, value in facts.items():
        setattr(job, name, value)
    return job


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        pytest.param(["optimizer.lr", "seed"], ["lr", "seed"], id="last-part"),
        pytest.param(["a.x.lr", "b.x.lr"], ["a.x.lr", "b.x.lr"], id="as-long-as-needed"),
        pytest.param(["a.x.lr", "a.y.lr"], ["x.lr", "y.lr"], id="no-longer"),
        pytest.param(["lr", "optimizer.lr"], ["lr", "optimizer.lr"], id="one-ends-as-another"),
    ],
)
def test_keys_are_shortened_to_distinct_ends(keys: list[str], expected: list[str]) -> None:
    assert short_keys(keys) == expected


def test_jobs_that_have_not_started_come_last() -> None:
    results = {"val/loss": 1.0}
    jobs = [outcome(0, "not started"), outcome(1, "failed"), outcome(2, results=results)]
    ranked = Ranking(CONFIG, jobs).ranked()
    assert [job.number for job in ranked] == [2, 1, 0]


def test_pruned_jobs_rank_after_completed_ones() -> None:
    jobs = [outcome(0, "pruned", results={"val/loss": 0.5})]
    jobs += [outcome(1, "failed"), outcome(2, results={"val/loss": 1.0})]
    ranking = Ranking(CONFIG, jobs, "val/loss", decided=True)
    assert [job.number for job in ranking.ranked()] == [2, 0, 1]
    assert not jobs[0].failed


def test_a_known_metric_decides_the_ranking() -> None:
    jobs = [outcome(0, results={"best/val/accuracy": 0.9, "val/loss": 0.5})]
    assert Ranking(CONFIG, jobs, "val/loss", decided=True).value(jobs[0]) == 0.5
    assert Ranking(CONFIG, jobs).value(jobs[0]) == 0.9


def test_the_best_are_shown_and_reasons_stay_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    jobs = [outcome(n, results={"val/loss": n / 100}, seconds=1.0) for n in range(SHOWN + 5)]
    jobs.append(outcome(99, "failed", code=5, reason="so it was " * 30))
    ranking = Ranking(CONFIG, jobs)
    show(Path("s"), ranking, [], ["optimizer.lr"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["job", "status", "lr", "val/loss", "seconds"]
    assert lines[3].split() == ["0", "finished", "0", "0.0000", "1.0"]
    assert "and 6 more jobs in leaderboard.csv" in lines
    assert f"job 99 failed (exit 5): {'so it was ' * 30}" in lines


def seeds(lr: str, *values: float | None) -> list[Job]:
    """Return a job for each loss; None: it failed."""
    jobs = [Job(n, Path("s") / lr, {"lr": lr, "seed": str(n)}) for n in range(len(values))]
    for job, value in zip(jobs, values, strict=True):
        job.state = "failed" if value is None else "finished"
        job.results = {} if value is None else {"val/loss": value}
    return jobs


def test_groups_have_a_mean_and_a_deviation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [*seeds("1", 2.0, 4.0, None), *seeds("2", 1.0), *seeds("3", None)]
    ranking = Ranking(CONFIG, jobs)
    write_csv(tmp_path, ranking, ["seed"], len(jobs))
    rows = [line.split(",") for line in (tmp_path / "leaderboard.csv").read_text().splitlines()]
    assert rows[0][-4:] == ["run_dir", "mean", "std", "n"]
    assert [row[-3:] for row in rows if row[2:4] == ["1", "0"]] == [["3.0", repr(2**0.5), "2"]]
    show(tmp_path, ranking, ["seed"], ["lr", "seed"])
    out = capsys.readouterr().out
    shown = out[out.index("val/loss over seed") :].splitlines()[1:5]
    assert [line.split() for line in shown] == [
        ["lr", "mean", "std", "n"],
        ["2", "1.0000", "1"],
        ["1", "3.0000", "1.4142", "2"],
        ["3", "0"],
    ]


def test_a_metric_that_no_job_has_logged_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = seeds("1", None, 2.0)
    for job in jobs:
        job.state = "finished"
    for expected in (False, True):
        ranking = Ranking(CONFIG, jobs)
        show(tmp_path, ranking, [], ["lr"])
        said = "no job has logged val/loss: they are not ranked\n" in capsys.readouterr().out
        assert said is expected
        jobs[1].results = {"test/loss": 1.0}
