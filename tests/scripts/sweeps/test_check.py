"""Mistakes that only torch can find are found before the first job."""

from collections.abc import Iterator

import pytest

from conf.errors import ConfigError
from scripts.cli.arguments import Arguments, parse_arguments
from scripts.composition.compose import split_jobs
from scripts.sweeps import check
from scripts.sweeps.built_check import monitor_of, problems_of
from scripts.sweeps.launchers import server as module
from scripts.sweeps.launchers.server import Server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "WARM_UP", None)
    it = Server()
    yield it
    it.close()


def test_a_built_job_is_checked_in_a_process_of_its_own(server: Server) -> None:
    wrong = "callbacks.checkpoint.monitor=val/accurcy"
    arguments = parse_arguments(["-m", "model=mlp", "optimizer.lr=0.1,0.2", wrong])
    with pytest.raises(ConfigError, match=r"^callbacks.checkpoint.monitor: .* did you mean") as e:
        check.check_built(arguments, split_jobs(arguments), server)
    assert len(e.value.problems) == 1


def test_a_valid_job_has_no_problems() -> None:
    assert problems_of(parse_arguments([]), ["model=mlp"]) == []


@pytest.mark.parametrize(
    ("task", "expected"),
    [("classification", "accuracy"), ("regression", "loss"), ("gan", None)],
)
def test_the_metric_of_a_task_is_known_before_a_job_runs(task: str, expected: str | None) -> None:
    assert monitor_of(parse_arguments([]), [f"task={task}"]) == expected


def test_one_job_of_each_combination_of_words_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def asked(arguments: Arguments, texts: list[list[str]], server: Server) -> dict[str, object]:
        calls.append(texts)
        return {"problems": [], "monitor": "accuracy"}

    monkeypatch.setattr(check, "_asked", asked)
    arguments = parse_arguments(["-m", "model=mlp,gan", "optimizer.lr=0.1,0.2"])
    jobs = split_jobs(arguments)
    check.check_built(arguments, jobs, Server())
    assert calls == [[["model=mlp", "optimizer.lr=0.2"], ["model=gan", "optimizer.lr=0.2"]]]
    check.check_built(arguments, jobs[:1], Server())  # it finds its own mistakes
    assert len(calls) == 1
    assert check.check_built(arguments, jobs[:1], Server(), alone=True) == "accuracy"
