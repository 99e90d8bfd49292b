"""The Wasserstein GAN as a plain loop: `python -m examples.wgan_gp.by_hand [SEED]`."""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.image.fid import FrechetInceptionDistance

from examples.wgan_gp.model import CriticAndGenerator
from examples.wgan_gp.task import Pixels
from regimen.data.sources import Digits

LATENT_DIM = 16
Batch = tuple[Tensor, Tensor, Tensor]


def train(model: CriticAndGenerator, batches: Iterator[Batch], rounds: int) -> None:
    """Take five steps of the critic and one of the generator in each round."""
    critic, generator = model.critic, model.generator
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=5e-4, betas=(0.0, 0.9))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.0, 0.9))
    model.train()
    for _ in range(rounds):
        for _ in range(5):
            images, noise, share = next(batches)
            with torch.no_grad():
                fakes = generator(noise)
            loss = critic(fakes).mean() - critic(images).mean()
            loss = loss + 10 * gradient_penalty(critic, images, fakes, share)
            critic_optimizer.zero_grad()
            loss.backward()
            critic_optimizer.step()

        _, noise, _ = next(batches)
        loss = -critic(generator(noise)).mean()
        generator_optimizer.zero_grad()
        loss.backward()
        generator_optimizer.step()


def gradient_penalty(critic: nn.Module, images: Tensor, fakes: Tensor, share: Tensor) -> Tensor:
    """Return the mean squared difference from 1 of the gradient's norm between the images."""
    between = (share * images + (1 - share) * fakes).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty: Tensor = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
    return penalty


def batches_of(images: Tensor) -> Iterator[Batch]:
    """Shuffle in each epoch, for ever, and draw noise and shares."""
    loader = DataLoader(TensorDataset(images), batch_size=50, shuffle=True)
    while True:
        for (batch,) in loader:
            count = len(batch)
            yield batch, torch.randn(count, LATENT_DIM), torch.rand(count, 1, 1, 1)


def main() -> None:
    """Train, and print how far generated images are from those of the test."""
    torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    model = CriticAndGenerator(latent_dim=LATENT_DIM)
    train(model, batches_of(Digits("train", 8).inputs / 127.5 - 1), rounds=1500)
    model.eval()
    images = Digits("test", 8).inputs / 127.5 - 1
    fid = FrechetInceptionDistance(Pixels(8))
    fid.update(images, real=True)
    with torch.no_grad():
        fid.update(model.generator(torch.randn(len(images), LATENT_DIM)), real=False)
    print(f"test/fid {fid.compute().item():.3f}")


if __name__ == "__main__":
    main()
