"""MAML on sine waves by a loop as the paper's: the inner step by `create_graph=True`.

`python -m examples.maml.by_hand [SEED]` prints the squared error on new waves after one step.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from examples.maml.data import Sines

INNER_LR = 0.01
EPOCHS = 10


def network() -> nn.Sequential:
    """Return the paper's network."""
    return nn.Sequential(
        nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)
    )


def answer(weights: list[Tensor], x: Tensor) -> Tensor:
    """Return what the network with these weights and biases answers."""
    for number in range(0, 4, 2):
        x = torch.relu(x @ weights[number].T + weights[number + 1])
    return x @ weights[4].T + weights[5]


def adapted_loss(weights: list[Tensor], task: Any) -> Tensor:
    """Return the error at the query points of one wave after a step on its support points."""
    (support_x, support_y, query_x), query_y = task
    support_loss = mse_loss(answer(weights, support_x), support_y)
    gradients = torch.autograd.grad(support_loss, weights, create_graph=True)
    stepped = [w - INNER_LR * g for w, g in zip(weights, gradients, strict=True)]
    return mse_loss(answer(stepped, query_x).squeeze(1), query_y)


def mean_loss(weights: list[Tensor], batch: Any) -> Tensor:
    """Return the mean over the waves of a batch."""
    (support_x, support_y, query_x), query_y = batch
    tasks = zip(zip(support_x, support_y, query_x, strict=True), query_y, strict=True)
    return torch.stack([adapted_loss(weights, task) for task in tasks]).mean()


def train_by_hand(model: nn.Module, epochs: Iterable[Iterable[Any]], lr: float = 1e-3) -> None:
    """Apply an update of Adam for each batch of each epoch."""
    weights: list[Tensor] = list(model.parameters())
    optimizer = torch.optim.Adam(weights, lr=lr)
    for batches in epochs:
        for batch in batches:
            optimizer.zero_grad()
            mean_loss(weights, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def main(seed: int) -> float:
    """Train and return the mean squared error over the test waves."""
    torch.manual_seed(seed)
    model = network()
    loader = DataLoader(Sines("train", 10_000), batch_size=25, shuffle=True)  # type: ignore[arg-type, var-annotated]
    train_by_hand(model, [loader] * EPOCHS)
    test = next(iter(DataLoader(Sines("test", 1_000), batch_size=1_000)))  # type: ignore[arg-type]
    return float(mean_loss(list(model.parameters()), test).detach())


if __name__ == "__main__":
    print(f"test loss {main(int(sys.argv[1]) if sys.argv[1:] else 0):.3f}")
