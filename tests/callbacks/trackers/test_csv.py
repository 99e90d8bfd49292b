import csv
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from callbacks.metrics_log import MetricsLog
from callbacks.trackers.csv import CSV
from trainer.callback import Results
from trainer.errors import StorageError


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "csv" / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_a_row_for_each_time_and_a_column_for_each_name(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer({"csv": CSV()}, tmp_path)
    trainer.fit()
    trainer.log({"test/loss": 0.25})
    trainer.log({"test/loss": 0.5})  # once a step
    found = [(row["step"], row["epoch"], set(row) - {"step", "epoch"}) for row in rows(tmp_path)]
    train = {"train/accuracy", "train/grad_norm", "train/loss"}
    epoch = train | {f"train/epoch_{name}" for name in ("accuracy", "grad_norm", "loss")}
    val = {"val/accuracy", "val/loss"}
    assert found == [
        ("2", "0", train),
        ("4", "0", train),
        ("5", "1", epoch),
        ("5", "1", val),
        ("6", "1", train),
        ("8", "1", train),
        ("10", "2", epoch),
        ("10", "2", val),
        ("10", "2", {"test/loss"}),
    ]
    assert float(rows(tmp_path)[-2]["val/loss"]) == trainer.metrics["val/loss"]


def test_values_are_those_of_metrics_jsonl_to_the_last_bit(
    make_trainer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer({"log": MetricsLog(), "csv": CSV()}, tmp_path)
    trainer.fit()
    trainer.log({"test/loss": 1 / 3, "test/tiny": 5e-324, "test/large": 1e300 / 7})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [(line.pop("step"), line.pop("epoch"), line) for line in lines]
    assert logged[-1][2]["test/loss"] == 1 / 3
    found = [
        (int(row.pop("step")), int(row.pop("epoch")), {k: float(v) for k, v in row.items()})
        for row in rows(tmp_path)
    ]
    assert found == logged


@pytest.mark.parametrize("cut", [3, 5, 6])
def test_a_resumed_run_leaves_the_table_of_one_never_interrupted(
    make_trainer: Any, tmp_path: Path, stop_at: Any, carry_over: Any, cut: int
) -> None:
    make_trainer({"csv": CSV()}, tmp_path / "whole").fit()
    first = make_trainer({"csv": CSV(), "stop": stop_at(cut)}, tmp_path / "cut")
    second = make_trainer({"csv": CSV()}, tmp_path / "cut")
    third = make_trainer({"csv": CSV()}, tmp_path / "cut")
    first.fit()
    carry_over(first, second)
    carry_over(first, third)
    second.callbacks["csv"].on_fit_start(second)
    second.state.global_step = 9
    second.log({"train/loss": 9.0, "new": 1.0})  # lost: it goes on from the first one's checkpoint
    second.log_text("words", "lost")
    with (tmp_path / "cut" / "csv" / "metrics.csv").open("a") as file:
        file.write("9,1,9.0,1")  # torn
    third.fit()
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert list((tmp_path / "cut" / "csv" / "shown").rglob("*.md")) == []


def test_pictures_curves_and_texts_are_files(make_trainer: Any, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: mine\noptimizer: {lr: 0.1}\n")
    trainer = make_trainer({"csv": CSV()}, tmp_path)
    trainer.fit()
    trainer.log_image("samples/val", np.zeros((2, 3, 3), np.uint8))
    trainer.log_text("../../words", "**hi**")
    trainer.log_histogram("weights", torch.tensor([0.0, 1.0, 1.0]), bins=2)
    trainer.end(Results("stopped", {"val/loss": 0.5}))
    shown = tmp_path / "csv" / "shown"
    assert (shown / "samples/val/step-00000010.png").read_bytes().startswith(b"\x89PNG")
    assert [path.read_text() for path in shown.rglob("*.md")] == ["**hi**"]
    histogram = (shown / "weights/step-00000010.csv").read_text()
    assert histogram == "left,right,count\n0.0,0.5,1\n0.5,1.0,2\n"
    settings = (tmp_path / "csv" / "config.csv").read_text()
    assert settings == "key,value\nname,mine\noptimizer.lr,0.1\n"
    results = (tmp_path / "csv" / "results.csv").read_text()
    assert results == "key,value\nstate,stopped\nval/loss,0.5\n"


def test_a_full_disk_is_one_warning(
    make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def full(*_: Any) -> None:
        raise StorageError("cannot write csv/config.csv: no space left")

    trainer = make_trainer({"csv": CSV()}, tmp_path)
    monkeypatch.setattr("callbacks.trackers.csv.write_text", full)
    with caplog.at_level(logging.WARNING):
        trainer.fit()
    assert [record.getMessage() for record in caplog.records] == [
        "callbacks.csv: cannot write csv/config.csv: no space left; training continues without it"
    ]
    assert trainer.state.global_step == 10
