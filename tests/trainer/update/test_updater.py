"""One update is the exact mean over its samples, whatever it was split into (I3)."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.loading.loader import Loader
from data.orders import Shuffled
from data.updates import UpdateSampler
from trainer.errors import SampleError
from trainer.options import Clipping, TrainerOptions
from trainer.tasks.classification import Classification
from trainer.tasks.losses import Term
from trainer.trainer import Trainer

SAMPLES, BATCH, CLASSES = 23, 8, 3  # the last update of an epoch has 7 samples


class Points:
    """Random points with labels, in float64."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randint(CLASSES, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()


def loader(steps: int = 1, data: Points | None = None) -> Loader:
    data = data or Points()
    order = Shuffled(len(data), seed=1)
    sampler = UpdateSampler(order, batch_size=BATCH, gradient_accumulation_steps=steps)
    return Loader(data, sampler, seed=1)


def by_hand(loss, epochs: int = 2, clip: float | None = None, data: Points | None = None):
    """Train with a loop as anyone would write it, on whole batches."""
    model, data = network(), data or Points()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = Shuffled(len(data), seed=1)
    for epoch in range(epochs):
        indices = torch.as_tensor(order(epoch)[: len(data)])
        for start in range(0, len(data), BATCH):
            batch = indices[start : start + BATCH]
            optimizer.zero_grad()
            loss(model(data.x[batch]), data.y[batch]).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model


def trained(task: Classification, steps: int, **options) -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    chosen = TrainerOptions(max_epochs=2, **options)
    Trainer(model, task, optimizer, loader(steps), options=chosen, precision="fp64").fit()
    return model


def assert_equal(a: nn.Module, b: nn.Module, tolerance: float = 1e-12) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance, msg=name)


WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8, 9])
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
    assert_equal(trained(Classification(CLASSES, loss), steps), by_hand(loss))


@pytest.mark.parametrize("steps", [1, 3])
def test_values_for_each_sample_are_averaged(steps: int) -> None:
    task = Classification(CLASSES, nn.CrossEntropyLoss(reduction="none"))
    assert_equal(trained(task, steps), by_hand(nn.CrossEntropyLoss()))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_terms_keep_their_own_denominators(steps: int) -> None:
    terms = {
        "weighted": Term(nn.CrossEntropyLoss(weight=WEIGHTS), 0.5),
        "plain": nn.CrossEntropyLoss(),
        "total": Term(nn.CrossEntropyLoss(reduction="sum"), 0.01),
    }

    def loss(output: Tensor, target: Tensor) -> Tensor:
        weighted = F.cross_entropy(output, target, weight=WEIGHTS)
        total = F.cross_entropy(output, target, reduction="sum")
        return 0.5 * weighted + F.cross_entropy(output, target) + 0.01 * total

    assert_equal(trained(Classification(CLASSES, terms), steps), by_hand(loss))


@pytest.mark.parametrize("steps", [1, 3])
def test_clipping_sees_the_whole_update(steps: int) -> None:
    got = trained(Classification(CLASSES), steps, clipping=Clipping(norm=0.05))
    assert_equal(got, by_hand(nn.CrossEntropyLoss(), clip=0.05))
    with pytest.raises(AssertionError):
        assert_equal(got, by_hand(nn.CrossEntropyLoss()))


def test_logged_loss_is_the_mean_over_the_samples() -> None:
    model, data = network(), Points()
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = Trainer(model, Classification(CLASSES), frozen, loader(3), precision="fp64")
    trainer.fit()
    with torch.no_grad():
        logits = model(data.x)
        loss = F.cross_entropy(logits, data.y).item()
        accuracy = (logits.argmax(1) == data.y).double().mean().item()
    assert trainer.metrics["train/loss"] == pytest.approx(loss, abs=1e-12)
    assert trainer.metrics["train/accuracy"] == pytest.approx(accuracy, abs=1e-12)


def test_counters() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = TrainerOptions(max_epochs=2)
    trainer = Trainer(
        model, Classification(CLASSES), optimizer, loader(2), options=options, precision="fp64"
    )
    trainer.fit()
    state = trainer.state
    assert (state.epoch, state.position, state.global_step, state.updates) == (2, 0, 6, 6)
    assert (state.micro_batches, state.samples, state.skipped_updates) == (12, 46, 0)


def test_a_batch_of_one_before_batchnorm_is_explained() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    single = loader(data=Points(BATCH + 1))
    with pytest.raises(SampleError, match="drop_last"):
        Trainer(model, Classification(CLASSES), optimizer, single, precision="fp64").fit()
