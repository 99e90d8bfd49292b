"""Mistakes that only torch can find are found before the first job."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from conf.errors import ConfigError
from scripts.cli.arguments import Arguments, parse_arguments
from scripts.composition.compose import split_jobs
from scripts.sweeps import grid


def test_mistakes_of_targets_are_found_in_a_process_of_its_own() -> None:
    wrong = "callbacks.checkpoint.monitor=val/accurcy"
    arguments = parse_arguments(["-m", "model=mlp,small_cnn", "optimizer.lr=0.1,0.2", wrong])
    with pytest.raises(ConfigError, match=r"^callbacks.checkpoint.monitor: .* did you mean") as e:
        grid.check_built(arguments, split_jobs(arguments))
    assert len(e.value.problems) == 1


@pytest.mark.parametrize(
    ("task", "expected"),
    [("classification", "accuracy"), ("regression", "loss"), ("gan", None)],
)
def test_the_metric_of_a_task_is_known_before_a_job_runs(task: str, expected: str | None) -> None:
    problems, monitor, _ = grid.built([parse_arguments([f"task={task}"])])
    assert monitor == expected
    assert not problems or task == "gan"


def test_one_job_of_each_combination_of_words_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def submit(function: Any, given: Sequence[Arguments]) -> Any:
        calls.append([arguments.overrides for arguments in given])
        return SimpleNamespace(result=lambda: ([], "accuracy", 2))

    class Pool:
        def __init__(self, *_: Any) -> None:
            self.submit = submit

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(grid, "ProcessPoolExecutor", Pool)
    arguments = parse_arguments(["-m", "model=mlp,gan", "optimizer.lr=0.1,0.2"])
    assert grid.check_built(arguments, split_jobs(arguments)) == ("val/accuracy", 2)
    assert calls == [[("model=mlp", "optimizer.lr=0.2"), ("model=gan", "optimizer.lr=0.2")]]
