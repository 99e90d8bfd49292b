"""The denominators of means: labels that count, however an update is split (I3, I4)."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.batch import least_of, to_device
from toys import (
    BATCH,
    CLASSES,
    Samples,
    assert_equal,
    by_hand,
    in_group,
    loader,
    network,
    points,
    trainer_of,
)
from trainer.errors import SampleError
from trainer.strategies.strategy import Strategy
from trainer.tasks import losses
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def labelled(ignored: int) -> Samples:
    """Return 16 points; of the first update a whole micro-batch's labels do not count."""
    data = points(16)
    data.y[[0, 1, 2, 3, 9]] = ignored
    return data


def counting(loss: nn.Module, data: Samples, steps: int = 1, strategy: Strategy | None = None):
    task = Classification(CLASSES, loss, top_k=(1, 2))
    more = {"shuffled": False, "momentum": 0.0, "log_every_n_steps": 1}
    return trainer_of(task, data, steps, strategy=strategy, **more)


def trained_by_hand(loss: nn.Module, data: Samples) -> tuple[nn.Module, float]:
    """Train on whole batches; return the loss of the last update, too."""
    values = []

    def objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        values.append(loss(model(x), y))
        return values[-1]

    model = by_hand(objective, data, momentum=0.0, shuffled=False)
    return model, values[-1].item()


IGNORING = [
    pytest.param(partial(nn.CrossEntropyLoss), -100, id="torch's"),
    pytest.param(partial(nn.CrossEntropyLoss, label_smoothing=0.1), -100, id="smoothed"),
    pytest.param(partial(nn.CrossEntropyLoss, weight=WEIGHTS), -100, id="class-weights"),
    pytest.param(partial(nn.CrossEntropyLoss, ignore_index=1), 1, id="a-class"),
    pytest.param(partial(nn.CrossEntropyLoss, ignore_index=-1), -1, id="below-zero"),
]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Count labels as where the host never saw them, if the test asks for that."""
    if request.param:
        monkeypatch.setattr(losses, "_all_count", lambda target, ignored: False)


WHERE = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"], indirect=True)


@WHERE
@pytest.mark.parametrize(("loss", "ignored"), IGNORING)
@pytest.mark.parametrize("steps", [1, 2, 8])
def test_labels_that_do_not_count(loss, ignored: int, steps: int, on_device: None) -> None:
    data = labelled(ignored)
    trainer = counting(loss(), data, steps)
    trainer.fit()
    wanted, value = trained_by_hand(loss(), data)
    assert_equal(trainer.model, wanted)
    assert trainer.metrics["train/loss"] == pytest.approx(value, abs=1e-12)


def test_labels_that_do_not_count_in_several_processes(ranks) -> None:
    data = labelled(-100)
    wanted, value = trained_by_hand(nn.CrossEntropyLoss(), data)

    def train(strategy: Strategy):
        trainer = counting(nn.CrossEntropyLoss(), data, 2, strategy)
        trainer.fit()
        return trainer.metrics["train/loss"], [p.detach() for p in trainer.model.parameters()]

    for logged, parameters in ranks(2, in_group(train)):
        for got, parameter in zip(parameters, wanted.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.detach(), rtol=0, atol=1e-12)
        assert logged == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(("loss", "ignored"), IGNORING)
@pytest.mark.parametrize("batch", [1, 3, 5, 16])
def test_an_evaluation_counts_the_others_once(loss, ignored: int, batch: int) -> None:
    data, criterion = labelled(ignored), loss()
    trainer = counting(criterion, data)
    metrics = trainer.evaluate(loader(data, batch=batch, shuffled=False), "test")
    with torch.no_grad():
        logits = trainer.model(data.x)
    counted = data.y != ignored
    right = (logits.argmax(1) == data.y)[counted].double().mean().item()
    best = (logits.topk(2).indices == data.y[:, None]).any(1)[counted].double().mean().item()
    assert metrics["test/loss"] == pytest.approx(criterion(logits, data.y).item(), abs=1e-12)
    assert metrics["test/accuracy"] == pytest.approx(right, abs=1e-12)
    assert metrics["test/accuracy_top2"] == pytest.approx(best, abs=1e-12)


def warnings_of(caplog) -> list[str]:
    return [r.getMessage().partition(",")[0] for r in caplog.records if r.levelname == "WARNING"]


@WHERE
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_that_never_count_are_told_at_once_and_end_the_run(
    smoothing: float, steps: int, on_device: None, caplog
) -> None:
    data = labelled(-100)
    data.y[:] = -100
    trainer = counting(nn.CrossEntropyLoss(label_smoothing=smoothing), data, steps)
    with pytest.raises(SampleError, match="no label of epoch 0 counts"):
        trainer.fit()
    for got, wanted in zip(trainer.model.parameters(), network().parameters(), strict=True):
        assert torch.equal(got, wanted)
    assert warnings_of(caplog) == ["no label counts in train/loss"]
    for _ in range(2):
        assert trainer.evaluate(loader(data, shuffled=False), "test")["test/loss"] == 0
    assert warnings_of(caplog)[1:] == ["no label counts in test/loss"]


def test_an_epoch_with_a_label_that_counts_goes_on(caplog) -> None:
    data = labelled(-100)
    data.y[:BATCH] = -100
    trainer = counting(nn.CrossEntropyLoss(), data)
    trainer.fit()
    assert trainer.state.epoch == 2
    assert warnings_of(caplog) == ["no label counts in train/loss"]


def test_labels_of_one_process_suffice(ranks, caplog) -> None:
    data = labelled(-100)
    data.y[BATCH // 2 : BATCH] = data.y[BATCH + BATCH // 2 :] = -100  # all of the second process

    def train(strategy: Strategy):
        data.y[1::BATCH] = 0
        trainer = counting(nn.CrossEntropyLoss(), data, 1, strategy)
        trainer.fit()
        return trainer.state.epoch, warnings_of(caplog)

    assert ranks(2, in_group(train)) == [(2, []), (2, [])]


def test_labels_that_change_in_place_are_counted_again() -> None:
    counted = losses.Losses(nn.CrossEntropyLoss())
    labels = torch.tensor([0, 1, 2])
    assert counted.counts(labels) == {"": 3}
    labels[1] = -100
    assert counted.counts(labels)[""] == 2


def test_a_device_knows_the_least_label_until_labels_change() -> None:
    there = to_device(torch.tensor([3, 1, 2]), torch.device("meta"))
    assert least_of(there) == 1
    assert least_of(there + 0) is None
    there.zero_()
    assert least_of(there) is None
    many = to_device(torch.zeros(2**16 + 1, dtype=torch.long), torch.device("meta"))
    assert least_of(many) is None


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("batch", [4, 7])
def test_a_loss_that_is_a_sum_is_logged_per_sample(steps: int, batch: int) -> None:
    data = labelled(0)
    trainer = counting(nn.CrossEntropyLoss(reduction="sum"), data)
    source = loader(data, steps, batch, shuffled=False)
    frozen = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    same = Trainer(trainer.model, trainer.task, frozen, source, precision="fp64")
    same.fit()
    with torch.no_grad():
        wanted = F.cross_entropy(trainer.model(data.x), data.y).item()
    assert same.metrics["train/loss"] == pytest.approx(wanted, abs=1e-12)
    metrics = trainer.evaluate(loader(data, batch=batch, shuffled=False), "val")
    assert metrics["val/loss"] == pytest.approx(wanted, abs=1e-12)
