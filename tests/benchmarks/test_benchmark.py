"""Each benchmark with tiny sizes: contenders do the same, medians, the file says all."""

import contextlib
import io
import json

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from benchmarks import __main__ as benchmark
from benchmarks import commands, data, gpu, images, loop, report, runs, tokens
from benchmarks.report import Report
from examples.airbench.by_hand import train_by_hand
from regimen.conf.errors import ConfigError


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def pooled():
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))


NETWORKS = {"NETWORKS": {"resnet18": (linear, 2)}}
TINY = {
    "step": (loop, {"BLOCK": 5, "WARMUP": 1, "BLOCKS": 2}),
    "data": (
        data,
        {"IN_MEMORY": 256, "SMALL": 128, "LARGE": 8, "LARGE_BATCH": 4, "PHOTOGRAPHS": 4}
        | {"WORKERS": 0, "TELEPHONE": (400, 300), "LEAST": 0.0},
    ),
    "train": (images, {**NETWORKS, "BATCH": 4, "PAIRS": 1, "START": "fork"}),
    "evaluate": (images, {**NETWORKS, "EVALUATED": 8}),
    "predict": (images, {"SAMPLES": 70, "OVERRIDES": (*images.OVERRIDES, "model=mlp")}),
    "growth": (
        runs,
        {"DECADES": range(1, 3), "UPDATES": 8}
        | {"ORDERS": {kind: (make, range(3, 5)) for kind, (make, _) in runs.ORDERS.items()}},
    ),
    "tokens": (
        tokens,
        {"CONVERSATIONS": 60, "CONTEXT": 256, "BATCH": 2, "STEPS": 3, "START": "fork"}
        | {"SIZES": dict.fromkeys(tokens.SIZES, 2) | {"hidden_size": 8}, "VOCABULARY": 1024},
    ),
    "checkpoint": (runs, {"network": pooled}),
    "sweep": (commands, {"JOBS": 1, "JOB": (*commands.JOB, "debug=fast")}),
    "start": (commands, {}),
    "ddp": (loop, {"PROCESSES": (1,)}),
}
COMMANDS = ("sweep", "start", "ddp")  # start processes


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in COMMANDS else []) for n in TINY]
)
def test_a_benchmark_prints_its_table_and_writes_its_file(name, tmp_path, capsys, monkeypatch):
    if name == "tokens" and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy, whose memory is measured")
    module, sizes = TINY[name]
    monkeypatch.setattr(torch, "set_num_threads", print)  # other tests have their own
    for key, value in sizes.items():
        monkeypatch.setattr(module, key, value)
    assert benchmark.benchmark([name, "--rounds", "1", "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / f"{name}.json").read_text())
    headline = next(key for key in written if key.startswith("ratio_to_"))
    assert written[headline] > 0
    assert all(row["value"] > 0 for row in written["rows"])
    assert written["machine"]["torch"] == torch.__version__
    assert written["settings"]["rounds"] == 1
    assert f"{headline}: " in capsys.readouterr().out
    if name == "step":
        assert {"cpu_ratio_to_handwritten", "cpu_ratio_all_off_to_bare"} < written.keys()


def test_ours_trains_what_the_hand_written_loop_trains(tmp_path, monkeypatch):
    for key, value in TINY["step"][1].items():
        monkeypatch.setattr(loop, key, value)
    weights = []
    for contender in (loop.by_hand, loop.ours):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
        nn.init.normal_(model[2].weight)  # so that the gradients are clipped
        optimizer = SGD(model.parameters(), lr=loop.MAX_LR, momentum=0.9, weight_decay=5e-4)
        loader = DataLoader(loop.Batches(), batch_size=None)
        with contextlib.redirect_stderr(io.StringIO()):
            contender(model, optimizer, loader, tmp_path / contender.__name__)
        weights.append([p.detach() for p in model.parameters()])
    for theirs, own in zip(*weights, strict=True):
        torch.testing.assert_close(theirs, own)


def test_an_evaluation_by_hand_finds_the_same():
    trainer, loader = images.evaluated(linear(), 1)
    by_hand = images.evaluate_by_hand(trainer, loader)
    assert trainer.evaluate(loader, "val") == pytest.approx(by_hand)


def test_contenders_run_in_turn_and_ratios_are_medians_within_a_turn():
    order = []
    times = iter([1.0, 1.0, 10.0, 11.0, 100.0, 120.0])

    def run(name):
        order.append(name)
        return next(times)

    found = report.in_turn({name: lambda name=name: run(name) for name in "ab"}, rounds=2)
    assert order == list("ababab")
    assert found == {"a": [10, 100], "b": [11, 120]}
    assert report.paired(found["b"], found["a"]) == pytest.approx(1.15)
    rows = Report("Cost of x", "µs", found, {}, {"b": "a"}).rows()
    assert [(row["value"], row["ratio"]) for row in rows] == [
        (55, None),
        (65.5, pytest.approx(1.15)),
    ]


def test_a_report_reads_well_and_knows_contenders_of_one_name():
    values = {"x, Regimen": [12.34], "x, by hand": [11.75], "y, Regimen": [1.0]}
    lines = Report("Cost of x", "µs", values, {"ratio": 1.05}).text().splitlines()
    assert lines[0] == "Cost of x"
    assert [line.partition("x, Regimen")[2].split()[0] for line in lines[2:3]] == ["12.3"]
    assert lines[2].endswith("1.050 of x, by hand")
    assert "of" not in lines[4]
    assert lines[-1] == "ratio: 1.050"


def test_the_loop_of_cifar10_by_hand_learns(digit_photographs):
    small = {"epochs": 6, "batch": 20, "widths": (16, 16, 16), "lr": 0.1}
    assert train_by_hand(digit_photographs, **small) >= 0.2  # by chance 0.1


@pytest.mark.slow
def test_the_gpu_benchmark_is_tried_on_a_cpu(digit_photographs):
    words = ["device=cpu", "limit=1", "widths=small", f"data.root={digit_photographs}"]
    found = dict(gpu.gpu(1, words))
    assert list(found) == [f"gpu_{name}" for name in gpu.PARTS]
    assert all(row["value"] >= 0 for part in found.values() for row in part.rows())
    assert found["gpu_airbench94"].headlines["ratio_to_handwritten"] > 0
    assert found["gpu_kernels"].headlines["resnet50_ratio_to_handwritten"] < 1.5
    assert found["gpu_jpeg"].headlines["share_of_time"] > 0
    assert found["gpu_resnet18_cifar10"].headlines["accuracy"] >= 0


def test_a_part_that_fails_is_told_and_ends_no_other(monkeypatch, capsys):
    def out_of_memory(rig, rounds):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    parts = {"first": out_of_memory, "second": lambda rig, rounds: ({}, {"ratio": 1.0})}
    monkeypatch.setattr(gpu, "PARTS", parts)
    assert [name for name, _ in gpu.gpu(1, ["device=cpu"])] == ["gpu_second"]
    said = capsys.readouterr()
    assert "first failed" in said.out
    assert "Tried to allocate 2 GiB" in said.err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        pytest.param(["cifar10_fast", "data.root=/nowhere"], r"give data\.root=DIR", id="no data"),
        pytest.param(["step", "data.root=somewhere"], "step takes no overrides", id="override"),
        pytest.param(["gpu"], "needs a GPU: torch finds cpu here", id="no GPU"),
        pytest.param(["gpu", "device=cpu", "parts=x"], "gpu has no part 'x': there are", id="part"),
    ],
)
def test_a_mistake_is_answered(words, answer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=answer):
        benchmark.benchmark(words)
