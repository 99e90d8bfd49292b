"""Parameters that get no gradient in some updates, and what DDP is told of them."""

import pytest
import torch
from torch import Tensor, nn

from callbacks.unfreeze import Unfreeze
from data.loading.loader import Loader
from data.orders import Shuffled
from data.updates import UpdateSampler
from trainer.options import TrainerOptions
from trainer.strategies.ddp import DDP
from trainer.strategies.replicas import Processes
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

SAMPLES = 16
STAGES = {"first": {"pattern": "0.*", "step": 3}}


class Points:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], index % 3


def trained(strategy: Strategy) -> list[Tensor]:
    torch.manual_seed(1)
    model = strategy.prepare(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    group = strategy.group
    sizes = {"rank": group.rank, "world_size": group.world_size}
    sampler = UpdateSampler(Shuffled(SAMPLES, seed=1), batch_size=4, **sizes)
    Trainer(
        model,
        Classification(3),
        torch.optim.SGD(model.parameters(), lr=0.1),
        Loader(Points(), sampler, seed=1),
        strategy=strategy,
        precision="fp64",
        callbacks={"unfreeze": Unfreeze(STAGES)},
        options=TrainerOptions(max_epochs=2),
    ).fit()
    return [p.detach().clone() for p in model.parameters()]


def in_two(ranks, written: bool | None):
    def train(rank: int) -> list[Tensor] | str:
        strategy = DDP(Processes("gloo", 30, "cpu"), find_unused_parameters=written)
        strategy.setup()
        try:
            return trained(strategy)
        except RuntimeError as error:
            return str(error)
        finally:
            strategy.group.leave()

    return ranks(2, train)


@pytest.mark.parametrize("written", [None, True])
def test_what_a_callback_freezes_is_looked_for(ranks, written: bool | None) -> None:
    alone = trained(Strategy("cpu"))
    for result in in_two(ranks, written):
        for got, wanted in zip(result, alone, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_what_is_written_holds(ranks) -> None:
    for error in in_two(ranks, False):
        assert "find_unused_parameters=True" in error  # torch's own words
