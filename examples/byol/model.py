"""The online network, its average that is the target, and a linear probe of what was learnt."""

import copy
from typing import Self

import torch
from torch import Tensor, nn

from regimen.models.pretrained import fine_tune


def encoder(width: int = 16) -> nn.Sequential:
    """Return a network from images [n, 1, size, size] to features [n, 4 * width]."""
    layers: list[nn.Module] = []
    channels = 1
    for outputs in (width, 2 * width, 4 * width):
        layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        channels = outputs
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten())


def head(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Return a perceptron, which projects features or predicts projections."""
    return nn.Sequential(
        nn.Linear(inputs, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


class Byol(nn.Module):
    """The online network: encoder, projector and predictor; and the target, which follows it."""

    def __init__(self, width: int = 16, hidden: int = 256, projection: int = 64) -> None:
        super().__init__()
        self.encoder = encoder(width)
        self.projector = head(4 * width, hidden, projection)
        self.predictor = head(projection, hidden, projection)
        self.target = nn.ModuleList([copy.deepcopy(self.encoder), copy.deepcopy(self.projector)])
        self.target.requires_grad_(False)

    def forward(self, online_view: Tensor, target_view: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the online network predicts and the target's projection, both [n, width]."""
        predicted = self.predictor(self.projector(self.encoder(online_view)))
        target_encoder, target_projector = self.target
        with torch.no_grad():
            return predicted, target_projector(target_encoder(target_view))

    @torch.no_grad()
    def move_target(self, decay: float) -> None:
        """Set the target to `decay * target + (1 - decay) * online`."""
        online = [*self.encoder.parameters(), *self.projector.parameters()]
        for target, parameter in zip(self.target.parameters(), online, strict=True):
            target.lerp_(parameter, 1 - decay)


class Probe(nn.Module):
    """A linear layer on the features of a trained encoder, which stays as it is."""

    def __init__(self, num_classes: int, weights: str | None = None, width: int = 16) -> None:
        """`weights`: the run directory of a Byol; None: the encoder's random weights."""
        super().__init__()
        self.encoder = encoder(width)
        if weights is not None:
            fine_tune(self.encoder, weights, prefix="encoder.")
        self.encoder.requires_grad_(False)
        self.head = nn.Linear(4 * width, num_classes)

    def train(self, mode: bool = True) -> Self:
        """Leave the encoder in evaluation mode: BatchNorm keeps its statistics."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [n, classes] of images [n, 1, size, size]."""
        logits: Tensor = self.head(self.encoder(images))
        return logits
