"""Distillation as a plain loop: `python -m examples.distillation.by_hand [SEED]`."""

import copy
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import DataLoader, TensorDataset

from regimen.data.sources import Digits
from regimen.models.mlp import MLP

TEMPERATURE = 4.0
SHARE = 0.9
Batch = tuple[Tensor, Tensor]


def loss_of(logits: Tensor, labels: Tensor, wanted: Tensor | None) -> Tensor:
    """Return the loss of a batch; `wanted`: logits of a teacher."""
    loss = cross_entropy(logits, labels)
    if wanted is None:
        return loss
    divergence = kl_div(
        (logits / TEMPERATURE).log_softmax(1),
        (wanted / TEMPERATURE).softmax(1),
        reduction="batchmean",
    )
    return (1 - SHARE) * loss + SHARE * TEMPERATURE**2 * divergence


def train(model: nn.Module, batches: Iterable[Batch], teacher: nn.Module | None = None) -> None:
    """Take a step of Adam for each batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for images, labels in batches:
        wanted = None
        if teacher is not None:
            with torch.no_grad():
                wanted = teacher(images)
        loss = loss_of(model(images), labels, wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def images_of(split: str) -> Batch:
    """Return normalized images and labels."""
    digits = Digits(split, 8)  # type: ignore[arg-type]
    return (digits.inputs / 255 - 0.305) / 0.319, digits.targets


def batches_of(split: Batch, epochs: int) -> Iterator[Batch]:
    """Shuffle in each epoch."""
    loader = DataLoader(TensorDataset(*split), batch_size=64, shuffle=True)
    for _ in range(epochs):
        yield from loader


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that are classified correctly."""
    model.eval()
    hits = (model(images).argmax(1) == labels).sum()
    return float(hits / len(labels))


def main() -> None:
    """Train a teacher, and students without the digit 3: by labels alone, and by the teacher."""
    torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    images, labels = images_of("train")
    teacher = MLP(10, image_size=8, hidden=(512, 512))
    train(teacher, batches_of((images, labels), epochs=15))
    teacher.eval()

    without = (images[labels != 3], labels[labels != 3])
    alone = MLP(10, image_size=8, hidden=(64,))
    student = copy.deepcopy(alone)
    train(alone, batches_of(without, epochs=40))
    train(student, batches_of(without, epochs=40), teacher)

    test_set = images_of("test")
    print(f"teacher test/accuracy {accuracy(teacher, *test_set):.4f}")
    print(f"labels alone test/accuracy {accuracy(alone, *test_set):.4f}")
    print(f"student test/accuracy {accuracy(student, *test_set):.4f}")


if __name__ == "__main__":
    main()
