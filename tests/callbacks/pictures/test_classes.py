"""Confusion matrices, PR curves and the misclassified, against counting by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from callbacks.pictures import picture as drawing
from callbacks.pictures.classes import ConfusionMatrix, PRCurves
from callbacks.pictures.samples import Misclassified
from toy_pictures import CLASSES, Gallery, images, trainer_of
from trainer.media import PRCurve
from trainer.task import Task
from trainer.tasks.classification import Classification
from trainer.tasks.multilabel import MultiLabel
from trainer.trainer import Trainer


def answers(trainer: Trainer, val: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return probabilities and labels, in plain PyTorch."""
    trainer.model.eval()
    with torch.no_grad():
        logits = torch.cat([trainer.model(x) for x, _ in val])
    return logits.softmax(1), torch.cat([y for _, y in val])


def test_the_confusion_matrix_counts_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[np.ndarray[Any, Any]] = []
    monkeypatch.setattr(
        "callbacks.pictures.classes.matrix",
        lambda values, names, text="": drawn.append(values) or np.zeros((1, 1, 3), np.uint8),
    )
    val = images(2, 1)
    val[0][1][0] = -100  # a sample without a label
    run = trainer_of({"g": Gallery(), "c": ConfusionMatrix()}, val=val)
    run.fit()
    probabilities, labels = answers(run, val)
    expected = np.zeros((CLASSES, CLASSES))
    for label, answer in zip(labels.tolist(), probabilities.argmax(1).tolist(), strict=True):
        if label >= 0:
            expected[label, answer] += 1
    assert np.array_equal(drawn[-2], expected)
    assert expected.sum() == 11
    assert np.allclose(drawn[-1].sum(1)[expected.sum(1) > 0], 1)


@pytest.mark.parametrize("kind", ["classes", "labels"])
def test_pr_curves_are_those_of_counting(kind: str) -> None:
    gallery, val, train = Gallery(), images(2, 1), images(3, 0)
    task: Task = Classification(CLASSES)
    if kind == "labels":
        task = MultiLabel()
        train, val = (
            [(x, torch.nn.functional.one_hot(y, CLASSES).float()) for x, y in part]
            for part in (train, val)
        )
    run = trainer_of({"g": gallery, "c": PRCurves(thresholds=5)}, task=task, train=train, val=val)
    run.fit()
    _, labels = answers(run, val)
    scores = task.interpret(torch.cat([run.model(x) for x, _ in val])).detach()
    positive = labels > 0.5 if kind == "labels" else labels[:, None] == torch.arange(CLASSES)
    for index in range(CLASSES):
        curve: PRCurve = gallery.shown[f"pr_curve/{index}"][-1][1]
        for place, threshold in enumerate([0.0, 0.25, 0.5, 0.75, 1.0]):
            said, truth = scores[:, index] >= threshold, positive[:, index]
            assert curve.true_positives[place] == (said & truth).sum()
            assert curve.false_positives[place] == (said & ~truth).sum()
            assert curve.true_negatives[place] == (~said & ~truth).sum()
            assert curve.false_negatives[place] == (~said & truth).sum()


def test_the_misclassified_are_the_most_surely_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    plain = drawing.pixels
    monkeypatch.setattr(
        "callbacks.pictures.samples.pixels", lambda images: seen.append(images) or plain(images)
    )
    val = images(3, 1)
    run = trainer_of({"g": Gallery(), "w": Misclassified(count=4)}, val=val, max_epochs=2)
    run.fit()
    probabilities, labels = answers(run, val)
    sure, predicted = probabilities.max(1)
    wrong = [i for i in sure.argsort(descending=True).tolist() if predicted[i] != labels[i]]
    assert len(wrong) > 4
    assert torch.equal(seen[-1], torch.cat([x for x, _ in val])[wrong[:4]])


@pytest.mark.parametrize("kind", [ConfusionMatrix, PRCurves, Misclassified])
def test_several_processes_are_shown_together(kind: Any) -> None:
    val = images(2, 1)

    def shown(batches: Any, of_other: Any = None) -> tuple[Any, Gallery]:
        gallery, own = Gallery(), []
        run = trainer_of({"g": gallery, "c": kind()}, val=batches, max_epochs=1)

        def gather(value: Any) -> list[Any]:
            own.append(value)
            return [value] if of_other is None else [value, of_other[len(own) - 1]]

        run.group.gather = gather  # type: ignore[method-assign, assignment]
        run.evaluate = lambda *args, **more: evaluated(run, args, more)  # type: ignore[method-assign]
        run.fit()
        return own, gallery

    def evaluated(run: Any, args: Any, more: Any) -> Any:
        gather, run.group.gather = run.group.gather, lambda value: [value]  # of the sums
        try:
            return Trainer.evaluate(run, *args, **more)
        finally:
            run.group.gather = gather

    second, _ = shown(val[1:])
    _, together = shown(val[:1], second)
    _, whole = shown(val)
    assert together.shown.keys() == whole.shown.keys()
    for name in whole.shown:
        (_, ours), (_, expected) = together.shown[name][0], whole.shown[name][0]
        assert all(map(np.array_equal, ours, expected))
