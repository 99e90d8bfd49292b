"""What a run says of its time: shares that add up, and the keys that shorten its largest part."""

from typing import Any

import pytest

from scripts.runs.account import Account
from trainer.timer import KINDS, Timer

CONFIG: dict[str, Any] = {
    "loader": {"num_workers": 0},
    "trainer": {"validate_every_n_epochs": 1, "log_every_n_steps": 50},
    "callbacks": {"checkpoint": {"every_n_epochs": 1}},
}


def account(**seconds: float) -> Account:
    named = {k.replace("_and_", " + "): s for k, s in seconds.items()}
    return Account({kind: named.get(kind, 0.0) for kind in KINDS})


def test_shares_are_of_the_whole_time_and_the_largest_comes_first() -> None:
    it = account(data=4.2, forward_and_backward=5.0, optimizer=0.8, callbacks=0.001)
    assert it.seconds == pytest.approx(10.001)
    assert it.text() == "50% forward + backward, 42% waiting for data, 8% optimizer"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        pytest.param("data", "42% waiting for data: loader.num_workers=4", id="data"),
        pytest.param(
            "evaluation", "42% evaluation: trainer.validate_every_n_epochs=2", id="evaluation"
        ),
        pytest.param(
            "checkpoints", "42% checkpoints: callbacks.checkpoint.every_n_epochs=2", id="saves"
        ),
        pytest.param(
            "callbacks", "42% callbacks and logging: trainer.log_every_n_steps=100", id="callbacks"
        ),
    ],
)
def test_a_large_part_that_can_be_avoided_gets_a_hint(kind: str, expected: str) -> None:
    it = account(forward_and_backward=5.8, **{kind: 4.2})
    assert it.hint(CONFIG) == expected


def test_a_small_part_and_the_computation_itself_get_none() -> None:
    assert account(forward_and_backward=9.0, data=1.0).hint(CONFIG) == ""
    assert account(forward_and_backward=1.0, data=8.0).hint(CONFIG) == ""  # a short run
    assert account().hint(CONFIG) == ""
    assert account().text() == ""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_moment_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("trainer.timer.perf_counter", clock)
    timer = Timer()
    clock.now = 1.0
    timer.lap("data")
    with timer.spending("evaluation"):
        clock.now = 3.0
        with timer.spending("checkpoints"):
            clock.now = 3.5
        clock.now = 7.0
    clock.now = 7.25
    assert timer.total == 1.25  # evaluation and checkpoints are no training
    assert timer.data == 1.0
    assert timer.spent["evaluation"] == 5.5
    assert timer.spent["checkpoints"] == 0.5
    timer.reset()
    assert timer.total == timer.data == 0
    assert sum(timer.spent.values()) == clock.now
