"""A model that computes its own loss trains as a task with the same loss trains it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from trainer.errors import ModelError
from trainer.options import TrainerOptions
from trainer.tasks.classification import Classification
from trainer.tasks.own_loss import OwnLoss
from trainer.trainer import Trainer


class Answering(nn.Module):
    """Return logits, or with labels the mean over those that are not -100, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, inputs: Any, labels: Any = None) -> Any:
        logits = self.body(inputs)
        return logits if labels is None else (functional.cross_entropy(logits, labels), logits)


def trained(task: Any, pieces: int) -> Trainer:
    torch.manual_seed(0)
    model = Answering().double()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, 8, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (6, 8), generator=generator)
    labels[:, 1:4] = -100  # uneven over the halves of a batch
    batches = list(zip(inputs, labels, strict=True))
    options = TrainerOptions(max_epochs=2, log_every_n_steps=1, gradient_accumulation_steps=pieces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, task, optimizer, batches, batches, callbacks={}, options=options)
    trainer.fit()
    return trainer


@pytest.mark.parametrize("pieces", [1, 2])
def test_it_trains_as_the_same_loss_of_a_task(pieces: int) -> None:
    by_task = trained(Classification(3), 1)
    by_model = trained(OwnLoss(Classification(3)), pieces)
    for one, other in zip(by_task.model.parameters(), by_model.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)
    assert by_task.metrics.keys() == by_model.metrics.keys()
    for name, value in by_task.metrics.items():
        assert by_model.metrics[name] == pytest.approx(value, rel=1e-12), name


def test_a_model_without_a_loss_of_its_own_is_named() -> None:
    class Plain(nn.Module):
        def forward(self, inputs: Any, labels: Any = None) -> Any:
            return inputs

    with pytest.raises(ModelError, match=r"Plain\.forward\(inputs, labels=\.\.\.\) returned"):
        OwnLoss(Classification(3)).training_step(Plain(), (torch.ones(2, 3), torch.tensor([0, 1])))
