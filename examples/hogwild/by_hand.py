"""Hogwild as PyTorch's examples/mnist_hogwild does it, on scikit-learn's digits.

`python -m examples.hogwild.by_hand [SEED]` prints the share of the test images that it gets right.
"""

import sys

import torch
from torch import Tensor, multiprocessing, nn
from torch.nn.functional import cross_entropy

from regimen.data.sources import Digits

PROCESSES = 2
EPOCHS = 20
BATCH = 32
MEAN = 0.305
STD = 0.319


def main(seed: int) -> float:
    """Train in two processes and return the accuracy on the test images."""
    torch.manual_seed(seed)
    model = network()
    model.share_memory()
    inputs, labels = images("train")
    arguments = (model, inputs, labels, seed)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=train, args=(rank, *arguments)) for rank in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return accuracy(model, *images("test"))


def network() -> nn.Sequential:
    """Return the network of mnist_hogwild, for images of 28 x 28 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.Dropout2d(0.5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(50, 10),
    )


def images(split: str) -> tuple[Tensor, Tensor]:
    """Return normalized images (n, 1, 28, 28) and their labels (n)."""
    digits = Digits(split, 28)  # type: ignore[arg-type]
    inputs = (digits.inputs.float() / 255 - MEAN) / STD
    return inputs, digits.targets


def train(rank: int, model: nn.Module, inputs: Tensor, labels: Tensor, seed: int) -> None:
    """Train the shared model on every other part of each epoch's order; nobody waits."""
    torch.set_num_threads(1)
    torch.manual_seed(seed + rank)
    order = torch.Generator().manual_seed(seed)  # the same in each process
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    model.train()
    for _ in range(EPOCHS):
        rows = torch.randperm(len(inputs), generator=order)
        for part in torch.split(rows[rank::PROCESSES], BATCH):
            optimizer.zero_grad()
            cross_entropy(model(inputs[part]), labels[part]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return the share of the images whose class the model finds."""
    model.eval()
    return float((model(inputs).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    print(f"test accuracy {main(int(sys.argv[1]) if sys.argv[1:] else 0):.4f}")
