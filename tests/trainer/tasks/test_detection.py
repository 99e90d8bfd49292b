"""Detection: an update however it is split, and mAP that is the same in any order of processes."""

import math

import pytest
import torch
from torch import nn

import toys
from regimen.data.formats.detection_folder import collate_boxes
from regimen.data.loading.loader import Loader
from regimen.models.retinanet import retinanet
from regimen.trainer.errors import ModelError, SampleError
from regimen.trainer.task import StepOutput
from regimen.trainer.tasks import detection
from regimen.trainer.tasks.detection import AveragePrecision, Detection

RETINANET = {"mean": [0.5] * 3, "std": [0.25] * 3, "channels": 16}


@pytest.fixture
def packages():
    pytest.importorskip("torchmetrics")
    pytest.importorskip("faster_coco_eval")


def made(count, size=64):
    """Return images of size x size with 0 to 3 boxes each, in float64."""
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(count, 3, size, size, generator=generator, dtype=torch.float64)
    targets = []
    for index in range(count):
        boxes = index % 4
        corners = torch.randint(0, size - 20, (boxes, 2), generator=generator)
        sides = torch.randint(8, 20, (boxes, 2), generator=generator)
        labels = torch.randint(0, 3, (boxes,), generator=generator)
        target = {
            "boxes": torch.cat([corners, corners + sides], 1).double(),
            "labels": labels,
            "image_id": torch.tensor(index),
        }
        targets.append(target)
    return images, targets


def gradients(model, task, images, targets, parts):
    """Return the gradients of an update that is split, each part weighted by its samples."""
    model.zero_grad()
    rows = torch.arange(len(images)).split(len(images) // parts)
    for part in rows:
        batch = images[part], [targets[index] for index in part]
        losses = task.training_step(model, batch).loss
        loss = sum(losses.values()) * len(part) / len(images)
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_an_update_is_a_function_of_its_samples(packages):
    torch.manual_seed(0)
    model = retinanet(3, 64, **RETINANET).double().train()
    images, targets = made(8)

    whole = gradients(model, Detection(3), images, targets, parts=1)
    halves = gradients(model, Detection(3), images, targets, parts=2)

    largest = max(float(gradient.abs().max()) for gradient in whole)

    assert largest > 0

    tolerance = 1e-12 * max(largest, 1.0)
    torch.testing.assert_close(whole, halves, rtol=0, atol=tolerance)


def test_the_answer_for_an_image_does_not_depend_on_its_batch(packages):
    torch.manual_seed(0)
    model = retinanet(3, 64, score_thresh=0.0, **RETINANET).double().eval()
    images, _ = made(4)
    together = model(images)

    for image, expected in zip(images, together, strict=True):
        (alone,) = model(image[None])
        torch.testing.assert_close(alone, expected, rtol=1e-9, atol=1e-9)


def answers(targets, ties=False):
    """Return boxes near the true ones, some of them wrong; with `ties` all of one score."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for target in targets:
        boxes = target["boxes"].repeat(2, 1)
        noise = torch.randn(boxes.shape, generator=generator)
        labels = target["labels"].repeat(2)
        labels[::3] = (labels[::3] + 1) % 3  # each third is wrong
        scores = torch.rand(len(boxes), generator=generator, dtype=torch.float64)
        if ties:
            scores = torch.full_like(scores, 0.5)
        found.append({"boxes": boxes + noise.double(), "scores": scores, "labels": labels})
    return found


@pytest.mark.parametrize("ties", [False, True])
def test_map_is_the_same_in_one_process_and_in_two(packages, ties):
    _, targets = made(40)
    found = answers(targets, ties)
    whole = AveragePrecision(3, per_class=True)
    whole.update(found, targets)
    expected = whole.compute()

    assert 0.05 < expected["50_95"] < expected["50"] < 1

    first = AveragePrecision(3, per_class=True)
    second = AveragePrecision(3, per_class=True)
    for start in range(0, 40, 8):  # four images each, in turns
        first.update(found[start : start + 4], targets[start : start + 4])
        second.update(found[start + 4 : start + 8], targets[start + 4 : start + 8])
    first.merge_state([second])

    assert first.compute() == expected

    for metric in (first, second):
        metric.reset()
        metric.update(found[:4], targets[:4])
    assert first.compute() == second.compute()


def test_map_is_that_of_torchmetrics(packages):
    from torchmetrics.detection import MeanAveragePrecision

    _, targets = made(40)
    found = answers(targets)
    theirs = MeanAveragePrecision(backend="faster_coco_eval", class_metrics=True)
    theirs.update(found, targets)
    expected = theirs.compute()
    ours = AveragePrecision(3, per_class=True)
    ours.name_classes(["a/b", "c", "d"])
    ours.update(found, targets)
    values = ours.compute()

    assert values["50_95"] == expected["map"].item()
    assert values["50"] == expected["map_50"].item()
    assert [values[name] for name in ("a_b", "c", "d")] == expected["map_per_class"].tolist()


def test_crowds_are_ignored_and_a_class_without_boxes_has_no_value(packages):
    boxes = torch.tensor([[10.0, 10, 30, 30], [40, 40, 60, 60]])
    within_the_crowd = torch.tensor([[45.0, 45, 55, 55]])
    target = {
        "boxes": boxes,
        "labels": torch.tensor([0, 0]),
        "iscrowd": torch.tensor([0, 1]),
    }
    answer = {
        "boxes": torch.cat([boxes, within_the_crowd]),
        "scores": torch.tensor([0.5, 0.9, 0.8]),
        "labels": torch.tensor([0, 0, 0]),
    }
    metric = AveragePrecision(2, per_class=True)
    metric.update([answer], [target])
    values = metric.compute()

    assert values["50_95"] == pytest.approx(1.0)
    assert values["0"] == pytest.approx(1.0)
    assert math.isnan(values["1"])


@pytest.mark.parametrize(
    ("label", "score", "said"),
    [
        pytest.param(3, 0.5, "answers with class 3, but there are 3", id="the background counted"),
        pytest.param(-1, 0.5, "answers with class -1", id="below 0"),
        pytest.param(0, math.nan, "a score of NaN", id="no score"),
    ],
)
def test_answers_that_are_none_are_refused(packages, label, score, said):
    box = torch.tensor([[0.0, 0.0, 4.0, 4.0]])
    answer = {"boxes": box, "labels": torch.tensor([label]), "scores": torch.tensor([score])}
    precision = AveragePrecision(3)
    precision.update([answer], [{"boxes": box, "labels": torch.tensor([0])}])

    with pytest.raises(ModelError, match=said):
        precision.compute()


def test_the_names_of_the_metrics_are_those_that_an_evaluation_gives(packages):
    _, targets = made(8)

    class Known(nn.Module):
        def forward(self, images):
            return answers(targets)

    task = Detection(3, per_class=True)
    task.precision.name_classes(["cat", "dog", "cow"])
    output = task.evaluation_step(Known(), (None, targets))
    names = {f"map_{key}" for key in task.precision.compute()}

    assert isinstance(output, StepOutput)
    assert set(task.metric_names()) == names
    assert task.modes().keys() == names
    assert task.monitor() in names


def test_what_is_no_detector_or_no_batch_of_boxes_is_named(packages):
    images, targets = made(2)
    task = Detection(3)
    with pytest.raises(SampleError, match="collate_boxes"):
        task.training_step(nn.Identity(), images)

    class Classifier(nn.Module):
        def forward(self, images, targets):
            return images.mean((1, 2, 3))

    with pytest.raises(ModelError, match="takes a dict of losses"):
        task.training_step(Classifier(), (images, targets))


def test_a_package_that_is_missing_is_named(monkeypatch):
    def without_coco(name):
        return None if "coco" in name else object()

    monkeypatch.setattr(detection, "find_spec", without_coco)
    with pytest.raises(ModelError, match=r"faster_coco_eval.*torch-regimen\[detection\]"):
        Detection(3)


@pytest.mark.parametrize(
    "wrong", [{"stages": [5]}, {"stages": []}, {"anchor_sizes": [[8], [16]]}], ids=str
)
def test_stages_and_anchors_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match="stages"):
        retinanet(3, 64, **RETINANET, **wrong)


class Seeing(nn.Module):
    """Answers one box, whose score is the first pixel."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, images, targets=None):
        answers = []
        for image in images:
            first_pixel = image[0, 0, :1]
            answer = {
                "boxes": torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
                "scores": first_pixel * self.factor,
                "labels": torch.tensor([0]),
            }
            answers.append(answer)
        return answers


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_loader_is_predicted_with_targets_of_any_shape(batch_size):
    images, targets = made(5)
    samples = list(zip(images, targets, strict=True))
    order = toys.loader(samples, batch=batch_size, shuffled=False).sampler
    loader = Loader(samples, order, seed=1, collate_fn=collate_boxes)
    trainer = toys.trainer_of(Detection(3), [0], model=Seeing())
    found = trainer.predict(loader)
    scores = torch.cat([answer["scores"] for answer in found])

    torch.testing.assert_close(scores, images[:, 0, 0, 0])
