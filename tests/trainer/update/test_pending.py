"""Numbers of a device are added by the host, in the order in which they came."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.task import SUM, StepOutput
from trainer.update import sums
from trainer.update.pending import Series
from trainer.update.sums import Sums

CPU = torch.device("cpu")


def own(tensor: Tensor) -> Tensor:
    return tensor


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], tuple[Sums, Sums]]:
    """Return a function that makes sums since the last log and of the epoch, pending or not."""

    def make(waits: bool) -> tuple[Sums, Sums]:
        monkeypatch.setattr(sums, "waits_for", lambda device: waits)
        epoch = Sums(CPU)
        return Sums(CPU, over=epoch), epoch

    return make


def output(update: int) -> StepOutput:
    """Return what a step may give: terms with and without counts, a NaN where none counts."""
    draw = torch.Generator().manual_seed(update)
    loss = torch.rand(3, generator=draw, requires_grad=True) / 3
    count = torch.tensor(update % 4)
    terms = {
        "mean": loss.mean(),
        "each": loss,
        "counted": loss.sum() / count if count else torch.tensor(torch.nan),
        "weighted": loss.mean().bfloat16(),
        "sum": loss.sum(),
    }
    counts = {"counted": count, "weighted": torch.tensor(0.1 * update), "sum": SUM}
    return StepOutput(terms, counts, {"accuracy": (torch.tensor(update % 3), torch.tensor(3))})


@pytest.mark.parametrize("every", [1, 7, 1000])
def test_the_sums_are_those_of_numbers_added_at_once(
    pair: Callable[[bool], tuple[Sums, Sums]], every: int
) -> None:
    means: dict[bool, list[Any]] = {}
    for waits in (False, True):
        since, epoch = pair(waits)
        lines = means.setdefault(waits, [])
        for update in range(600):  # more than are kept one by one
            samples = 3 if update % 5 else 0  # a borrowed sample
            since.add_output(output(update), samples)
            since.add("grad_norm", torch.tensor(update / 7, dtype=torch.float64), 1)
            since.pack()
            if update % every == every - 1:
                lines.append(since.means(own))
                since.reset()
        lines += [epoch.means(own), since.means(own)]
        lines += [epoch.state_dict(), since.state_dict()]
    assert means[True] == means[False]
    assert "loss_counted" in means[True][-4]


def test_the_sums_of_the_epoch_alone_may_be_asked_for(
    pair: Callable[[bool], tuple[Sums, Sums]],
) -> None:
    since, epoch = pair(True)
    since.add("loss", torch.tensor(3.0), 2)
    assert epoch
    assert epoch.means(own) == since.means(own) == {"loss": 1.5}


def test_tensors_may_change_after_the_end_of_an_update(
    pair: Callable[[bool], tuple[Sums, Sums]],
) -> None:
    since, _ = pair(True)
    loss = torch.tensor(2.0)
    since.add("loss", loss, 1)
    since.pack()
    loss.fill_(5)
    assert since.means(own) == {"loss": 2.0}


def test_partial_sums_are_taken_over(pair: Callable[[bool], tuple[Sums, Sums]]) -> None:
    since, _ = pair(True)
    since.add("loss", torch.tensor(1 / 3), 0.1)
    state = since.state_dict()
    assert {t.dtype for part in state.values() for t in part.values()} == {torch.float64}
    for waits in (False, True):
        other, _ = pair(waits)
        other.load_state_dict(state)
        assert other.means(own) == since.means(own)


def test_a_series_holds_few_tensors_and_keeps_its_order() -> None:
    series = Series()
    for number in range(1000):
        series.append(torch.tensor([float(number)]))
    assert len(series._joined) + len(series._recent) < 300
    assert series.take().tolist() == list(range(1000))
    assert series.take().tolist() == []
