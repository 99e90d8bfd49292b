"""The plan as a person reads it."""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from data.updates import UpdateSampler
from scripts.plan.batch_split import BatchSplit, describe
from scripts.plan.drawing import DataRow, Plan, curve_lines, plot, render
from trainer.optimizers.optimizers import GroupRow
from trainer.summary.memory import estimate
from trainer.summary.model import summarize
from trainer.summary.text import count, size


@pytest.fixture
def plan() -> Plan:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    summary = summarize(model, torch.zeros(2, 8))
    cosine = [0.1 * (1 + math.cos(math.pi * t / 40)) / 2 for t in range(40)]
    split = BatchSplit(100, devices=2, micro_batches=3, samples=1437)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Plan(
        name="demo",
        picks={"model": "mlp", "debug": None, "data": "digits"},
        settings={"seed": "0", "trainer.precision": "bf16"},
        overrides=["optimizer.lr=0.1", "model.hidden=[8]"],
        data=[DataRow("train", "Digits", 1437, "0123456789"), DataRow("predict", "Lines", None)],
        model=summary,
        groups=[GroupRow("default", "SGD", 4, 46, 0.1, None)],
        curves={"default": cosine, "head": [10 * lr for lr in cosine], "stem": [0.01] * 40},
        split=split,
        updates_per_epoch=15,
        total_steps=90,
        horizon="trainer.max_epochs=6",
        memory=estimate(summary, [optimizer], split.largest),
        callbacks={"progress": "callbacks.progress.Progress"},
        run_dir="runs/demo/2026-01-01_00-00-00",
    )


def test_every_decision_is_shown(plan: Plan) -> None:
    text = render(plan)
    for words in (
        "Plan of demo",
        "model=mlp  data=digits",
        "overrides: optimizer.lr=0.1 model.hidden=[8]",
        "1,437   10: 0, 1, 2",
        "a stream",
        "46 parameters",
        "default   SGD",
        "stem: constant at 0.01",
        "trainer.max_epochs=6, 15 updates an epoch, 90 in all",
        "100 = 2 devices x 3 micro-batches: 4 of 17 and 2 of 16 samples",
        "the last update of an epoch: 37 = 2 devices",
        "activations of 17 samples",
        "progress: callbacks.progress.Progress",
        "runs/demo/2026-01-01_00-00-00",
    ):
        assert words in text


def test_a_file_gets_plain_text_and_a_terminal_colours(plan: Plan) -> None:
    assert "\x1b[" not in render(plan)
    assert "\x1b[" in render(plan, colour=True)
    lines = render(plan, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


def test_what_is_unknown_is_said(plan: Plan) -> None:
    memory = replace(plan.memory, optimizer=None)
    text = render(replace(plan, memory=memory, total_steps=None, notes=["one [GPU] only"]))
    assert "more than" in text
    assert "no limit but its time" in text
    assert "one [GPU] only" in text


def test_groups_whose_rates_differ_by_a_factor_share_a_drawing(plan: Plan) -> None:
    lines = list(curve_lines(plan.curves))
    assert sum("┤" in line or "└" in line for line in lines) == 1
    assert lines[0].startswith("default: 0.1 at first")
    assert lines[1].startswith("head: 1 at first")


def test_groups_with_the_same_rates_share_a_line(plan: Plan) -> None:
    cosine = plan.curves["default"]
    assert next(curve_lines({"a": cosine, "b": cosine})).startswith("a, b: 0.1 at first")


def test_a_curve_is_drawn_from_zero_to_its_maximum() -> None:
    lines = plot([0, 1, 2, 3, 4], width=5, height=2)
    assert lines[0].endswith("4 │   ▄█")
    assert lines[1].endswith("│ ▄███")
    assert lines[3].split() == ["0", "5", "updates"]


def test_a_long_curve_keeps_its_ends() -> None:
    values = [1.0, *[0.5] * 998, 0.0]
    top, bottom = plot(values, width=20, height=1)[0].split("│")[1][0], plot(values, width=20)[4]
    assert top == "█"
    assert len(bottom.split("│")[1]) == 19  # the last column is empty, and cut


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        pytest.param((128, 2, 4), "128 = 2 devices x 4 micro-batches x 16", id="even"),
        pytest.param((128, 1, 1), "128 = 1 device x 1 micro-batch x 128", id="whole"),
        pytest.param(
            (9, 2, 2), "9 = 2 devices x 2 micro-batches: 1 of 3 and 3 of 2 samples", id="uneven"
        ),
        pytest.param(
            (3, 2, 4),
            "3 = 2 devices x 2 micro-batches: 3 with 1 sample, 1 with none (weight 0)",
            id="idle",
        ),
    ],
)
def test_a_split_in_words(numbers: tuple[int, int, int], text: str) -> None:
    assert describe(*numbers) == text


class InOrder:
    """The order 0, 1, 2, ..."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __call__(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.arange(self.length)


def counts(n: int, devices: int, micro_batches: int) -> list[int]:
    """Return the samples of each piece that the sampler gives."""
    return [
        piece.count
        for rank in range(devices)
        for piece in UpdateSampler(
            InOrder(n),
            batch_size=n,
            gradient_accumulation_steps=micro_batches,
            rank=rank,
            world_size=devices,
        ).pieces(0, 0)
    ]


def expected_words(found: list[int]) -> str:
    low, high = min(found), max(found)
    if low == high:
        return f" x {low}"
    if not low:
        return f": {found.count(1)} with 1 sample, {found.count(0)} with none (weight 0)"
    return f": {found.count(high)} of {high} and {found.count(low)} of {low} samples"


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_the_words_are_what_the_sampler_does(devices: int, micro_batches: int) -> None:
    for n in range(1, 25):
        found = counts(n, devices, micro_batches)
        split = BatchSplit(n, devices, micro_batches)
        assert max(found) == split.largest
        assert split.lines()[0].endswith(expected_words(found))


@pytest.mark.parametrize(
    ("samples", "drop_last", "words"),
    [
        pytest.param(None, False, None, id="stream"),
        pytest.param(40, False, None, id="divides"),
        pytest.param(43, False, "the last update of an epoch: 3 = ", id="short"),
        pytest.param(
            43, True, "the last 3 samples of each epoch's order are dropped", id="dropped"
        ),
    ],
)
def test_an_epochs_last_samples(samples: int | None, drop_last: bool, words: str | None) -> None:
    first, *rest = BatchSplit(10, 1, 1, samples, drop_last).lines()
    assert first.startswith("10 = ")
    assert len(rest) == (words is not None)
    assert not words or rest[0].startswith(words)


def test_fewer_samples_than_a_batch() -> None:
    split = BatchSplit(512, 1, 2, samples=100)
    assert split.largest == 50
    assert split.lines() == [
        "100 = 1 device x 2 micro-batches x 50 (loader.batch_size=512 exceeds the samples)"
    ]


def test_figures_are_short() -> None:
    assert [count(v) for v in (0, 999, 1000, 11_172_810, 2.77e8, None)] == [
        "0", "999", "1 k", "11.2 M", "277 M", "?"
    ]  # fmt: skip
    assert [size(v) for v in (0, 1023, 1024, 44_691_240, 5 * 2**40, None)] == [
        "0 B", "1023 B", "1.0 KiB", "42.6 MiB", "5.0 TiB", "?"
    ]  # fmt: skip
