"""Ratings by a loop of its own: SparseAdam for the embeddings, Adam for the rest.

`python -m examples.sparse_embeddings.by_hand SEED` trains on the same ratings and prints the mean
squared and the mean absolute error of the test ratings.
"""

import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from examples.sparse_embeddings.data import Ratings
from examples.sparse_embeddings.model import Factors

USERS = 4000
ITEMS = 1000


def shuffled(data: Ratings, epochs: int, batch_size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of some epochs."""
    assert data.targets is not None
    for _ in range(epochs):
        for rows in torch.randperm(len(data)).split(batch_size):  # type: ignore[no-untyped-call]
            yield data.inputs[rows], data.targets[rows]


def train_by_hand(
    model: Factors, batches: Iterable[tuple[Tensor, Tensor]], lr: float = 3e-3
) -> None:
    """Train on batches of pairs and ratings."""
    embeddings = [model.users.weight, model.items.weight]
    rest = [*model.tower.parameters(), *model.head.parameters()]
    optimizers = [torch.optim.SparseAdam(embeddings, lr=lr), torch.optim.Adam(rest, lr=lr)]
    for pairs, ratings in batches:
        loss = mse_loss(model(pairs), ratings)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()


def main() -> None:
    """Train and print the errors."""
    torch.manual_seed(int(sys.argv[1]))
    train = Ratings("train", USERS, ITEMS)
    test = Ratings("test", USERS, ITEMS)
    assert test.targets is not None
    model = Factors(USERS, ITEMS, train.mean)
    train_by_hand(model, shuffled(train, epochs=4))
    with torch.no_grad():
        errors = model(test.inputs) - test.targets
    print(f"test/loss {errors.square().mean():.4f} test/mae {errors.abs().mean():.4f}")


if __name__ == "__main__":
    main()
