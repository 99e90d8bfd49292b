"""Metric learning by a plain loop: batch-hard triplets of scikit-learn's digits, and recall@1.

`python -m examples.metric_learning.by_hand [SEED]` prints the recall of the test images.
"""

import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus
from torch.utils.data import DataLoader, TensorDataset

from regimen.data.sources import Digits
from regimen.data.splits import Split
from regimen.models.mlp import MLP

EPOCHS = 20
SCALE = 10.0


def triplet_loss(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the anchors, which are looked at one by one."""
    losses = []
    for anchor in range(len(labels)):
        distances = torch.cdist(embeddings[anchor : anchor + 1], embeddings)[0]
        same = labels == labels[anchor]
        positives = same.clone()
        positives[anchor] = False
        if positives.any() and not same.all():
            hardest = distances[positives].max() - distances[~same].min()
            losses.append(softplus(hardest))
    return torch.stack(losses).sum() / len(labels)


def train_by_hand(
    model: nn.Module, epochs: Iterable[Iterable[tuple[Tensor, Tensor]]], lr: float = 1e-3
) -> None:
    """Apply an update of Adam for each batch of each epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for batches in epochs:
        for images, labels in batches:
            optimizer.zero_grad()
            triplet_loss(SCALE * normalize(model(images)), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@torch.no_grad()
def recall_at_1(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of the images whose nearest neighbour is of their class."""
    embeddings = normalize(model(images))
    distances = torch.cdist(embeddings, embeddings).fill_diagonal_(torch.inf)
    return float((labels[distances.argmin(1)] == labels).float().mean())


def tensors(split: Split) -> tuple[Tensor, Tensor]:
    """Return images as numbers of mean 0 and variance 1, and their labels."""
    digits = Digits(split)
    return (digits.inputs.float() / 255 - 0.305) / 0.319, digits.targets


def main(seed: int) -> float:
    """Train and return the recall of the test images."""
    torch.manual_seed(seed)
    model = MLP(32, hidden=[256, 128])
    train = TensorDataset(*tensors("train"))
    train_by_hand(model, [DataLoader(train, batch_size=64, shuffle=True)] * EPOCHS)
    return recall_at_1(model, *tensors("test"))


if __name__ == "__main__":
    print(f"test recall@1 {main(int(sys.argv[1]) if sys.argv[1:] else 0):.4f}")
