import json
import math
from pathlib import Path
from typing import Any

import pytest

from callbacks.metrics_log import MetricsLog, line
from trainer.errors import StorageError


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_lines(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer({"metrics_log": MetricsLog()}, tmp_path)
    trainer.fit()
    trainer.log({"test/loss": 0.5})  # after the training, and its teardown
    found = [(r["step"], r["epoch"], sorted(set(r) - {"step", "epoch"})) for r in records(tmp_path)]
    train = ["train/accuracy", "train/grad_norm", "train/loss"]
    epoch = sorted([*train, "train/epoch_accuracy", "train/epoch_grad_norm", "train/epoch_loss"])
    val = ["val/accuracy", "val/loss"]
    assert found == [
        (2, 0, train),
        (4, 0, train),
        (5, 1, epoch),
        (5, 1, val),
        (6, 1, train),
        (8, 1, train),
        (10, 2, epoch),
        (10, 2, val),
        (10, 2, ["test/loss"]),
    ]


def test_values_keep_every_digit_and_what_is_not_finite_is_null() -> None:
    values = {"a": 0.1 + 0.2, "b": math.nan, "c": -math.inf}
    assert json.loads(line(3, 1, values)) == {
        "step": 3,
        "epoch": 1,
        "a": 0.1 + 0.2,
        "b": None,
        "c": None,
    }


def test_a_key_is_written_once_a_step(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer({"metrics_log": MetricsLog()}, tmp_path)
    trainer.setup()
    for values in ({"x": 1.0}, {"x": 2.0, "y": 3.0}, {"y": 4.0}):
        trainer.log(values)
    trainer.state.global_step = 1
    trainer.log({"x": 5.0})
    assert records(tmp_path) == [
        {"step": 0, "epoch": 0, "x": 1.0},
        {"step": 0, "epoch": 0, "y": 3.0},
        {"step": 1, "epoch": 0, "x": 5.0},
    ]


@pytest.mark.parametrize("cut", [3, 5, 6])
@pytest.mark.parametrize("lost", [b"", b'{"step": 8, "ep'], ids=["whole", "torn"])
def test_a_resumed_run_leaves_the_log_of_one_never_interrupted(
    make_trainer: Any, tmp_path: Path, stop_at: Any, carry_over: Any, cut: int, lost: bytes
) -> None:
    make_trainer({"metrics_log": MetricsLog()}, tmp_path / "whole").fit()
    first = make_trainer({"metrics_log": MetricsLog(), "stop": stop_at(cut)}, tmp_path / "cut")
    second = make_trainer({"metrics_log": MetricsLog()}, tmp_path / "cut")
    first.fit()
    path = tmp_path / "cut" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 7, "epoch": 1, "train/loss": 9.0}\n' + lost)
    carry_over(first, second)
    second.fit()
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def test_no_folder_no_file(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer({"metrics_log": MetricsLog()}).fit()
    trainer = make_trainer({"metrics_log": MetricsLog()})
    trainer.run_dir = tmp_path / "missing"
    with pytest.raises(StorageError, match=r"cannot write .*metrics\.jsonl"):
        trainer.fit()
