"""Denoising diffusion as a plain loop: `python -m examples.ddpm.by_hand [SEED]`."""

import copy
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.image.fid import FrechetInceptionDistance

from examples.ddpm.model import Denoiser
from examples.ddpm.samples import Pixels
from regimen.data.sources import Digits

STEPS = 200
BETAS = torch.linspace(1e-4, 0.02, STEPS, dtype=torch.float64) * (1000 / STEPS)
KEPT = (1 - BETAS).cumprod(0)
DECAY = 0.995
Batch = tuple[Tensor, Tensor, Tensor]


def train(model: nn.Module, batches: Iterable[Batch]) -> nn.Module:
    """Take a step of Adam for each batch, and return the average of the weights."""
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for images, step, noise in batches:
        kept = KEPT.to(images)[step].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * images + (1 - kept).sqrt() * noise
        loss = mse_loss(model(noisy, step), noise)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 1 - DECAY)
    return average


@torch.no_grad()
def sample(model: nn.Module, count: int, side: int, generator: torch.Generator) -> Tensor:
    """Return images (count, 1, side, side) from noise."""
    images = torch.randn(count, 1, side, side, generator=generator)
    model.eval()
    for step in reversed(range(STEPS)):
        beta = BETAS[step].item()
        told = model(images, torch.full((count,), step))
        images = (images - beta / (1 - KEPT[step].item()) ** 0.5 * told) / (1 - beta) ** 0.5
        if step > 0:
            images += beta**0.5 * torch.randn(images.shape, generator=generator)
    return images.clamp(-1, 1)


def batches_of(images: Tensor, epochs: int) -> Iterator[Batch]:
    """Shuffle in each epoch, and draw a step and noise for each image."""
    loader = DataLoader(TensorDataset(images), batch_size=128, shuffle=True)
    for _ in range(epochs):
        for (batch,) in loader:
            yield batch, torch.randint(STEPS, (len(batch),)), torch.randn_like(batch)


def main() -> None:
    """Train, and print how far samples of the average are from the validation's images."""
    torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    model = Denoiser()
    average = train(model, batches_of(Digits("train", 8).inputs / 127.5 - 1, epochs=200))
    fid = FrechetInceptionDistance(Pixels(8))
    fid.update(Digits("val", 8).inputs / 127.5 - 1, real=True)
    fid.update(sample(average, 256, 8, torch.Generator().manual_seed(0)), real=False)
    print(f"samples/fid {fid.compute().item():.3f}")


if __name__ == "__main__":
    main()
