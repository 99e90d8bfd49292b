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
        parts = [term.weight * term.loss(output, target).mean() for term in terms.values()]
        return torch.stack(parts).sum()

    wanted = by_hand(of_output(objective), points())
    for steps in (1, 2, 3, 9):
        trainer = trainer_of(Classification(CLASSES, loss), points(), steps)
        trainer.fit()
        assert_equal(trainer.model, wanted)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_loss_that_is_a_sum_is_logged_per_sample(steps: int) -> None:
    data, task = points(), Classification(CLASSES, LOSSES["sum"])
    trainer = trainer_of(task, data, steps, lr=0.0, val=loader(data, batch=7))
    trainer.fit()
    wanted = pytest.approx(F.cross_entropy(trainer.model(data.x), data.y).item(), abs=1e-12)
    assert [trainer.metrics[key] for key in ("train/epoch_loss", "val/loss")] == [wanted, wanted]


@pytest.mark.quick
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
    values.append(loss(model(x), y))
    return values[-1]


@WHERE
def test_labels_that_do_not_count(ranks, on_device: None) -> None:
    def train(strategy: Strategy | None, steps: int) -> dict[str, Any]:
        found = {}
        for name, (loss, ignored) in IGNORING.items():
            trainer = counting(loss, labelled(ignored), steps, strategy)
            trainer.fit()
            found[name] = trainer.metrics["train/loss"], trainer.model
        return found

    parts = [train(None, steps) for steps in (1, 2, 8)]
    parts += ranks(2, in_group(partial(train, steps=2)))
    for name, (loss, ignored) in IGNORING.items():
        values: list[Tensor] = []
        objective = partial(noted, values, loss)
        wanted = by_hand(objective, labelled(ignored), momentum=0.0, shuffled=False)
        for logged, model in (found[name] for found in parts):
            assert_equal(model, wanted)
            assert logged == pytest.approx(values[-1].item(), abs=1e-12)


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
    best = logits.topk(2).indices == data.y[:, None]
    wanted = {
        "test/loss": criterion(logits, data.y).item(),
        "test/accuracy": best[counted, 0].double().mean().item(),
        "test/accuracy_top2": best[counted].any(1).double().mean().item(),
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, abs=1e-12)


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


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("own", [0, 3, 0.0, 2.5, torch.tensor(0), torch.tensor(3.0)], ids=str)
def test_an_only_micro_batch_needs_no_total(own: Tensor | float, scale: float) -> None:
    """Bit for bit its mean times its count by the total; nothing where no label counts."""
    batch_slice = BatchSlice((0,), 4, 0, 4, 0, 1, 0, 0)
    found = []
    for total in (None, torch.tensor(float(own) or 1.0, dtype=torch.float64)):
        values = torch.tensor([0.3, 0.7], requires_grad=True)
        # torch's mean over no label is NaN.
        mean = values.square().sum() / 3 if own > 0 else values.sum() * math.nan
        output = StepOutput({"": mean, "sum": values}, {"": own, "sum": SUM})
        loss = scaled_loss(output, batch_slice, {"": total}, scale)
        loss.backward()
        found.append((loss.detach(), values.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0, equal_nan=True)
    assert found[0][0].isfinite()


def test_a_count_that_is_no_number_is_not_taken_for_none() -> None:
    output = StepOutput({"": torch.tensor(math.nan)}, {"": torch.tensor(math.nan)})
    batch_slice = BatchSlice((0,), 4, 0, 4, 0, 1, 0, 0)
    assert scaled_loss(output, batch_slice, {"": None}, 1.0).isnan()


METRICS = ["loss_free", "losses", "loss:ce", "a:b", ":", "zero:loss"]


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_may_have_any_name_and_is_never_taken_for_a_loss(name: str) -> None:
    class Named(Classification):
        def scores(self, output: Tensor, target: Tensor) -> Scores:
            return {name: (torch.tensor(3.0), 4)}

    data = labelled(-100)
    data.y[:] = -100
    trainer = trainer_of(Named(CLASSES), data, shuffled=False, log_every_n_steps=1)
    with pytest.raises(SampleError, match="no label of epoch 0 counts"):
        trainer.fit()
    assert trainer.metrics[f"train/{name}"] == 0.75
    assert trainer.metrics["train/loss"] == 0.0


def test_a_metric_with_the_name_of_the_loss_is_refused() -> None:
    sums = MeanAccumulator(torch.device("cpu"))
    loss = {"ce": torch.tensor(1.0), "": torch.tensor(2.0)}
    sums.add_output(StepOutput(loss, sums={"loss_ce": (torch.tensor(1.0), 1)}), 1)
    with pytest.raises(UserCodeError, match=r"sums\['loss_ce'\] of a StepOutput has the name of"):
        sums.means(lambda tensor: tensor)


@pytest.mark.parametrize("name", ["grad_norm", "loss_scale", "skipped_updates", "epoch_loss"])
def test_a_metric_with_a_name_that_the_trainer_logs_is_refused(name: str) -> None:
    class Named(Classification):
        def scores(self, output: Tensor, target: Tensor) -> Scores:
            return {name: (torch.tensor(3.0), 4)}

    trainer = trainer_of(Named(CLASSES), labelled(0), shuffled=False)
    with pytest.raises(UserCodeError, match=f"logged as train/{name}, which the trainer logs"):
        trainer.fit()


def test_a_loss_called_scale_is_not_taken_for_that_of_fp16() -> None:
    class Scaled(Classification):
        def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
            return StepOutput({"scale": super().training_step(model, batch).terms[""]})

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
    data = labelled(0)
    (problem,) = name_problems(task)
    assert f"two metrics of the task would be called '{taken}'" in problem.message
    task.update_metrics = lambda output, target: None  # type: ignore[method-assign]
    with pytest.raises(UserCodeError, match=f"val/{taken} would be two metrics"):
        trainer_of(task, []).evaluate(loader(data, shuffled=False), "val")


def test_partial_sums_go_on_from_their_state_and_from_that_of_earlier_checkpoints() -> None:
    saved = MeanAccumulator(torch.device("cpu"))
    loss = {"ce": torch.tensor(1.0), "": torch.tensor(2.0)}
    metrics = {name: (torch.tensor(3.0), 4) for name in METRICS}
    saved.add_output(StepOutput(loss, sums=metrics), 5)
    wanted = saved.means(lambda tensor: tensor)
    assert wanted == {**dict.fromkeys(METRICS, 0.75), "loss": 3.0, "loss_ce": 1.0}
    again = MeanAccumulator(torch.device("cpu"))
    again.load_state_dict([through_a_file(saved.state_dict())])
    assert again.means(lambda tensor: tensor) == wanted
    old = {"loss:ce": 5.0, "loss:": 10.0, "acc": 1.0}
    again.load_state_dict([{"sums": old, "counts": dict.fromkeys(old, 5)}])
    assert again.means(lambda tensor: tensor) == {"acc": 0.2, "loss": 3.0, "loss_ce": 1.0}


def test_a_label_that_counts_suffices_in_an_epoch_in_whatever_process(ranks, caplog) -> None:
    data = labelled(-100)
    data.y[:BATCH] = -100
    trainer = counting(nn.CrossEntropyLoss(), data)
    trainer.fit()
    assert trainer.state.epoch == 2
    assert warnings_of(caplog) == ["no label counts in train/loss"]
    caplog.clear()
    data.y[:] = -100
    data.y[::BATCH] = 0  # the first process's

    def train(strategy: Strategy):
        trainer = counting(nn.CrossEntropyLoss(), data, 1, strategy)
        trainer.fit()
        return trainer.state.epoch, warnings_of(caplog)

    assert ranks(2, in_group(train)) == [(2, []), (2, [])]


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
    data, lines = points(), Log()
    if bad is not None:
        data.x[bad] = torch.nan
    options = {"max_epochs": EPOCHS, "momentum": 0.0, "log_every_n_steps": 1, **options}
    callbacks = {**(callbacks or {}), "lines": lines}
    made = trainer_of(Classification(CLASSES), data, micro_batches, callbacks=callbacks, **options)
    return made, lines


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_mean_over_an_epochs_samples(micro_batches: int) -> None:
    made, lines = made_with(micro_batches=micro_batches, log_every_n_steps=2)
    made.fit()
    totals: list[Tensor] = []
    objective = partial(noted, totals, LOSSES["sum"])
    by_hand(lambda m, x, y: objective(m, x, y) / len(y), points(), momentum=0.0, epochs=EPOCHS)
    means = {n: sum(totals[n - 3 : n]).item() / SAMPLES for n in (3, 6, 9)}
    assert lines.of("train/epoch_loss") == pytest.approx(means, abs=1e-14)
    assert lines.of("train/loss").keys() == {2, 3, 4, 6, 8, 9}
    assert lines.of("train/loss")[3] != lines.of("train/epoch_loss")[3]


def test_the_mean_of_an_epoch_that_is_cut_short_or_ends_with_a_skipped_update() -> None:
    last = int(torch.as_tensor(Shuffled(SAMPLES, seed=1)(0)[:SAMPLES])[-1])
    for options in ({"bad": last, "on_nonfinite": "skip", "max_epochs": 1}, {"max_steps": 2}):
        made, lines = made_with(**{"max_epochs": None, **options})
        made.fit()
        assert (made.state.global_step, made.state.skipped_updates) == (2, int("bad" in options))
        losses = lines.of("train/loss")
        assert lines.of("train/epoch_loss") == {2: pytest.approx((losses[1] + losses[2]) / 2)}


@pytest.mark.parametrize("monitor", ["train/loss", "train/epoch_loss"])
@pytest.mark.parametrize("validated", [True, False])
def test_a_plateau_of_training_moves_once_an_epoch(monitor: str, validated: bool) -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> LRSchedule:
        options = {"factor": 0.5, "patience": 0, "threshold": 0.5}
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
        return LRSchedule.wrap(scheduler, monitor=monitor)

    made, _ = made_with(scheduler=plateau, val=loader(points()) if validated else None)
    made.fit()
    # No epoch halves the loss: each but the first is one without progress.
    assert list(made.learning_rates().values()) == [0.1 * 0.5 ** (EPOCHS - 1)]


def test_a_group_that_is_added_later_is_clipped_and_counts_in_the_norm() -> None:
    class Adds(Callback):
        def on_update_end(self, trainer: Trainer) -> None:
            if trainer.state.global_step == 1:
                (optimizer,) = trainer.optimizers.optimizers.values()
                optimizer.add_param_group({"params": list(trainer.model[0].parameters())})
                trainer.model.zero_grad()

    made, lines = made_with(callbacks={"adds": Adds()}, max_epochs=1, clip_grad_norm=1e-12)
    (optimizer,) = made.optimizers.optimizers.values()
    optimizer.param_groups[0]["params"][:] = [*made.model[2].parameters()]
    made.fit()
    model, norms = network(), []
    assert_equal(made.model, model, 1e-11)
    for x, y in whole_batches(points(), 1):
        loss = F.cross_entropy(model(x), y)
        trained = model if norms else model[2]  # the head's alone at first
        gradients = torch.autograd.grad(loss, list(trained.parameters()))
        norms.append(float(nn.utils.get_total_norm(gradients)))
    assert list(lines.of("train/grad_norm").values()) == pytest.approx(norms, rel=1e-9)


def test_flags_of_many_updates_between_two_looks_at_them_stay_few() -> None:
    guard = DeviceGuard(UpdateBackup([]), torch.device("cpu"))
    for update in range(2500):
        guard.begin_update()
        guard.is_nonfinite(torch.tensor(1.0 if update < 2000 else float("nan")))
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
