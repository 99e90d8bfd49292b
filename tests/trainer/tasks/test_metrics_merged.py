"""A metric of the user's own tells of all processes' samples, or is refused (I4)."""

import pytest
import torch
from torch import Tensor, nn

from data.loading.loader import Loader
from data.orders import Sequential
from data.updates import UpdateSampler
from trainer.errors import ModelError
from trainer.evaluation import check_metrics
from trainer.strategies.ddp import DDP
from trainer.strategies.replicas import Processes
from trainer.strategies.strategy import Planned, Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

SAMPLES, CLASSES = 11, 3


class Accuracy:
    """The share of right answers, with a state of its own."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.counts = torch.zeros(2)

    def update(self, output: Tensor, target: Tensor) -> None:
        hits = (output.argmax(1) == target).sum()
        self.counts += torch.stack([hits, torch.tensor(len(target))])

    def compute(self) -> float:
        return float(self.counts[0] / self.counts[1])


class Reduced(Accuracy):
    """Add its state up."""

    def merge(self, reduce) -> None:
        self.counts = reduce(self.counts)


class Gathered(Accuracy):
    """Take in others."""

    def merge_state(self, others) -> None:
        for other in others:
            self.counts += other.counts


class Points:
    """Random points with labels."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, 5, generator=generator)
        self.y = torch.randint(CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def evaluated(strategy: Strategy, **metrics) -> dict[str, float]:
    torch.manual_seed(3)
    model = strategy.prepare(nn.Linear(5, CLASSES))
    world = {"rank": strategy.group.rank, "world_size": strategy.group.world_size}
    sampler = UpdateSampler(Sequential(SAMPLES), batch_size=4, **world)
    trainer = Trainer(
        model,
        Classification(CLASSES, metrics=metrics),
        torch.optim.SGD(model.parameters(), lr=0.1),
        [],
        strategy=strategy,
    )
    return trainer.evaluate(Loader(Points(), sampler, seed=0), "val")


def test_they_tell_of_all_samples(ranks) -> None:
    def evaluate(rank: int) -> tuple[dict[str, float], str]:
        strategy = DDP(Processes("gloo", 60, "cpu"))
        strategy.setup()
        metrics = evaluated(strategy, reduced=Reduced(), gathered=Gathered())
        with pytest.raises(ModelError) as refused:
            evaluated(strategy, mine=Accuracy())
        strategy.group.leave()
        return metrics, str(refused.value)

    alone = evaluated(Strategy("cpu"), mine=Accuracy())
    for metrics, refused in ranks(3, evaluate):
        assert metrics["val/accuracy"] == pytest.approx(alone["val/accuracy"])
        assert metrics["val/reduced"] == pytest.approx(alone["val/mine"])
        assert metrics["val/gathered"] == pytest.approx(alone["val/mine"])
        assert "task.metrics.mine" in refused
        assert "merge(reduce)" in refused


def test_the_plan_refuses_them_too() -> None:
    with pytest.raises(ModelError, match=r"task\.metrics\.mine: Accuracy .* of 2"):
        check_metrics({"mine": Accuracy()}, Planned("ddp", 2, "cpu"))
    check_metrics({"mine": Accuracy()}, Strategy("cpu"))
