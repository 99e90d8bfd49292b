"""Mistakes that take torch to be found are found before the first job."""

import subprocess

import pytest

from conf.errors import ConfigError
from scripts.cli.arguments import parse_arguments
from scripts.composition.compose import split_jobs
from scripts.sweeps import check
from scripts.sweeps.built_check import monitor_of, problems_of


def test_a_built_job_is_checked_in_a_process_of_its_own() -> None:
    wrong = "callbacks.checkpoint.monitor=val/accurcy"
    arguments = parse_arguments(["-m", "model=mlp", "optimizer.lr=0.1,0.2", wrong])
    with pytest.raises(ConfigError, match=r"^callbacks.checkpoint.monitor: .* did you mean") as e:
        check.check_built(arguments, split_jobs(arguments))
    assert len(e.value.problems) == 1


def test_a_sound_job_has_no_problems() -> None:
    assert problems_of(parse_arguments([]), ["model=mlp"]) == []


@pytest.mark.parametrize(
    ("task", "expected"),
    [("classification", "accuracy"), ("regression", "loss"), ("gan", None)],
)
def test_the_metric_of_a_task_is_known_before_a_job_runs(task: str, expected: str | None) -> None:
    assert monitor_of(parse_arguments([]), [f"task={task}"]) == expected


def test_one_job_of_each_combination_of_words_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def started(argv: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append(options["input"])
        return subprocess.CompletedProcess(argv, 0, '{"problems": [], "monitor": "accuracy"}')

    monkeypatch.setattr(subprocess, "run", started)
    arguments = parse_arguments(["-m", "model=mlp,gan", "optimizer.lr=0.1,0.2"])
    jobs = split_jobs(arguments)
    check.check_built(arguments, jobs)
    assert calls == ['[["model=mlp", "optimizer.lr=0.2"], ["model=gan", "optimizer.lr=0.2"]]']
    check.check_built(arguments, jobs[:1])  # it finds its own mistakes
    assert len(calls) == 1
    assert check.check_built(arguments, jobs[:1], alone=True) == "accuracy"
