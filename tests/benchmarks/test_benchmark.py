"""Each benchmark with tiny sizes: contenders do the same, medians, the file says all."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from benchmarks import __main__ as benchmark
from benchmarks import (
    checkpoint,
    data,
    ddp,
    gpu,
    growth,
    inference,
    report,
    start,
    step,
    train,
)
from benchmarks.report import Report
from conf.errors import ConfigError
from examples.airbench.by_hand import train_by_hand


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def pooled() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))


TINY: dict[str, tuple[Any, dict[str, Any]]] = {
    "step": (step, {"BLOCK": 5, "WARMUP": 1, "BLOCKS": 2}),
    "data": (
        data,
        {"IN_MEMORY": 256, "SMALL": 128, "LARGE": 8, "LARGE_BATCH": 4, "PHOTOGRAPHS": 4}
        | {"WORKERS": 0, "TELEPHONE": (400, 300), "LEAST": 0.0},
    ),
    "train": (train, {"network": linear, "BATCH": 4, "PAIRS": 1, "START": "fork"}),
    "evaluate": (inference, {"NETWORKS": {"resnet18": (linear, 2)}, "BATCH": 8}),
    "predict": (inference, {"SAMPLES": 70, "OVERRIDES": (*inference.OVERRIDES, "model=mlp")}),
    "growth": (
        growth,
        {"DECADES": range(1, 3), "UPDATES": 8}
        | {"ORDERS": {kind: (make, range(3, 5)) for kind, (make, _) in growth.ORDERS.items()}},
    ),
    "checkpoint": (checkpoint, {"network": pooled}),
    "sweep": (start, {"JOBS": 1, "JOB": (*start.JOB, "debug=fast")}),
    "start": (start, {}),
    "ddp": (ddp, {"PROCESSES": (1,)}),
}
COMMANDS = ("sweep", "start", "ddp")  # start processes


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    module, sizes = TINY[request.param]
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)
    threads = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "tiny",
    [pytest.param(n, marks=[pytest.mark.slow] if n in COMMANDS else []) for n in TINY],
    indirect=True,
)
def test_a_benchmark_prints_its_table_and_writes_its_file(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.benchmark([tiny, "--rounds", "1", "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / f"{tiny}.json").read_text())
    headline = next(key for key in written if key.startswith("ratio_to_"))
    assert written[headline] > 0
    assert all(row["value"] > 0 for row in written["rows"])
    assert written["machine"]["torch"] == torch.__version__
    assert f"{headline}: " in capsys.readouterr().out
    if tiny == "step":
        assert {"cpu_ratio_to_handwritten", "cpu_ratio_all_off_to_bare"} < written.keys()


@pytest.mark.parametrize("tiny", ["step"], indirect=True)
def test_ours_trains_what_the_hand_written_loop_trains(tiny: Any, tmp_path: Path) -> None:
    weights = []
    for contender in (step.by_hand, step.ours):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
        nn.init.normal_(model[2].weight)  # so that the gradients are clipped
        optimizer = SGD(model.parameters(), lr=step.MAX_LR, momentum=0.9, weight_decay=5e-4)
        loader = DataLoader(step.Batches(), batch_size=None)
        with contextlib.redirect_stderr(io.StringIO()):
            contender(model, optimizer, loader, tmp_path / contender.__name__)
        weights.append([p.detach() for p in model.parameters()])
    for theirs, own in zip(*weights, strict=True):
        torch.testing.assert_close(theirs, own)


def test_an_evaluation_by_hand_finds_the_same() -> None:
    trainer, loader = inference.evaluated(linear(), 1)
    by_hand = inference.evaluate_by_hand(trainer, loader)
    assert trainer.evaluate(loader, "val") == pytest.approx(by_hand)


def test_contenders_run_in_turn_and_ratios_are_medians_within_a_turn() -> None:
    order: list[str] = []
    times = iter([1.0, 1.0, 10.0, 11.0, 100.0, 120.0])

    def run(name: str) -> float:
        order.append(name)
        return next(times)

    found = report.in_turn({name: lambda name=name: run(name) for name in "ab"}, rounds=2)
    assert order == list("ababab")
    assert found == {"a": [10, 100], "b": [11, 120]}
    assert report.paired(found["b"], found["a"]) == pytest.approx(1.15)
    rows = Report("x", "Cost of x", "µs", found, {"b": "a"}, {}).rows()
    assert [(row["value"], row["ratio"]) for row in rows] == [
        (55, None),
        (65.5, pytest.approx(1.15)),
    ]


def test_a_report_reads_well() -> None:
    values = {"ours": [12.34], "theirs": [11.75]}
    report = Report("x", "Cost of x", "µs", values, {"ours": "theirs"}, {"ratio": 1.05})
    lines = report.text().splitlines()
    assert lines[0] == "Cost of x"
    assert any(line.split()[:2] == ["ours", "12.3"] and "1.050" in line for line in lines)
    assert lines[-1] == "ratio: 1.050"


def test_the_loop_of_cifar10_by_hand_learns(digit_photographs: Path) -> None:
    small = {"epochs": 6, "batch": 20, "widths": (16, 16, 16), "lr": 0.1}
    assert train_by_hand(digit_photographs, **small) >= 0.2  # by chance 0.1


def test_the_gpu_benchmark_is_tried_on_a_cpu(digit_photographs: Path) -> None:
    words = ["device=cpu", "limit=1", "widths=small", f"data.root={digit_photographs}"]
    found = {part.name: part for part in gpu.measure(1, words)}
    assert list(found) == [f"gpu_{name}" for name in gpu.PARTS]
    assert all(row["value"] >= 0 for part in found.values() for row in part.rows())
    assert found["gpu_airbench94"].headlines["ratio_to_handwritten"] > 0
    assert found["gpu_kernels"].headlines["resnet50_ratio_to_handwritten"] < 1.5
    assert found["gpu_jpeg"].headlines["share_of_time"] > 0
    assert found["gpu_resnet18_cifar10"].headlines["accuracy"] >= 0


def test_a_part_that_fails_is_told_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(rig: Any, rounds: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    parts = {"first": out_of_memory, "second": lambda rig, rounds: ({}, {"ratio": 1.0})}
    monkeypatch.setattr(gpu, "PARTS", parts)
    assert [part.name for part in gpu.measure(1, ["device=cpu"])] == ["gpu_second"]
    said = capsys.readouterr()
    assert "first failed" in said.out
    assert "Tried to allocate 2 GiB" in said.err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        pytest.param(["cifar10_fast", "data.root=/nowhere"], r"give data\.root=DIR", id="no data"),
        pytest.param(["step", "data.root=somewhere"], "step takes no overrides", id="override"),
        pytest.param(["gpu"], "needs a GPU, and torch finds none here", id="no GPU"),
        pytest.param(["gpu", "device=cpu", "parts=x"], "gpu has no part 'x': there are", id="part"),
    ],
)
def test_a_mistake_is_answered(
    words: list[str], answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=answer):
        benchmark.benchmark(words)
