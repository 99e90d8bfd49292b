"""BYOL by a plain loop, then a linear probe of the encoder.

`python -m examples.byol.by_hand [SEED]` prints the accuracy of the probe on the test digits.
"""

import copy
import math
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from examples.byol.data import TwoViews
from examples.byol.model import encoder, head
from regimen.data.sources import Digits
from regimen.data.splits import Split

EPOCHS = 20
PROBE_EPOCHS = 20
LR = 1e-3
DECAY = 0.99

Views = tuple[Tensor, Tensor]


def train_by_hand(
    online: nn.Module, predictor: nn.Module, epochs: Iterable[Iterable[Views]], updates: int
) -> nn.Module:
    """Train encoder and projector (`online`) and the predictor; return the target.

    updates: of all epochs, over which the rate falls to 0 and the decay rises to 1.
    """
    target = copy.deepcopy(online).requires_grad_(False)
    parameters = [*online.parameters(), *predictor.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    step = 0
    for batches in epochs:
        for first, second in batches:
            loss = torch.zeros(())
            for view, other in ((first, second), (second, first)):
                predicted = normalize(predictor(online(view)))
                projected = normalize(target(other))
                loss = loss + (predicted - projected).square().sum(1).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            step += 1
            decay = 1 - (1 - DECAY) * (math.cos(math.pi * step / updates) + 1) / 2
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                    slow.copy_(decay * slow + (1 - decay) * fast)
    return target


@torch.no_grad()
def features(network: nn.Module, split: Split) -> TensorDataset:
    """Return the features and the labels of a split."""
    digits = Digits(split)
    images = (digits.inputs.float() / 255 - 0.305) / 0.319
    return TensorDataset(network.eval()(images), digits.targets)


def probe(network: nn.Module) -> float:
    """Train a linear layer on the features and return its accuracy on the test digits."""
    layer = nn.Linear(64, 10)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    train = DataLoader(features(network, "train"), batch_size=64, shuffle=True)
    for _ in range(PROBE_EPOCHS):
        for inputs, labels in train:
            optimizer.zero_grad()
            cross_entropy(layer(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    inputs, labels = features(network, "test").tensors
    return float((layer(inputs).argmax(1) == labels).float().mean())


def main(seed: int) -> float:
    """Train without labels, then the probe; return its accuracy."""
    torch.manual_seed(seed)
    network = encoder()
    online = nn.Sequential(network, head(64, 256, 64))
    loader = DataLoader(TwoViews("train"), batch_size=64, shuffle=True)  # type: ignore[arg-type, var-annotated]
    train_by_hand(online, head(64, 256, 64), [loader] * EPOCHS, EPOCHS * len(loader))
    return probe(network)


if __name__ == "__main__":
    print(f"test accuracy {main(int(sys.argv[1]) if sys.argv[1:] else 0):.4f}")
