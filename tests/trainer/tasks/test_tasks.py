"""Every task against the same training written by hand, however its batches are split (I3, I4)."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import toys
from regimen.trainer.errors import ModelError, SampleError
from regimen.trainer.state import epoch_metric
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.language_model import LanguageModel
from regimen.trainer.tasks.multilabel import MultiLabel
from regimen.trainer.tasks.regression import Regression
from regimen.trainer.tasks.segmentation import Segmentation
from toys import SAMPLES, Samples, assert_equal, distance, loader, points


def values():
    data = points()
    noise = torch.randn(SAMPLES, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    return Samples(data.x, data.x[:, 0] * 2 + noise)


def several_labels():
    data = points()
    return Samples(data.x, (data.x[:, :3].flip(0) > 0.3).double())


def pixels():
    """Masks of 6 x 6 with between 0 and 35 pixels left out of the loss, another number in each."""
    data = points(SAMPLES * 36, 1)
    y = data.y.view(SAMPLES, 36)
    for i in range(SAMPLES):
        y[i, : (i * 5) % 36] = 255
    return Samples(data.x.view(SAMPLES, 1, 6, 6), y.view(SAMPLES, 6, 6))


def tokens():
    """Texts of 3 to 7 tokens, padded."""
    texts = points(SAMPLES * 8, classes=4).y.view(SAMPLES, 8)
    x, y = texts[:, :-1].clone(), texts[:, 1:].clone()
    for i in range(SAMPLES):
        y[i, 3 + i % 5 :] = -100
    return Samples(x, y)


class Reader(nn.Module):
    """Logits [n, length, tokens] from each token alone."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x)))


def segmenter():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))


# kind: data, network, task, and its loss written out for whole batches of outputs and targets.
CASES = {
    "values": (
        *(values, lambda: toys.network(1), Regression),
        lambda output, y: F.mse_loss(output.squeeze(1), y),
    ),
    "several": (several_labels, toys.network, MultiLabel, F.binary_cross_entropy_with_logits),
    "pixels": (
        *(pixels, segmenter, lambda: Segmentation(3)),
        partial(F.cross_entropy, ignore_index=255),
    ),
    "tokens": (
        *(tokens, Reader, lambda: LanguageModel(4)),
        lambda output, y: F.cross_entropy(output.flatten(0, 1), y.flatten()),
    ),
}
KINDS = list(CASES)


def network(kind):
    torch.manual_seed(3)
    return CASES[kind][1]().double()


def by_hand(kind):
    make, _, _, loss = CASES[kind]
    return toys.by_hand(toys.of_output(loss), make(), network(kind))


def trainer_of(kind, steps=1, lr=0.1):
    make, _, task, _ = CASES[kind]
    val = loader(make(), batch=5, shuffled=False)
    return toys.trainer_of(task(), make(), steps, model=network(kind), lr=lr, val=val)


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_as_by_hand(kind, steps):
    trainer = trainer_of(kind, steps)
    trainer.fit()
    assert_equal(trainer.model, by_hand(kind))


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_values_in_one_column_are_those_without_a_column(columns, wide):
    output = torch.randn(6, columns, generator=torch.Generator().manual_seed(1))
    target = torch.randn(6, columns, generator=torch.Generator().manual_seed(2))
    given = target if wide or columns > 1 else target.squeeze(1)
    task = Regression()
    result = task.evaluation_step(lambda x: output, (torch.zeros(6), given))
    assert result.terms[""] == F.mse_loss(output, target)
    total, count = result.sums["mae"]
    assert total / count == pytest.approx(F.l1_loss(output, target).item())
    assert count == 6 * columns
    assert task.metrics()["r2"].compute() == pytest.approx(r2(output, target), rel=1e-5)


def r2(output, target):
    spread = (target - target.mean()).square().sum()
    return float(1 - (output - target).square().sum() / spread)


@pytest.mark.parametrize("shape", [(6,), (2, 4, 5)])
@pytest.mark.parametrize("kind", [nn.BCEWithLogitsLoss, nn.MSELoss, nn.SmoothL1Loss])
def test_a_loss_of_values_takes_class_labels_as_one_hot_vectors(kind, shape):
    draws = torch.Generator().manual_seed(1)
    labels = torch.randint(4, shape, generator=draws)
    logits = torch.randn(shape[0], 4, *shape[1:], generator=draws)
    values = F.one_hot(labels, 4).movedim(-1, 1).float()
    task = Classification(4, kind()) if len(shape) == 1 else Segmentation(4, kind())
    inputs = torch.zeros(shape[0])
    result = task.evaluation_step(lambda x: logits, (inputs, labels))
    assert result.terms[""] == kind()(logits, values)
    if len(shape) == 1:
        mixed = task.training_step(lambda x: logits, (inputs, values))  # as MixUp makes them
        assert mixed.terms[""] == result.terms[""]
    labels[0] = 4
    with pytest.raises(SampleError, match=r"labels from . to 4"):
        task.evaluation_step(lambda x: logits, (inputs, labels))


@pytest.mark.parametrize("kind", ["pixels", "tokens"])
def test_a_mean_of_means_would_differ(kind):
    """The negative control: micro-batches weighted by samples give another training."""
    trainer = trainer_of(kind, steps=3)
    trainer.task.losses.counted = trainer.task.count_names = []
    trainer.fit()
    assert distance(trainer.model, by_hand(kind)) > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_the_metrics_named_are_those_that_come(kind):
    trainer = trainer_of(kind, lr=0.0)
    trainer.fit()
    named = {f"val/{name}" for name in trainer.task.metric_names()}
    assert f"val/{trainer.task.monitor()}" in named
    assert named == {name for name in trainer.metrics if name.startswith("val/")}
    sums = {f"train/{name}" for name in ["loss", "grad_norm", *trainer.task.score_names]}
    logged = {name for name in trainer.metrics if name.startswith("train/")}
    assert sums == {name for name in logged if not name.startswith("train/epoch_")}
    assert {epoch_metric(name) for name in sums} == logged - sums


def figures(kind):
    """Return the metrics of an untrained model, its outputs and the targets."""
    trainer = trainer_of(kind, lr=0.0)
    trainer.fit()
    data = CASES[kind][0]()
    with torch.no_grad():
        output = trainer.model(data.x)
    loss = pytest.approx(CASES[kind][3](output, data.y).item(), abs=1e-12)
    assert [trainer.metrics[f"{stage}/loss"] for stage in ("train", "val")] == [loss, loss]
    return trainer.metrics, output, data.y


def test_figures_are_those_of_their_definitions():
    metrics, output, y = figures("values")
    errors = output.squeeze(1) - y
    r2 = 1 - errors.square().sum() / (y - y.mean()).square().sum()
    expected = {"mae": errors.abs().mean(), "r2": r2}
    assert expected == pytest.approx({name: metrics[f"val/{name}"] for name in expected})

    metrics, output, y = figures("several")
    said = output > 0
    f1 = 2 * (said & (y == 1)).sum() / (said.sum() + y.sum())
    right = (said == y).double()
    expected = {"label_accuracy": right.mean(), "exact_match": right.prod(1).mean(), "f1": f1}
    assert expected == pytest.approx({name: metrics[f"val/{name}"] for name in expected})

    metrics, output, y = figures("pixels")
    said, valid = output.argmax(1), y != 255
    pairs = [((said == c) & valid, y == c) for c in range(3)]
    ious = [(ours & theirs).sum() / (ours | theirs).sum() for ours, theirs in pairs]
    right = ((said == y) & valid).sum() / valid.sum()
    expected = {"pixel_accuracy": right, "miou": torch.stack(ious).mean()}
    assert expected == pytest.approx({name: metrics[f"val/{name}"] for name in expected})

    metrics, output, y = figures("tokens")
    right = ((output.argmax(2) == y) & (y != -100)).sum() / (y != -100).sum()
    assert metrics["val/token_accuracy"] == pytest.approx(right.item())
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
    assert task.num_classes or "num_classes" not in str(refused.value)


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
    draws = torch.Generator().manual_seed(2)
    images = torch.randn(toys.SAMPLES, 2, 4, 5, generator=draws, dtype=torch.float64)
    labels = torch.randint(3, (toys.SAMPLES, 4, 5), generator=draws)
    labels[torch.rand(labels.shape, generator=draws) < 0.3] = 255  # so many pixels do not count
    labels[2] = 255
    return toys.Samples(images, labels)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_an_auxiliary_output_has_a_weighted_loss(steps):
    def objective(model, x, y):
        outputs = model(x)
        main = F.cross_entropy(outputs["out"], y, ignore_index=255)
        return main + 0.4 * F.cross_entropy(outputs["aux"], y, ignore_index=255)

    data = masks()
    task = Segmentation(3, aux_weight=0.4)
    trainer = toys.trainer_of(task, data, steps, model=TwoOutputs(), val=loader(data))
    trainer.fit()
    assert_equal(trainer.model, toys.by_hand(objective, data, TwoOutputs()))
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
