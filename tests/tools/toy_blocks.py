"""A model of blocks and its samples, for tests of the strategies."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from data.loading.loader import Loader
from data.orders import Sequential, Shuffled
from data.updates import UpdateSampler
from trainer.distributed.processes import Group
from trainer.strategies.ddp import DDP, Processes, Replicas


class Block(nn.Module):
    """A unit for `wrap_modules`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return x + torch.tanh(self.linear(x))


def blocks() -> nn.Sequential:
    """Return the model: 9 features, 3 classes."""
    return nn.Sequential(Block(), Block(), nn.Linear(9, 3))


class Points:
    """23 random samples, each with its class."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(23, 9, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(3, (23,), generator=generator)

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def loaders(group: Group, accumulation: int = 2) -> tuple[Loader, Loader]:
    """Return a process's loaders: updates of 10 samples, the last of 3; 10 samples to validate."""
    rank, world_size = group.rank, group.world_size
    train = UpdateSampler(
        Shuffled(23, seed=1),
        batch_size=10,
        gradient_accumulation_steps=accumulation,
        rank=rank,
        world_size=world_size,
    )
    val = UpdateSampler(Sequential(10), batch_size=4 * world_size, rank=rank, world_size=world_size)
    return Loader(Points(), train, seed=0), Loader(Points(), val, seed=0)


def in_group(
    function: Callable[[Replicas], Any],
    kind: type[Replicas] = DDP,
    processes: Processes | None = None,
    **options: Any,
) -> Callable[[int], Any]:
    """Return what the fixture `ranks` runs: `function(strategy)` within a group over gloo."""

    def run(rank: int) -> Any:
        strategy = kind(processes or Processes("gloo", 30, "cpu"), **options)
        strategy.setup()
        result = function(strategy)
        strategy.group.leave()
        return result

    return run
