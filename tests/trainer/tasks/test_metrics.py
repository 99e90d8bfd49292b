"""Metrics: sums on the device, exact for any split and any number of processes (I4)."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import toys
from regimen.trainer.errors import ModelError
from regimen.trainer.evaluation import check_metrics
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.tasks import metrics as ours
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.language_model import LanguageModel
from regimen.trainer.tasks.segmentation import Segmentation
from toys import in_group, loader, points

CLASSES = 4
LOGITS = points(29, CLASSES, CLASSES, torch.float32)  # points whose inputs are the logits


class Identity(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


def evaluated(metrics, batch=8, strategy=None):
    strategy = strategy or Strategy("cpu")
    task = Classification(CLASSES, metrics=metrics)
    trainer = toys.trainer_of(task, [], model=Identity(), strategy=strategy)
    return trainer.evaluate(loader(LOGITS, 1, batch, False, strategy), "val")


def every_metric():
    return {
        "balanced": ours.ConfusionMatrix(CLASSES),
        "miou": ours.MeanIoU(CLASSES),
        "macro_f1": ours.MacroF1(CLASSES),
        "class": ours.PerClassAccuracy(CLASSES, ["a", "b", "c", "d"]),
        "perplexity": ours.Perplexity(),
    }


def scores_of_scikit_learn(truth, said):
    """Return what scikit-learn says of labels and predictions, by our names of metrics."""
    from sklearn import metrics

    return {
        "macro_f1": metrics.f1_score(truth, said, average="macro"),
        "miou": metrics.jaccard_score(truth, said, average="macro"),
    }


def chosen(names, found):
    return {name: found[name] for name in names}


def test_scikit_learn_agrees():
    from sklearn.metrics import balanced_accuracy_score, log_loss, recall_score

    found = evaluated(every_metric())
    truth = LOGITS.y.numpy()
    said = LOGITS.x.argmax(1).numpy()
    probabilities = LOGITS.x.double().softmax(1)
    expected = scores_of_scikit_learn(truth, said)
    expected["balanced"] = balanced_accuracy_score(truth, said)
    expected["perplexity"] = math.exp(log_loss(truth, probabilities))
    for label, recall in zip("abcd", recall_score(truth, said, average=None), strict=True):
        expected[f"class_{label}"] = recall

    expected = {f"val/{name}": value for name, value in expected.items()}

    assert chosen(expected, found) == pytest.approx(expected)


def leaves_out(ignored):
    return nn.CrossEntropyLoss(ignore_index=ignored)


# kind: the task, which ignores class 1, and the shape of its targets.
IGNORING = {
    "classification": (lambda m: Classification(CLASSES, leaves_out(1), metrics=m), (40,)),
    "of the task": (lambda m: Segmentation(CLASSES, ignore_index=1, metrics=m), (2, 4, 5)),
    "of the loss": (lambda m: Segmentation(CLASSES, leaves_out(1), metrics=m), (2, 4, 5)),
    "several": (lambda m: Segmentation(CLASSES, leaves_out(3), 1, metrics=m), (2, 4, 5)),
    "text": (lambda m: LanguageModel(CLASSES, ignore_index=1, metrics=m), (2, 20)),
    "soft loss": (lambda m: Segmentation(CLASSES, nn.MultiMarginLoss(), 1, metrics=m), (2, 4, 5)),
}


class Scored(NamedTuple):
    """A task's scores of random answers, and those of its samples that count."""

    accuracy: float
    metrics: dict[str, Any]
    truth: np.ndarray
    said: np.ndarray
    probabilities: torch.Tensor  # [samples that count, classes]


@pytest.fixture
def scored(kind):
    make, shape = IGNORING[kind]
    samples, *size = shape
    generator = torch.Generator().manual_seed(4)
    target = torch.randint(CLASSES, shape, generator=generator)
    logits = torch.randn(samples, CLASSES, *size, generator=generator)
    counted = target != 1
    if kind == "several":
        counted &= target != 3

    task = make(every_metric())
    task.update_metrics(logits, target)
    (hits, count), *_ = task.scores(logits, target).values()
    of_places = logits.movedim(1, -1)[counted]
    return Scored(
        accuracy=float(hits / count),
        metrics={name: metric.compute() for name, metric in task.metrics().items()},
        truth=target[counted].numpy(),
        said=of_places.argmax(1).numpy(),
        probabilities=of_places.double().softmax(1),
    )


@pytest.mark.parametrize("kind", IGNORING)
def test_a_class_that_is_ignored_is_left_out_of_every_score_as_scikit_learn_does(scored):
    from sklearn.metrics import accuracy_score, log_loss, recall_score

    truth = scored.truth
    said = scored.said
    classes = range(CLASSES)
    accuracy = accuracy_score(truth, said)
    recall = recall_score(truth, said, average=None, labels=classes, zero_division=math.nan)
    loss = log_loss(truth, scored.probabilities, labels=classes)
    expected = scores_of_scikit_learn(truth, said)

    of_classes = list(scored.metrics["class"].values())

    assert scored.accuracy == pytest.approx(accuracy)
    assert chosen(expected, scored.metrics) == pytest.approx(expected)
    assert of_classes == pytest.approx(recall.tolist(), nan_ok=True)
    assert scored.metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_a_class_that_does_not_occur_is_left_out_as_by_scikit_learn():
    from sklearn.metrics import balanced_accuracy_score

    truth = torch.tensor([1, 1, 3, 3, 3])
    said = torch.tensor([1, 3, 3, 3, 1])  # classes 0 and 2 neither occur nor are predicted
    logits = torch.eye(CLASSES)[said]
    metrics = every_metric()
    del metrics["perplexity"]
    for metric in metrics.values():
        metric.update(logits, truth)
    found = {name: metric.compute() for name, metric in metrics.items()}

    expected = scores_of_scikit_learn(truth, said)
    expected["balanced"] = balanced_accuracy_score(truth, said)

    assert chosen(expected, found) == pytest.approx(expected)

    without_samples = [name for name, value in found["class"].items() if math.isnan(value)]
    assert without_samples == ["a", "c"]


@pytest.mark.parametrize("batch", [1, 5, 29])
def test_batches_of_any_size_give_the_same_and_an_evaluation_begins_afresh(batch):
    metrics = every_metric()
    first = evaluated(metrics)
    assert evaluated(metrics) == first
    assert evaluated(metrics, batch) == pytest.approx(first, abs=1e-6)


def test_labels_of_no_class_are_left_out():
    matrix = ours.ConfusionMatrix(2)
    logits = torch.tensor([[2.0, 1], [2, 1], [1, 2], [1, 2]])
    labels = torch.tensor([0, 255, -100, 0])
    matrix.update(logits, labels)

    assert matrix.counts.tolist() == [[1, 1], [0, 0]]


def test_shares_count_as_their_largest():
    matrix = ours.ConfusionMatrix(2)
    matrix.update(torch.tensor([[2.0, 1.0]]), torch.tensor([[0.2, 0.8]]))
    assert matrix.counts.tolist() == [[0, 0], [1, 0]]


def test_absent_classes_do_not_count():
    metric = ours.MeanIoU(3)
    logits = torch.eye(3)[[0, 0, 1]]
    metric.update(logits, torch.tensor([0, 1, 1]))
    assert metric.compute() == pytest.approx(0.5)


@pytest.mark.parametrize("kind", [ours.R2, ours.MicroF1, ours.Perplexity])
def test_a_mean_without_samples_is_nan(kind):
    assert math.isnan(kind().compute())


def test_torchmetrics_agree_with_ours():
    classification = pytest.importorskip("torchmetrics.classification")
    theirs = classification.MulticlassF1Score(num_classes=CLASSES, average="macro")
    got = evaluated({"theirs": theirs, "ours": ours.MacroF1(CLASSES)})
    assert got["val/theirs"] == pytest.approx(got["val/ours"], abs=1e-6)


class Accuracy:
    """The share of right answers, as a metric of torchmetrics' kind that has no `merge`."""

    def __init__(self, value=float):
        self.value = value
        self.calls = list[str]()
        self.reset()

    def to(self, device):
        self.calls.append(f"to {device}")

    def reset(self):
        self.calls.append("reset")
        self.counts = torch.zeros(2)

    def update(self, output, target):
        hits = (output.argmax(1) == target).sum()
        self.counts += torch.stack([hits, torch.tensor(len(target))])

    def compute(self):
        self.calls.append("compute")
        return self.value(self.counts[0] / self.counts[1])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(float, {"": 1}, id="number"),
        pytest.param(lambda share: share, {"": 1}, id="scalar"),
        pytest.param(lambda share: share * torch.tensor([1, 2]), {"_0": 1, "_1": 2}, id="vector"),
        pytest.param(lambda share: {"a": share}, {"_a": 1}, id="collection"),
    ],
)
def test_metrics_of_others_are_taken_by_their_methods(value, expected):
    metric = Accuracy(value)
    metrics = evaluated({"mine": metric})
    assert metric.calls == ["reset", "to cpu", "reset", "compute"]

    wanted = {}
    for suffix, factor in expected.items():
        wanted[f"val/mine{suffix}"] = factor * metrics["val/accuracy"]
    found = {name: value for name, value in metrics.items() if "mine" in name}

    assert found == pytest.approx(wanted)


def test_metrics_of_several_values_say_their_names():
    metrics = {
        "class": ours.PerClassAccuracy(2),
        "f1": ours.MacroF1(2),
        "other": Accuracy(),
    }
    named = Classification(2, metrics=metrics).metric_names()
    assert named == ["loss", "accuracy", "class_0", "class_1", "f1", "other"]
    with pytest.raises(ModelError, match="classes has 2 names"):
        ours.PerClassAccuracy(3, ["a", "b"])


class Reduced(Accuracy):
    """Add its state up."""

    def merge(self, reduce):
        self.counts = reduce(self.counts)


class Gathered(Accuracy):
    """Take in others."""

    def merge_state(self, others):
        self.counts += sum(other.counts for other in others)


def test_every_metric_tells_of_all_processes_samples(ranks):
    def evaluate(strategy):
        metrics = every_metric() | {"reduced": Reduced(), "gathered": Gathered()}
        found = evaluated(metrics, 8, strategy)
        with pytest.raises(ModelError) as refused:
            evaluated({"mine": Accuracy()}, 8, strategy)
        return found, str(refused.value)

    in_one_process = every_metric() | {"reduced": Accuracy(), "gathered": Accuracy()}
    expected = evaluated(in_one_process)
    for found, refused in ranks(3, in_group(evaluate)):
        assert found == pytest.approx(expected)
        assert "task.metrics.mine" in refused
        assert "merge(reduce)" in refused


def test_a_metric_that_cannot_be_merged_is_refused_before_the_processes_start():
    planned = Strategy("cpu")
    planned.starts_processes = True
    planned.devices = 2
    with pytest.raises(ModelError, match=r"task\.metrics\.mine: Accuracy .* of 2"):
        check_metrics({"mine": Accuracy()}, planned)
