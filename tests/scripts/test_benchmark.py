"""The benchmark's machinery: contenders do the same, figures are medians, the file says all."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from conf.errors import ConfigError
from scripts import benchmark
from scripts.benchmarks import (
    checkpoint,
    cifar10_fast,
    evaluate,
    gpu,
    growth,
    predict,
    step,
    train,
)
from scripts.benchmarks.by_hand import cifar10
from scripts.benchmarks.report import Report, Row


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BLOCK": 5, "WARMUP": 1, "BLOCKS": 2, "STEPS": 15}.items():
        monkeypatch.setattr(step, name, value)


@pytest.mark.usefixtures("brief")
def test_ours_trains_what_the_hand_written_loop_trains(tmp_path: Path) -> None:
    weights = []
    for name in ("by hand", "Regimen"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = SGD(model.parameters(), lr=step.MAX_LR, momentum=0.9, weight_decay=5e-4)
        loader = DataLoader(step.Batches(), batch_size=None)
        with step._quiet_terminal():
            step.CONTENDERS[name][0](step.Setup(model, optimizer, loader, tmp_path / name))
        weights.append([p.detach() for p in model.parameters()])
    for by_hand, ours in zip(*weights, strict=True):
        torch.testing.assert_close(by_hand, ours)


@pytest.mark.usefixtures("brief")
def test_a_benchmark_prints_its_table_and_writes_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.benchmark(["step", "--rounds", "1", "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "step.json").read_text())
    assert written["ratio_to_handwritten"] > 0
    assert [row["name"] for row in written["rows"]] == list(step.CONTENDERS)
    assert written["machine"]["torch"] == torch.__version__
    assert "ratio_to_handwritten: " in capsys.readouterr().out


def test_saves_are_timed_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small() -> nn.Module:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))

    monkeypatch.setattr(checkpoint, "network", small)
    ours, by_hand = checkpoint._run("AdamW", rounds=3)
    assert len(ours.blocked) == len(by_hand.blocked) == 3
    report = checkpoint.measure(rounds=1)
    assert {"SGD, by hand", "AdamW, Regimen"} <= {row.name for row in report.rows}
    assert report.headlines["ratio_to_handwritten"] > 0


def test_predict_is_timed_against_a_bare_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "SAMPLES", 70)
    monkeypatch.setattr(predict, "OVERRIDES", (*predict.OVERRIDES, "model=mlp"))
    report = predict.measure(rounds=1)
    assert [row.name for row in report.rows] == ["bare loop", "Regimen"]
    assert report.headlines["ratio_to_reference"] > 0


def test_costs_are_medians_of_blocks_and_ratios_are_taken_within_a_turn() -> None:
    cost = step.Cost
    costs = {"by hand": [cost(10, 1), cost(100, 1)], "Regimen": [cost(11, 2), cost(120, 2)]}
    assert step._ratio(costs, "Regimen", lambda c: c.wall) == pytest.approx(1.15)
    assert step._ratio(costs, "Regimen", lambda c: c.cpu) == 2


def test_a_report_reads_well() -> None:
    rows = [Row("ours", 12.34, 10, 20, 1.05, "theirs"), Row("theirs", 11.75, 11, 12)]
    lines = Report("x", "Cost of x", "µs", rows, {"ratio": 1.05}).text().splitlines()
    assert lines[0] == "Cost of x"
    assert any(line.split()[:2] == ["ours", "12.3"] and "1.050" in line for line in lines)
    assert lines[-1] == "ratio: 1.050"


def test_the_loop_of_cifar10_by_hand_learns(digit_photographs: Path) -> None:
    small = cifar10.Settings(epochs=6, batch=20, widths=(16, 16, 16), lr=0.1)
    assert cifar10.train(digit_photographs, small) >= 0.2  # by chance 0.1


def test_cifar10_fast_says_what_data_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"give data\.root=DIR"):
        cifar10_fast.measure(1, ["data.root=/nowhere"])


def test_the_gpu_benchmark_is_tried_on_a_cpu(digit_photographs: Path, tmp_path: Path) -> None:
    words = ["device=cpu", "limit=1", "widths=small", f"data.root={digit_photographs}"]
    report = gpu.measure(1, words, tmp_path)
    assert len(report.rows) == 14
    assert all(row.value >= 0 for row in report.rows)
    assert report.plot == []  # nothing failed
    assert report.headlines["airbench94_ratio_to_handwritten"] > 0
    assert report.headlines["resnet50_kernels_ratio_to_handwritten"] < 1.5
    assert report.headlines["resnet50_jpeg_share_of_time"] > 0
    assert report.headlines["resnet18_cifar10_accuracy"] >= 0
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert list(written["settings"]["parts"]) == list(gpu.PARTS)


def test_parts_of_the_gpu_benchmark_are_put_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What an earlier call found stays; a part that fails is told and ends no other."""

    def out_of_memory(rig: Any, rounds: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def found(name: str) -> Any:
        return lambda rig, rounds: ([Row(name, rounds, 0, 9)], {f"{name}_ratio": float(rounds)})

    parts = {"first": found("first"), "second": out_of_memory, "third": found("third")}
    monkeypatch.setattr(gpu, "PARTS", parts)
    gpu.measure(1, ["device=cpu", "parts=first"], tmp_path)
    report = gpu.measure(2, ["device=cpu", "parts=second,third"], tmp_path)
    assert report.headlines == {"first_ratio": 1, "third_ratio": 2}
    assert [row.name for row in report.rows] == ["first", "third"]
    message = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert report.plot == [f"second failed: {message}"]
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert (written["first_ratio"], written["third_ratio"]) == (1, 2)
    assert written["settings"]["parts"]["second"]["failed"] == message
    with pytest.raises(ConfigError, match="gpu has no part 'fourth': there are first, second"):
        gpu.measure(1, ["device=cpu", "parts=fourth"], tmp_path)


def test_without_a_gpu_its_benchmark_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a GPU, and torch finds none here"):
        benchmark.benchmark(["gpu"])


def test_only_some_benchmarks_take_overrides() -> None:
    with pytest.raises(ConfigError, match="step takes no overrides"):
        benchmark.benchmark(["step", "data.root=somewhere"])


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def test_an_evaluation_is_compared_with_a_loop_that_finds_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluate, "NETWORKS", {"resnet18": (linear, 2)})
    monkeypatch.setattr(evaluate, "BATCH", 8)
    found = {}

    def noted(name: str) -> evaluate.Pass:
        way = getattr(evaluate, name)
        return lambda trainer, loader: found.update({name: way(trainer, loader)})

    for name in ("_bare", "_regimen"):
        monkeypatch.setattr(evaluate, name, noted(name))
    report = evaluate.measure(rounds=1)
    assert [row.name for row in report.rows] == ["bare loop, resnet18", "Regimen, resnet18"]
    loss, accuracy = found["_bare"]
    assert found["_regimen"] == pytest.approx({"val/loss": loss, "val/accuracy": accuracy})


def test_training_is_timed_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "network", linear)
    monkeypatch.setattr(train, "BATCH", 4)
    monkeypatch.setattr(train, "PAIRS", 1)
    monkeypatch.setattr(train, "START", "fork")  # with what is set above, and without imports
    report = train.measure(rounds=2)
    assert [row.name for row in report.rows[1::2]] == [f"Regimen, {form}" for form in train.FORMS]
    assert report.headlines["least_ratio"] > 0
    assert report.settings["seconds_of_a_save"] > 0


def test_a_run_is_timed_by_decades(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "DECADES", range(1, 3))
    marks = growth._run()
    assert [step for step, _, _ in marks.notes] == [9, 10, 90, 100]
    assert [row.name for row in marks.rows()] == ["a run at 10^1", "a run at 10^2"]
