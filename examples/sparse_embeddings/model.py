"""The network: factors of users and items, their product, and a small perceptron on both."""

import torch
from torch import Tensor, nn


class Factors(nn.Module):
    """Map pairs (n, 2) of a user and an item to ratings (n,).

    The gradient of an embedding holds the rows that a batch reads and no others.

    mean: of the ratings, which the network starts from.
    """

    def __init__(
        self, users: int, items: int, mean: float, dim: int = 16, hidden: int = 32
    ) -> None:
        super().__init__()
        self.users = nn.Embedding(users, dim, sparse=True)
        self.items = nn.Embedding(items, dim, sparse=True)
        self.tower = nn.Sequential(nn.Linear(2 * dim, hidden), nn.ReLU())
        self.head = nn.Linear(dim + hidden, 1)
        self.register_buffer("mean", torch.tensor(mean))
        nn.init.normal_(self.users.weight, std=0.1)
        nn.init.normal_(self.items.weight, std=0.1)

    def forward(self, pairs: Tensor) -> Tensor:
        """Return the ratings."""
        user = self.users(pairs[:, 0])
        item = self.items(pairs[:, 1])
        hidden = self.tower(torch.cat([user, item], 1))
        deviation = self.head(torch.cat([user * item, hidden], 1))
        return self.mean + deviation.squeeze(1)  # type: ignore[no-any-return]
