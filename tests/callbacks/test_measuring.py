"""Tests of what adds figures to a log line: learning rates, throughput, memory."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from callbacks.lr_monitor import LRMonitor
from callbacks.memory import Memory, peak_rss
from callbacks.throughput import Throughput
from trainer.callback import Callback
from trainer.state import TrainState


class Lines(Callback):
    """Remember every log line of training."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def on_log(self, trainer: Any, scalars: Any) -> None:
        if "train/loss" in scalars:
            self.lines.append((trainer.state.global_step, dict(scalars)))


def test_learning_rates_of_the_last_update(make_trainer: Any) -> None:
    lines = Lines()
    halve = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # noqa: E731
    trainer = make_trainer({"lr": LRMonitor(), "lines": lines}, lr=1e-2, scheduler=halve)
    trainer.fit()
    (name,) = trainer.learning_rates()
    rates = {step: line[f"lr/{name}"] for step, line in lines.lines}
    assert rates == {step: pytest.approx(1e-2 * 0.5 ** (step - 1)) for step in (2, 4, 5, 6, 8, 10)}


def interval(callback: Throughput, seconds: float, waited: float, updates: int = 10) -> Any:
    trainer: Any = SimpleNamespace(
        state=TrainState(samples=100, updates=5), timer=SimpleNamespace(total=seconds, data=waited)
    )
    callback.on_fit_start(trainer)
    trainer.state.samples += 8 * updates
    trainer.state.updates += updates
    return callback.scalars(trainer)


def test_throughput_of_an_interval() -> None:
    assert interval(Throughput(), seconds=4.0, waited=1.0) == {
        "time/samples_per_second": 20.0,
        "time/step_seconds": 0.4,
        "time/data_wait": 0.1,
        "time/data_share": 0.25,
    }
    assert interval(Throughput(), seconds=1.0, waited=0.0, updates=0) == {}


def test_the_hint_comes_once_and_not_for_the_first_interval(caplog: Any) -> None:
    callback = Throughput(hint_share=0.3)
    with caplog.at_level(logging.INFO):
        for waited in (0.9, 0.2, 0.42, 0.5):
            interval(callback, seconds=1.0, waited=waited)
    assert [record.getMessage() for record in caplog.records] == [
        "42% of the time is spent waiting for data: set loader.num_workers=auto"
    ]


def test_memory_is_logged_at_the_ends_of_epochs(make_trainer: Any) -> None:
    lines = Lines()
    make_trainer({"memory": Memory(), "lines": lines}, max_epochs=None, max_steps=7).fit()
    peaks = {step: line.get("memory/peak_rss_mib") for step, line in lines.lines}
    assert [step for step, peak in peaks.items() if peak] == [5, 7]
    assert peaks[7] == pytest.approx(peak_rss() / 2**20, rel=0.1)
