"""One update is the exact mean over its samples, whatever it was split into (I3)."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toys import (
    BATCH,
    CLASSES,
    assert_equal,
    by_hand,
    of_output,
    points,
    trainer_of,
)
from trainer.errors import SampleError
from trainer.tasks.classification import Classification
from trainer.tasks.losses import Term


def check(task: Classification, steps: int, loss) -> None:
    trainer = trainer_of(task, points(), steps)
    trainer.fit()
    assert_equal(trainer.model, by_hand(of_output(loss), points()))


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
    check(Classification(CLASSES, loss), steps, loss)


@pytest.mark.parametrize("steps", [1, 3])
def test_values_for_each_sample_are_averaged(steps: int) -> None:
    task = Classification(CLASSES, nn.CrossEntropyLoss(reduction="none"))
    check(task, steps, nn.CrossEntropyLoss())


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
