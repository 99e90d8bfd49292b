"""The variational autoencoder as a plain loop: `python -m examples.vae.by_hand [SEED]`."""

import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from examples.vae.model import VAE
from regimen.data.sources import Digits

LATENT_DIM = 8


def loss_of(model: nn.Module, images: Tensor, noise: Tensor) -> Tensor:
    """Return minus the evidence lower bound, the mean over the images."""
    logits, mean, log_variance = model(noise, images)
    reconstruction = binary_cross_entropy_with_logits(logits, images, reduction="sum")
    divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum()
    loss: Tensor = (reconstruction + divergence) / len(images)
    return loss


def train(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Take a step of Adam for each batch `(images, noise)`."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for images, noise in batches:
        loss = loss_of(model, images, noise)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def batches_of(images: Tensor, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffle in each epoch, and draw new noise."""
    loader = DataLoader(TensorDataset(images), batch_size=64, shuffle=True)
    for _ in range(epochs):
        for (batch,) in loader:
            yield batch, torch.randn(len(batch), LATENT_DIM)


def main() -> None:
    """Train, and print the bound of the test images."""
    torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    model = VAE(latent_dim=LATENT_DIM)
    train(model, batches_of(Digits("train", 8).inputs / 255, epochs=60))
    model.eval()
    images = Digits("test", 8).inputs / 255
    with torch.no_grad():
        loss = loss_of(model, images, torch.randn(len(images), LATENT_DIM))
    print(f"test/elbo {-loss.item():.2f}")


if __name__ == "__main__":
    main()
