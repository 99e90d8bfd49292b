"""Every task against the same training written by hand, however its batches are split (I3, I4)."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import toys
from regimen.trainer.errors import ModelError, SampleError
from regimen.trainer.state import epoch_metric
from regimen.trainer.task import Task
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.language_model import LanguageModel
from regimen.trainer.tasks.multilabel import MultiLabel
from regimen.trainer.tasks.regression import Regression
from regimen.trainer.tasks.segmentation import Segmentation
from toys import SAMPLES, Samples, assert_equal, distance, loader, points


def normal(*shape, seed, dtype=torch.float32):
    """Return random numbers of the standard normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def values():
    data = points()
    noise = normal(SAMPLES, seed=8, dtype=torch.float64)
    return Samples(data.x, data.x[:, 0] * 2 + noise)


def several_labels():
    data = points()
    labels = data.x[:, :3].flip(0) > 0.3
    return Samples(data.x, labels.double())


def pixels():
    """Masks of 6 x 6 with between 0 and 35 pixels left out of the loss, another number in each."""
    data = points(SAMPLES * 36, 1)
    images = data.x.view(SAMPLES, 1, 6, 6)
    masks = data.y.view(SAMPLES, 36)
    for i in range(SAMPLES):
        left_out = (i * 5) % 36
        masks[i, :left_out] = 255
    return Samples(images, masks.view(SAMPLES, 6, 6))


def tokens():
    """Texts of 3 to 7 tokens, padded."""
    texts = points(SAMPLES * 8, classes=4).y.view(SAMPLES, 8)
    x = texts[:, :-1].clone()
    y = texts[:, 1:].clone()
    for i in range(SAMPLES):
        length = 3 + i % 5
        y[i, length:] = -100
    return Samples(x, y)


class Reader(nn.Module):
    """Logits [n, length, tokens] from each token alone."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        hidden = torch.tanh(self.embed(x))
        return self.head(hidden)


def segmenter():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))


class Case(NamedTuple):
    data: Callable[[], Samples]
    network: Callable[[], nn.Module]
    task: Callable[[], Task]
    loss: Callable[[Tensor, Tensor], Tensor]  # for whole batches of outputs and targets


def loss_of_values(output, y):
    return F.mse_loss(output.squeeze(1), y)


def loss_of_tokens(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


CASES = {
    "values": Case(values, lambda: toys.network(1), Regression, loss_of_values),
    "several": Case(several_labels, toys.network, MultiLabel, F.binary_cross_entropy_with_logits),
    "pixels": Case(
        pixels,
        segmenter,
        lambda: Segmentation(3),
        partial(F.cross_entropy, ignore_index=255),
    ),
    "tokens": Case(tokens, Reader, lambda: LanguageModel(4), loss_of_tokens),
}
KINDS = list(CASES)


def network(kind):
    torch.manual_seed(3)
    return CASES[kind].network().double()


def by_hand(kind):
    case = CASES[kind]
    objective = toys.of_output(case.loss)
    return toys.by_hand(objective, case.data(), network(kind))


def trainer_of(kind, steps=1, lr=0.1):
    case = CASES[kind]
    val = loader(case.data(), batch=5, shuffled=False)
    return toys.trainer_of(case.task(), case.data(), steps, model=network(kind), lr=lr, val=val)


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_as_by_hand(kind, steps):
    trainer = trainer_of(kind, steps)
    trainer.fit()
    assert_equal(trainer.model, by_hand(kind))


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_values_in_one_column_are_those_without_a_column(columns, wide):
    output = normal(6, columns, seed=1)
    target = normal(6, columns, seed=2)
    given = target if wide or columns > 1 else target.squeeze(1)
    task = Regression()
    result = task.evaluation_step(lambda x: output, (torch.zeros(6), given))

    assert result.terms[""] == F.mse_loss(output, target)

    total, count = result.sums["mae"]
    mean_absolute_error = F.l1_loss(output, target).item()
    assert total / count == pytest.approx(mean_absolute_error)
    assert count == 6 * columns

    explained = task.metrics()["r2"].compute()
    assert explained == pytest.approx(r2(output, target), rel=1e-5)


def r2(output, target):
    """Return the share of the targets' variance that the outputs explain."""
    residual = (output - target).square().sum()
    spread = (target - target.mean()).square().sum()
    return float(1 - residual / spread)


@pytest.mark.parametrize(
    ("task_of", "shape"),
    [
        pytest.param(partial(Classification, 4), (6,), id="classes"),
        pytest.param(partial(Segmentation, 4), (2, 4, 5), id="masks"),
    ],
)
@pytest.mark.parametrize("kind", [nn.BCEWithLogitsLoss, nn.MSELoss, nn.SmoothL1Loss])
def test_a_loss_of_values_takes_class_labels_as_one_hot_vectors(kind, task_of, shape):
    samples, *size = shape
    labels = torch.randint(4, shape, generator=torch.Generator().manual_seed(1))
    logits = normal(samples, 4, *size, seed=2)
    one_hot = F.one_hot(labels, 4).movedim(-1, 1).float()
    inputs = torch.zeros(samples)
    task = task_of(kind())
    result = task.evaluation_step(lambda x: logits, (inputs, labels))

    assert result.terms[""] == kind()(logits, one_hot)

    labels[0] = 4
    with pytest.raises(SampleError, match=r"labels from . to 4"):
        task.evaluation_step(lambda x: logits, (inputs, labels))


@pytest.mark.parametrize("kind", [nn.BCEWithLogitsLoss, nn.MSELoss, nn.SmoothL1Loss])
def test_a_loss_of_values_takes_one_hot_vectors_as_mixup_makes_them(kind):
    labels = torch.randint(4, (6,), generator=torch.Generator().manual_seed(1))
    logits = normal(6, 4, seed=2)
    one_hot = F.one_hot(labels, 4).float()
    inputs = torch.zeros(6)
    task = Classification(4, kind())
    mixed = task.training_step(lambda x: logits, (inputs, one_hot))
    plain = task.evaluation_step(lambda x: logits, (inputs, labels))

    assert mixed.terms[""] == plain.terms[""]


@pytest.mark.parametrize("kind", ["pixels", "tokens"])
def test_a_mean_of_means_would_differ(kind):
    """The negative control: micro-batches weighted by samples give another training."""
    trainer = trainer_of(kind, steps=3)
    trainer.task.losses.counted = []
    trainer.task.count_names = []
    trainer.fit()

    assert distance(trainer.model, by_hand(kind)) > 1e-6


def starting_with(prefix, names):
    return {name for name in names if name.startswith(prefix)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_metrics_named_are_those_that_come(kind):
    trainer = trainer_of(kind, lr=0.0)
    task = trainer.task
    trainer.fit()

    of_validation = {f"val/{name}" for name in task.metric_names()}

    assert starting_with("val/", trainer.metrics) == of_validation
    assert f"val/{task.monitor()}" in of_validation

    of_updates = {f"train/{name}" for name in ["loss", "grad_norm", *task.score_names]}
    of_epochs = {epoch_metric(name) for name in of_updates}
    assert starting_with("train/epoch_", trainer.metrics) == of_epochs
    assert starting_with("train/", trainer.metrics) == of_updates | of_epochs


def figures(kind):
    """Return the metrics of an untrained model, its outputs and the targets."""
    trainer = trainer_of(kind, lr=0.0)
    trainer.fit()
    case = CASES[kind]
    data = case.data()
    with torch.no_grad():
        output = trainer.model(data.x)
    loss = case.loss(output, data.y).item()
    assert trainer.metrics["train/loss"] == pytest.approx(loss, abs=1e-12)
    assert trainer.metrics["val/loss"] == pytest.approx(loss, abs=1e-12)
    return trainer.metrics, output, data.y


def assert_validated(metrics, expected):
    found = {name: metrics[f"val/{name}"] for name in expected}
    assert expected == pytest.approx(found)


def test_figures_of_values_are_those_of_their_definitions():
    metrics, output, y = figures("values")
    errors = output.squeeze(1) - y
    assert_validated(metrics, {"mae": errors.abs().mean(), "r2": r2(output.squeeze(1), y)})


def test_figures_of_several_labels_are_those_of_their_definitions():
    metrics, output, y = figures("several")
    said = output > 0
    hits = (said & (y == 1)).sum()
    right = (said == y).double()
    expected = {
        "label_accuracy": right.mean(),
        "exact_match": right.prod(1).mean(),
        "f1": 2 * hits / (said.sum() + y.sum()),
    }

    assert_validated(metrics, expected)


def test_figures_of_pixels_are_those_of_their_definitions():
    metrics, output, y = figures("pixels")
    valid = y != 255
    said = output.argmax(1)
    ious = []
    for label in range(3):
        ours = (said == label) & valid
        theirs = y == label
        ious.append((ours & theirs).sum() / (ours | theirs).sum())
    right = (said == y) & valid
    expected = {
        "pixel_accuracy": right.sum() / valid.sum(),
        "miou": torch.stack(ious).mean(),
    }

    assert_validated(metrics, expected)


def test_figures_of_tokens_are_those_of_their_definitions():
    metrics, output, y = figures("tokens")
    valid = y != -100
    right = (output.argmax(2) == y) & valid
    accuracy = right.sum() / valid.sum()

    assert metrics["val/token_accuracy"] == pytest.approx(accuracy.item())
    assert metrics["val/perplexity"] == pytest.approx(math.exp(metrics["val/loss"]))


@pytest.mark.parametrize(
    ("task", "output", "target", "named"),
    [
        pytest.param(Regression(), (4, 2), (4,), r"forward return \[4\]", id="values"),
        pytest.param(Regression(), (4,), (4, 3), r"forward return \[4, 3\]", id="one-value"),
        pytest.param(MultiLabel(), (4, 2), (4, 3), r"return \[4, 3\]", id="several"),
        pytest.param(
            Segmentation(3), (4, 2, 6, 6), (4, 6, 6), r"\[4, 3, 6, 6\].*=3: ", id="pixels"
        ),
        pytest.param(Segmentation(3), (4, 3), (4,), "takes masks", id="no-masks"),
        pytest.param(LanguageModel(4), (4, 7, 5), (4, 5), r"\[4, 4, 5\].*=4: ", id="tokens"),
    ],
)
def test_an_output_of_another_shape_is_refused(task, output, target, named):
    with pytest.raises(ModelError, match=named) as refused:
        task.check(torch.zeros(output), torch.zeros(target))
    if task.num_classes is None:
        assert "num_classes" not in str(refused.value)


class TwoOutputs(nn.Module):
    """A network of pixels with an auxiliary output in training, as torchvision's FCN."""

    def __init__(self, aux=True):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Conv2d(2, 6, 3, padding=1)
        self.out = nn.Conv2d(6, 3, 1)
        self.aux = nn.Conv2d(6, 3, 1) if aux else None
        self.double()

    def forward(self, x):
        hidden = self.body(x).tanh()
        if self.training and self.aux is not None:
            return {"out": self.out(hidden), "aux": self.aux(hidden)}
        return self.out(hidden)


def masks():
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(SAMPLES, 2, 4, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (SAMPLES, 4, 5), generator=generator)
    left_out = torch.rand(labels.shape, generator=generator) < 0.3
    labels[left_out] = 255
    labels[2] = 255  # a sample of which nothing counts
    return Samples(images, labels)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_an_auxiliary_output_has_a_weighted_loss(steps):
    def objective(model, x, y):
        outputs = model(x)
        main = F.cross_entropy(outputs["out"], y, ignore_index=255)
        auxiliary = F.cross_entropy(outputs["aux"], y, ignore_index=255)
        return main + 0.4 * auxiliary

    data = masks()
    task = Segmentation(3, aux_weight=0.4)
    trainer = toys.trainer_of(task, data, steps, model=TwoOutputs(), val=loader(data))
    trainer.fit()

    expected = toys.by_hand(objective, data, TwoOutputs())

    assert_equal(trainer.model, expected)
    assert "loss_aux" not in task.metric_names()


@pytest.mark.parametrize(
    ("weight", "aux", "message"),
    [
        (None, True, r"task\.aux_weight: is null, but the network returns an auxiliary output"),
        (0.4, False, r"task\.aux_weight: is 0\.4, but the network returns no auxiliary output"),
    ],
)
def test_an_auxiliary_output_without_a_weight_or_the_reverse_is_refused(weight, aux, message):
    data = masks()
    task = Segmentation(3, aux_weight=weight)
    with pytest.raises(ModelError, match=message):
        task.training_step(TwoOutputs(aux), (data.x, data.y))


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(ModelError, match=r"task\.aux_weight: expected a number > 0"):
        Segmentation(3, aux_weight=weight)
