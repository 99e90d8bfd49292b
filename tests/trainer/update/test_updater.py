"""One update is the exact mean over its samples, whatever it was split into (I3, I4)."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from callbacks.checkpoint import Checkpoint
from callbacks.early_stopping import EarlyStopping
from data.batch import least_of, to_device
from data.orders import Shuffled
from toys import (
    BATCH,
    CLASSES,
    SAMPLES,
    Log,
    Samples,
    assert_equal,
    by_hand,
    in_group,
    loader,
    network,
    of_output,
    points,
    trainer_of,
)
from trainer.callback import Callback
from trainer.errors import SampleError
from trainer.lr_schedulers.schedule import LRSchedule
from trainer.strategies.strategy import Strategy
from trainer.tasks import losses
from trainer.tasks.classification import Classification
from trainer.tasks.losses import Term
from trainer.trainer import Trainer

WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def check(task: Classification, steps: int, loss) -> None:
    trainer = trainer_of(task, points(), steps)
    trainer.fit()
    assert_equal(trainer.model, by_hand(of_output(loss), points()))


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(nn.CrossEntropyLoss(), id="mean"),
        pytest.param(nn.CrossEntropyLoss(label_smoothing=0.1), id="smoothed"),
        pytest.param(nn.CrossEntropyLoss(weight=WEIGHTS), id="class-weights"),
        pytest.param(nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), id="both"),
        pytest.param(nn.CrossEntropyLoss(ignore_index=1), id="ignored-labels"),
        pytest.param(nn.CrossEntropyLoss(reduction="sum"), id="sum"),
        pytest.param(nn.MultiMarginLoss(), id="margin"),
    ],
)
def test_accumulation_changes_nothing(loss: nn.Module, steps: int) -> None:
    check(Classification(CLASSES, loss), steps, loss)


def test_terms_keep_their_own_denominators() -> None:
    terms = {
        "weighted": Term(nn.CrossEntropyLoss(weight=WEIGHTS), 0.5),
        "plain": nn.CrossEntropyLoss(reduction="none"),
        "total": Term(nn.CrossEntropyLoss(reduction="sum"), 0.01),
    }

    def loss(output: Tensor, target: Tensor) -> Tensor:
        weighted = F.cross_entropy(output, target, weight=WEIGHTS)
        total = F.cross_entropy(output, target, reduction="sum")
        return 0.5 * weighted + F.cross_entropy(output, target) + 0.01 * total

    for steps in (1, 2, 5):
        check(Classification(CLASSES, terms), steps, loss)


def test_counters() -> None:
    trainer = trainer_of(Classification(CLASSES), points(), 2)
    trainer.fit()
    state = trainer.state
    assert (state.epoch, state.position, state.global_step, state.updates) == (2, 0, 6, 6)
    assert (state.micro_batches, state.samples, state.skipped_updates) == (12, 46, 0)


def test_a_batch_of_one_before_batchnorm_is_explained() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).double()
    with pytest.raises(SampleError, match="drop_last"):
        trainer_of(Classification(CLASSES), points(BATCH + 1), model=model).fit()


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
        monkeypatch.setattr(losses, "least_of", lambda labels: None)


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


EPOCHS = 3


def made_with(
    micro_batches: int = 1, bad: int | None = None, callbacks: Any = None, **options: Any
) -> tuple[Trainer, Log]:
    data, lines = points(), Log()
    if bad is not None:
        data.x[bad] = torch.nan
    options = {"max_epochs": EPOCHS, "momentum": 0.0, "log_every_n_steps": 1, **options}
    callbacks = {**(callbacks or {}), "lines": lines}
    made = trainer_of(Classification(CLASSES), data, micro_batches, callbacks=callbacks, **options)
    return made, lines


def means_by_hand() -> dict[int, float]:
    """Return the mean over the samples of each epoch."""
    totals: list[float] = []

    def objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        totals.append(loss.item() * len(y))
        return loss

    by_hand(objective, points(), momentum=0.0, epochs=EPOCHS)
    return {3 * n: sum(totals[3 * n - 3 : 3 * n]) / SAMPLES for n in range(1, EPOCHS + 1)}


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_mean_over_an_epochs_samples(micro_batches: int) -> None:
    made, lines = made_with(micro_batches=micro_batches, log_every_n_steps=2)
    made.fit()
    assert lines.of("train/epoch_loss") == pytest.approx(means_by_hand(), abs=1e-14)
    assert lines.of("train/loss").keys() == {2, 3, 4, 6, 8, 9}
    assert lines.of("train/loss")[3] != lines.of("train/epoch_loss")[3]


def test_a_skipped_update_that_closes_an_epoch_leaves_it_its_mean() -> None:
    last = int(torch.as_tensor(Shuffled(SAMPLES, seed=1)(0)[:SAMPLES])[-1])
    made, lines = made_with(bad=last, on_nonfinite="skip", max_epochs=1)
    made.fit()
    assert (made.state.global_step, made.state.skipped_updates) == (2, 1)
    losses = lines.of("train/loss")
    assert lines.of("train/epoch_loss") == {2: pytest.approx((losses[1] + losses[2]) / 2)}


def test_an_epoch_that_the_run_cuts_short_has_the_mean_so_far() -> None:
    made, lines = made_with(max_epochs=None, max_steps=5)
    made.fit()
    losses = lines.of("train/loss")
    assert lines.of("train/epoch_loss")[5] == pytest.approx((losses[4] + losses[5]) / 2)


@pytest.mark.parametrize("every", [1, 2, 50])
def test_early_stopping_and_the_best_look_at_the_epoch(every: int, tmp_path: Any) -> None:
    stopping = EarlyStopping("train/loss", patience=1, min_delta=0.05)
    checkpoint = Checkpoint(monitor="train/loss", save_top_k=-1)
    callbacks: dict[str, Callback] = {"stopping": stopping, "checkpoint": checkpoint}
    made, lines = made_with(callbacks=callbacks, log_every_n_steps=every, max_epochs=30)
    made.run_dir = tmp_path
    made.fit()
    means = lines.of("train/epoch_loss")
    falls = [b - a for a, b in zip(list(means.values()), list(means.values())[1:], strict=False)]
    assert all(fall < -0.05 for fall in falls[:-1])
    assert falls[-1] >= -0.05
    assert "train/epoch_loss has not improved" in str(made.state.stop_reason)
    metric, value, _ = checkpoint.best_result() or ("", 0, 0)
    assert (metric, value) == ("train/epoch_loss", min(means.values()))


def plateau(monitor: str) -> Any:
    def make(optimizer: torch.optim.Optimizer) -> LRSchedule:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, "min", 0.5, patience=0, threshold=0.5
        )
        return LRSchedule.wrap(scheduler, monitor=monitor)

    return make


@pytest.mark.parametrize("monitor", ["train/loss", "train/epoch_loss"])
@pytest.mark.parametrize("validated", [True, False])
def test_a_plateau_of_training_moves_once_an_epoch(monitor: str, validated: bool) -> None:
    val = loader(points()) if validated else None
    made, _ = made_with(scheduler=plateau(monitor), val=val)
    made.fit()
    # No epoch halves the loss: each but the first is one without progress.
    assert list(made.learning_rates().values()) == [0.1 * 0.5 ** (EPOCHS - 1)]


def test_a_group_that_is_added_later_is_clipped_and_counts_in_the_norm() -> None:
    class Adds(Callback):
        def on_update_end(self, trainer: Trainer) -> None:
            if trainer.state.global_step == 1:
                (optimizer,) = trainer.optimizers.optimizers.values()
                optimizer.add_param_group({"params": list(trainer.model[0].parameters())})

    made, lines = made_with(callbacks={"adds": Adds()}, max_epochs=1)
    (optimizer,) = made.optimizers.optimizers.values()
    optimizer.param_groups[0]["params"][:] = [*made.model[2].parameters()]
    norms: list[float] = []
    zero_grad = made.optimizers.zero_grad

    def noted() -> None:
        gradients = [p.grad for p in made.model.parameters() if p.grad is not None]
        norms.append(float(nn.utils.get_total_norm(gradients)))
        zero_grad()
        made.model.zero_grad()

    made.optimizers.zero_grad = noted  # type: ignore[method-assign]
    made.fit()
    logged = lines.of("train/grad_norm")
    assert logged[1] < norms[0]  # the head's alone
    assert [logged[2], logged[3]] == pytest.approx(norms[1:3], abs=1e-14)
