"""A GAN's two optimizers in turns, against the same written by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from data.loading.loader import Loader
from data.noise import WithNoise
from data.orders import Shuffled
from data.updates import UpdateSampler
from toy_gan import LATENT, SAMPLES, Images, network
from trainer.errors import ModelError
from trainer.optimizers.optimizers import build_optimizers
from trainer.options import TrainerOptions
from trainer.tasks.gan import GAN
from trainer.trainer import Trainer

BATCH = 8
NODE = {
    "lr": 1e-3,
    "betas": [0.5, 0.999],
    "optimizers": {
        "generator": {"_target_": "torch.optim.Adam", "params": {"match": "^generator"}},
        "discriminator": {"_target_": "torch.optim.Adam", "params": {"match": "^discriminator"}},
    },
}


def loader(steps: int = 1) -> Loader:
    order = Shuffled(SAMPLES, seed=1)
    sampler = UpdateSampler(order, batch_size=BATCH, gradient_accumulation_steps=steps)
    return Loader(WithNoise(Images(), LATENT), sampler, seed=1)


def by_hand(r1: float, epochs: int = 2) -> nn.Module:
    model = network()
    adam = {"lr": 1e-3, "betas": (0.5, 0.999)}
    generator = torch.optim.Adam(model.generator.parameters(), **adam)
    discriminator = torch.optim.Adam(model.discriminator.parameters(), **adam)
    for epoch in range(epochs):
        for micro_batch in loader().epoch(epoch):
            images, noise = micro_batch.batch
            noise = noise.double()
            discriminator.zero_grad()
            images = images.requires_grad_()
            said = model.discriminator(images)
            loss = (
                softplus(-said).mean()
                + softplus(model.discriminator(model.generator(noise).detach())).mean()
            )
            (slope,) = torch.autograd.grad(said.sum(), images, create_graph=True)
            loss = loss + r1 / 2 * slope.square().sum((1, 2, 3)).mean()
            loss.backward()
            discriminator.step()
            generator.zero_grad()
            softplus(-model.discriminator(model.generator(noise))).mean().backward()
            generator.step()
    return model


def trainer_of(steps: int = 1, r1: float = 0.0) -> Trainer:
    model = network()
    optimizers = build_optimizers(model, NODE)
    options = TrainerOptions(max_epochs=2)
    return Trainer(
        model, GAN(r1=r1), optimizers, loader(steps), loader(), options=options, precision="fp64"
    )


@pytest.mark.parametrize("r1", [pytest.param(0.0, id="plain"), pytest.param(2.0, id="r1")])
@pytest.mark.parametrize("steps", [1, 3])
def test_training_is_the_same_as_by_hand(steps: int, r1: float) -> None:
    trainer = trainer_of(steps, r1)
    trainer.fit()
    for got, wanted in zip(trainer.model.parameters(), by_hand(r1).parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def test_the_penalty_matters() -> None:
    """The negative control: without it the networks end elsewhere."""
    apart = [
        (a - b).abs().max().item()
        for a, b in zip(by_hand(0.0).parameters(), by_hand(2.0).parameters(), strict=True)
    ]
    assert max(apart) > 1e-5


def test_the_metrics_named_are_those_that_come() -> None:
    trainer = trainer_of()
    trainer.fit()
    named = {f"val/{name}" for name in trainer.task.metric_names()}
    assert named == {name for name in trainer.metrics if name.startswith("val/")}
    parts = trainer.metrics["val/loss_discriminator"] + trainer.metrics["val/loss_generator"]
    assert trainer.metrics["val/loss"] == pytest.approx(parts)
    assert {"train/loss_generator", "train/grad_norm_discriminator"} <= trainer.metrics.keys()


def test_an_evaluation_needs_no_optimizers_and_a_training_one_for_each_turn() -> None:
    model, trained = network(), trainer_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = Trainer(model, GAN(), plain, loader(), precision="fp64")
    wanted = trained.evaluate(loader(), "test")
    assert trainer.evaluate(loader(), "test") == wanted
    with pytest.raises(ModelError, match=r"but those of task\.turns discriminator, generator"):
        trainer.fit()


def test_noise_belongs_to_a_sample_and_an_epoch() -> None:
    def drawn(steps: int, epoch: int) -> Tensor:
        return torch.cat([m.batch[1] for m in loader(steps).epoch(epoch)])

    assert torch.equal(drawn(1, 0), drawn(3, 0))
    assert not torch.equal(drawn(1, 0), drawn(1, 1))


def test_images_of_another_size_are_refused() -> None:
    batch = (torch.zeros(2, 1, 16, 16).double(), torch.zeros(2, LATENT).double())
    with pytest.raises(ModelError, match=r"model\.image_size"):
        GAN().turn_step(network(), batch, "discriminator")
