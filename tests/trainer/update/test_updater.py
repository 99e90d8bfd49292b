"""One update is the exact mean over its samples, whatever it was split into (I3, I4)."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regimen.data.batch import BatchSlice, cached_min, to_device
from regimen.data.orders import Shuffled
from regimen.trainer.assembly.check import name_problems
from regimen.trainer.callback import Callback
from regimen.trainer.errors import DivergedError, SampleError, UserCodeError
from regimen.trainer.lr_schedulers.schedule import LRSchedule
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.task import SUM, StepOutput
from regimen.trainer.tasks import losses
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.losses import Term
from regimen.trainer.tasks.metrics import R2
from regimen.trainer.tasks.supervised import Scores
from regimen.trainer.trainer import Trainer
from regimen.trainer.update.guard import DeviceGuard, UpdateBackup
from regimen.trainer.update.loss import scaled_loss
from regimen.trainer.update.means import MeanAccumulator
from toys import (
    BATCH,
    CLASSES,
    FEATURES,
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
    through_a_file,
    trainer_of,
    whole_batches,
)

WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


LOSSES = {
    "mean": nn.CrossEntropyLoss(),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "class-weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "both": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2),
    "ignored-labels": nn.CrossEntropyLoss(ignore_index=1),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "each": nn.CrossEntropyLoss(reduction="none"),
    "margin": nn.MultiMarginLoss(),
}
SHARES = {"class-weights": 0.5, "each": 1.0, "sum": 0.01}


@pytest.mark.quick
@pytest.mark.parametrize("name", [*LOSSES, "terms"])
def test_accumulation_changes_nothing(name: str) -> None:
    shares = SHARES if name == "terms" else {name: 1.0}
    terms = {n: Term(LOSSES[n], share) for n, share in shares.items()}
    loss = terms if name == "terms" else LOSSES[name]

    def objective(output: Tensor, target: Tensor) -> Tensor:
        total = torch.zeros((), dtype=output.dtype)
        for term in terms.values():
            total = total + term.weight * term.loss(output, target).mean()
        return total

    wanted = by_hand(of_output(objective), points())

    for steps in (1, 2, 3, 9):
        trainer = trainer_of(Classification(CLASSES, loss), points(), steps)
        trainer.fit()
        assert_equal(trainer.model, wanted)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_loss_that_is_a_sum_is_logged_per_sample(steps: int) -> None:
    data = points()
    task = Classification(CLASSES, LOSSES["sum"])
    trainer = trainer_of(task, data, steps, lr=0.0, val=loader(data, batch=7))
    trainer.fit()

    mean = F.cross_entropy(trainer.model(data.x), data.y).item()

    assert trainer.metrics["train/epoch_loss"] == pytest.approx(mean, abs=1e-12)
    assert trainer.metrics["val/loss"] == pytest.approx(mean, abs=1e-12)


@pytest.mark.quick
def test_counters() -> None:
    trainer = trainer_of(Classification(CLASSES), points(), 2)
    trainer.fit()
    state = trainer.state

    assert state.epoch == 2
    assert state.position == 0
    assert state.global_step == 6
    assert state.updates == 6
    assert state.micro_batches == 12
    assert state.samples == 46
    assert state.skipped_updates == 0


def test_a_batch_of_one_before_batchnorm_is_explained() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).double()
    trainer = trainer_of(Classification(CLASSES), points(BATCH + 1), model=model)
    with pytest.raises(SampleError, match="drop_last"):
        trainer.fit()


def labelled(ignored: int) -> Samples:
    """Return 16 points; of the first update a whole micro-batch's labels do not count."""
    data = points(16)
    data.y[[0, 1, 2, 3, 9]] = ignored
    return data


def unlabelled() -> Samples:
    """Return 16 points of which no label counts."""
    data = points(16)
    data.y[:] = -100
    return data


def counting(loss: nn.Module, data: Samples, steps: int = 1, strategy: Strategy | None = None):
    task = Classification(CLASSES, loss, top_k=(1, 2))
    more = {"shuffled": False, "momentum": 0.0, "log_every_n_steps": 1}
    return trainer_of(task, data, steps, strategy=strategy, **more)


IGNORING: dict[str, tuple[nn.Module, int]] = {
    "torch's": (nn.CrossEntropyLoss(), -100),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), -100),
    "class-weights": (nn.CrossEntropyLoss(weight=WEIGHTS), -100),
    "a-class": (nn.CrossEntropyLoss(ignore_index=1), 1),
    "below-zero": (nn.CrossEntropyLoss(ignore_index=-1), -1),
}


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Count labels as where the host never saw them, if the test asks for that."""
    if request.param:
        monkeypatch.setattr(losses, "cached_min", lambda labels: None)


WHERE = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"], indirect=True)


def noted(values: list[Tensor], loss: nn.Module, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    value = loss(model(x), y)
    values.append(value)
    return value


@WHERE
def test_labels_that_do_not_count(ranks, on_device: None) -> None:
    def train(strategy: Strategy | None, steps: int) -> dict[str, Any]:
        found = {}
        for name, (loss, ignored) in IGNORING.items():
            trainer = counting(loss, labelled(ignored), steps, strategy)
            trainer.fit()
            found[name] = trainer.metrics["train/loss"], trainer.model
        return found

    results = [train(None, steps) for steps in (1, 2, 8)]
    results += ranks(2, in_group(partial(train, steps=2)))

    for name, (loss, ignored) in IGNORING.items():
        losses_by_hand: list[Tensor] = []
        objective = partial(noted, losses_by_hand, loss)
        wanted = by_hand(objective, labelled(ignored), momentum=0.0, shuffled=False)
        last_loss = losses_by_hand[-1].item()
        for result in results:
            logged, model = result[name]
            assert_equal(model, wanted)
            assert logged == pytest.approx(last_loss, abs=1e-12)


@pytest.mark.parametrize("name", list(IGNORING))
@pytest.mark.parametrize("batch", [1, 3, 5, 16])
def test_an_evaluation_counts_the_others_once(name: str, batch: int) -> None:
    criterion, ignored = IGNORING[name]
    data = labelled(ignored)
    trainer = counting(criterion, data)
    metrics = trainer.evaluate(loader(data, batch=batch, shuffled=False), "test")

    with torch.no_grad():
        logits = trainer.model(data.x)
    counted = data.y != ignored
    is_label = logits.topk(2).indices == data.y[:, None]
    is_best = is_label[counted, 0].double()
    is_among_two = is_label[counted].any(1).double()
    wanted = {
        "test/loss": criterion(logits, data.y).item(),
        "test/accuracy": is_best.mean().item(),
        "test/accuracy_top2": is_among_two.mean().item(),
    }
    found = {name: metrics[name] for name in wanted}

    assert found == pytest.approx(wanted, abs=1e-12)


def warnings_of(caplog) -> list[str]:
    """Return the warnings, each up to its first comma."""
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    return [warning.partition(",")[0] for warning in warnings]


@WHERE
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_that_never_count_are_told_at_once_and_end_the_run(
    smoothing: float, steps: int, on_device: None, caplog
) -> None:
    data = unlabelled()
    trainer = counting(nn.CrossEntropyLoss(label_smoothing=smoothing), data, steps)

    with pytest.raises(SampleError, match="no label of epoch 0 counts"):
        trainer.fit()

    untrained = network()
    for got, wanted in zip(trainer.model.parameters(), untrained.parameters(), strict=True):
        assert torch.equal(got, wanted)
    assert warnings_of(caplog) == ["no label counts in train"]

    for _ in range(2):
        assert trainer.evaluate(loader(data, shuffled=False), "test") == {}
    assert warnings_of(caplog)[1:] == ["no label counts in test"]


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("own", [0, 3, 0.0, 2.5, torch.tensor(0), torch.tensor(3.0)], ids=str)
def test_an_only_micro_batch_needs_no_total(own: Tensor | float, scale: float) -> None:
    """Bit for bit its mean times its count by the total; nothing where no label counts."""
    batch_slice = BatchSlice((0,), 4, 0, 4, 0, 1, 0, 0)

    def loss_and_gradient(total: Tensor | None) -> tuple[Tensor, Tensor | None]:
        values = torch.tensor([0.3, 0.7], requires_grad=True)
        if own > 0:
            mean = values.square().sum() / 3
        else:
            mean = values.sum() * math.nan  # as torch's mean over no label
        output = StepOutput({"": mean, "sum": values}, {"": own, "sum": SUM})
        loss = scaled_loss(output, batch_slice, {"": total}, scale)
        loss.backward()
        return loss.detach(), values.grad

    known_total = torch.tensor(float(own) or 1.0, dtype=torch.float64)
    found = loss_and_gradient(None)
    wanted = loss_and_gradient(known_total)

    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert found[0].isfinite()


def test_a_count_that_is_no_number_is_not_taken_for_none() -> None:
    nan = torch.tensor(math.nan)
    output = StepOutput({"": nan}, {"": nan})
    batch_slice = BatchSlice((0,), 4, 0, 4, 0, 1, 0, 0)
    loss = scaled_loss(output, batch_slice, {"": None}, 1.0)

    assert loss.isnan()


METRICS = ["loss_free", "losses", "loss:ce", "a:b", ":", "zero:loss"]


def with_a_score(name: str) -> Classification:
    """Return a task that logs the mean 0.75 under the name."""

    class Named(Classification):
        def scores(self, output: Tensor, target: Tensor) -> Scores:
            return {name: (torch.tensor(3.0), 4)}

    return Named(CLASSES)


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_may_have_any_name_and_is_never_taken_for_a_loss(name: str) -> None:
    task = with_a_score(name)
    trainer = trainer_of(task, unlabelled(), shuffled=False, log_every_n_steps=1)

    with pytest.raises(SampleError, match="no label of epoch 0 counts"):
        trainer.fit()
    assert trainer.metrics[f"train/{name}"] == 0.75
    assert trainer.metrics["train/loss"] == 0.0


def test_a_metric_with_the_name_of_the_loss_is_refused() -> None:
    sums = MeanAccumulator(torch.device("cpu"))
    loss = {"ce": torch.tensor(1.0), "": torch.tensor(2.0)}
    output = StepOutput(loss, sums={"loss_ce": (torch.tensor(1.0), 1)})
    sums.add_output(output, 1)

    with pytest.raises(UserCodeError, match=r"sums\['loss_ce'\] of a StepOutput has the name of"):
        sums.means(lambda tensor: tensor)


@pytest.mark.parametrize("name", ["grad_norm", "loss_scale", "skipped_updates", "epoch_loss"])
def test_a_metric_with_a_name_that_the_trainer_logs_is_refused(name: str) -> None:
    trainer = trainer_of(with_a_score(name), labelled(0), shuffled=False)
    with pytest.raises(UserCodeError, match=f"logged as train/{name}, which the trainer logs"):
        trainer.fit()


def test_a_loss_called_scale_is_not_taken_for_that_of_fp16() -> None:
    class Scaled(Classification):
        def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
            output = super().training_step(model, batch)
            return StepOutput({"scale": output.terms[""]})

    trainer = trainer_of(Scaled(CLASSES), labelled(0), shuffled=False)
    with pytest.raises(UserCodeError, match="logged as train/loss_scale"):
        trainer.fit()


class Constant:
    """A metric whose value is known."""

    keys = ("a",)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Look at nothing."""

    def compute(self) -> dict[str, float]:
        """Return a value."""
        return {"a": 0.5}

    reset = merge = lambda self, *_: None


@pytest.mark.parametrize(
    ("task", "taken"),
    [
        pytest.param(Classification(CLASSES, metrics={"accuracy": R2()}), "accuracy", id="score"),
        pytest.param(Classification(CLASSES, metrics={"loss": R2()}), "loss", id="loss"),
        pytest.param(
            Classification(CLASSES, metrics={"x": Constant(), "x_a": R2()}), "x_a", id="key"
        ),
    ],
)
def test_two_metrics_of_one_name_are_refused(task: Classification, taken: str) -> None:
    (problem,) = name_problems(task)
    assert f"two metrics of the task would be called '{taken}'" in problem.message

    data = labelled(0)
    task.update_metrics = lambda output, target: None  # type: ignore[method-assign]
    trainer = trainer_of(task, [])

    with pytest.raises(UserCodeError, match=f"val/{taken} would be two metrics"):
        trainer.evaluate(loader(data, shuffled=False), "val")


def unchanged(tensor: Tensor) -> Tensor:
    """Reduce over one process."""
    return tensor


def test_partial_sums_go_on_from_their_state_and_from_that_of_earlier_checkpoints() -> None:
    saved = MeanAccumulator(torch.device("cpu"))
    loss = {"ce": torch.tensor(1.0), "": torch.tensor(2.0)}
    metrics = {name: (torch.tensor(3.0), 4) for name in METRICS}
    saved.add_output(StepOutput(loss, sums=metrics), 5)
    wanted = saved.means(unchanged)

    assert wanted == {**dict.fromkeys(METRICS, 0.75), "loss": 3.0, "loss_ce": 1.0}

    state = through_a_file(saved.state_dict())
    again = MeanAccumulator(torch.device("cpu"))
    again.load_state_dict([state])

    assert again.means(unchanged) == wanted

    earlier_sums = {"loss:ce": 5.0, "loss:": 10.0, "acc": 1.0}
    earlier_state = {"sums": earlier_sums, "counts": dict.fromkeys(earlier_sums, 5)}
    again.load_state_dict([earlier_state])

    assert again.means(unchanged) == {"acc": 0.2, "loss": 3.0, "loss_ce": 1.0}


def test_a_label_that_counts_suffices_in_an_epoch(caplog) -> None:
    data = labelled(-100)
    data.y[:BATCH] = -100
    trainer = counting(nn.CrossEntropyLoss(), data)
    trainer.fit()

    assert trainer.state.epoch == 2
    assert warnings_of(caplog) == ["no label counts in train"]


def test_a_label_that_counts_suffices_in_whatever_process(ranks, caplog) -> None:
    data = unlabelled()
    data.y[::BATCH] = 0  # the first process's

    def train(strategy: Strategy) -> tuple[int, list[str]]:
        trainer = counting(nn.CrossEntropyLoss(), data, 1, strategy)
        trainer.fit()
        return trainer.state.epoch, warnings_of(caplog)

    first, second = ranks(2, in_group(train))

    assert first == (2, [])
    assert second == (2, [])


def test_a_device_knows_the_least_label_until_labels_change() -> None:
    there = to_device(torch.tensor([3, 1, 2]), torch.device("meta"))
    assert cached_min(there) == 1
    assert cached_min(there + 0) is None

    there.zero_()
    assert cached_min(there) is None

    many = to_device(torch.zeros(2**16 + 1, dtype=torch.long), torch.device("meta"))
    assert cached_min(many) is None


EPOCHS = 3


def made_with(
    micro_batches: int = 1, bad: int | None = None, callbacks: Any = None, **options: Any
) -> tuple[Trainer, Log]:
    """Return a trainer and the log of what it says; the sample `bad` holds NaN."""
    data = points()
    if bad is not None:
        data.x[bad] = torch.nan
    lines = Log()
    callbacks = {**(callbacks or {}), "lines": lines}
    options = {
        "max_epochs": EPOCHS,
        "momentum": 0.0,
        "log_every_n_steps": 1,
        **options,
    }
    task = Classification(CLASSES)
    return trainer_of(task, data, micro_batches, callbacks=callbacks, **options), lines


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_mean_over_an_epochs_samples(micro_batches: int) -> None:
    made, lines = made_with(micro_batches=micro_batches, log_every_n_steps=2)
    made.fit()

    totals: list[Tensor] = []
    summed = partial(noted, totals, LOSSES["sum"])
    by_hand(lambda m, x, y: summed(m, x, y) / len(y), points(), momentum=0.0, epochs=EPOCHS)
    means = {}
    for last in (3, 6, 9):  # the updates at which an epoch ends
        total = sum(totals[last - 3 : last])
        means[last] = total.item() / SAMPLES
    of_updates = lines.of("train/loss")
    of_epochs = lines.of("train/epoch_loss")

    assert of_epochs == pytest.approx(means, abs=1e-14)
    assert of_updates.keys() == {2, 3, 4, 6, 8, 9}
    assert of_updates[3] != of_epochs[3]


LAST_SAMPLE = int(Shuffled(SAMPLES, seed=1)(0)[SAMPLES - 1])  # of the first epoch


@pytest.mark.parametrize(
    ("options", "skipped"),
    [
        pytest.param(
            {"bad": LAST_SAMPLE, "on_nonfinite": "skip", "max_epochs": 1}, 1, id="skipped"
        ),
        pytest.param({"max_steps": 2, "max_epochs": None}, 0, id="cut short"),
    ],
)
def test_the_mean_of_an_epoch_that_is_cut_short_or_ends_with_a_skipped_update(
    options: dict[str, Any], skipped: int
) -> None:
    made, lines = made_with(**options)
    made.fit()
    assert made.state.global_step == 2
    assert made.state.skipped_updates == skipped

    losses = lines.of("train/loss")
    mean = (losses[1] + losses[2]) / 2
    assert lines.of("train/epoch_loss") == {2: pytest.approx(mean)}


@pytest.mark.parametrize("monitor", ["train/loss", "train/epoch_loss"])
@pytest.mark.parametrize("validated", [True, False])
def test_a_plateau_of_training_moves_once_an_epoch(monitor: str, validated: bool) -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> LRSchedule:
        options = {"factor": 0.5, "patience": 0, "threshold": 0.5}
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
        return LRSchedule.wrap(scheduler, monitor=monitor)

    val = loader(points()) if validated else None
    made, _ = made_with(scheduler=plateau, val=val)
    made.fit()

    # No epoch halves the loss: each but the first is one without progress.
    halved = 0.1 * 0.5 ** (EPOCHS - 1)

    assert list(made.learning_rates().values()) == [halved]


class Adds(Callback):
    """Train the body from the second update on."""

    def on_update_end(self, trainer: Trainer) -> None:
        if trainer.state.global_step == 1:
            (optimizer,) = trainer.optimizers.optimizers.values()
            body = list(trainer.model[0].parameters())
            optimizer.add_param_group({"params": body})
            trainer.model.zero_grad()


def norms_by_hand() -> list[float]:
    """Return the norm of each update's gradients: the head's alone at first."""
    model = network()
    norms: list[float] = []
    for x, y in whole_batches(points(), 1):
        loss = F.cross_entropy(model(x), y)
        trained = model if norms else model[2]
        gradients = torch.autograd.grad(loss, list(trained.parameters()))
        norm = nn.utils.get_total_norm(gradients)
        norms.append(norm.item())
    return norms


def test_a_group_that_is_added_later_is_clipped_and_counts_in_the_norm() -> None:
    made, lines = made_with(callbacks={"adds": Adds()}, max_epochs=1, clip_grad_norm=1e-12)
    (optimizer,) = made.optimizers.optimizers.values()
    head = list(made.model[2].parameters())
    optimizer.param_groups[0]["params"][:] = head
    made.fit()

    assert_equal(made.model, network(), 1e-11)  # clipped to nearly nothing

    logged = list(lines.of("train/grad_norm").values())
    assert logged == pytest.approx(norms_by_hand(), rel=1e-9)


def test_flags_of_many_updates_between_two_looks_at_them_stay_few() -> None:
    guard = DeviceGuard(UpdateBackup([]), torch.device("cpu"))
    for update in range(2500):
        norm = 1.0 if update < 2000 else math.nan
        guard.begin_update()
        guard.is_nonfinite(torch.tensor(norm))
        assert len(guard._earlier) <= 1000
    assert guard.undo_skipped() == 500
    assert guard.undo_skipped() == 0


def sparse_trainer(parts: int = 1, **options: Any) -> Trainer:
    """Return what trains an embedding with sparse gradients, whose rows several samples read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, FEATURES, sparse=True), nn.Linear(FEATURES, CLASSES))
    x = torch.arange(SAMPLES) % 3
    data = Samples(x, points().y)
    task = Classification(CLASSES)
    return trainer_of(task, data, parts, model=model.double(), momentum=0.0, **options)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("options", [{"clip_grad_value": 0.01}, {"clip_grad_norm": 0.05}], ids=str)
def test_sparse_gradients_are_clipped_as_dense_ones(parts: int, options: dict[str, float]) -> None:
    trainer = sparse_trainer(parts, **options)
    dense = sparse_trainer(**options)
    dense.model[0].sparse = False
    trainer.fit()
    dense.fit()

    assert_equal(trainer.model, dense.model)


def test_a_sparse_gradient_that_is_not_finite_is_named() -> None:
    trainer = sparse_trainer()
    trainer.model[0].weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(DivergedError, match=r"the gradient of 0\.weight is not finite"):
        trainer.fit()
