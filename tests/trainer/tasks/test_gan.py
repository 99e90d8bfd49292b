"""A GAN's two optimizers in turns, against the same written by hand, by any number of processes."""

from functools import partial

import pytest
import torch
from torch.nn.functional import softplus

import toys
from regimen.data.noise import WithNoise
from regimen.models import gan
from regimen.trainer.errors import ModelError
from regimen.trainer.optimizers.optimizers import build_optimizers
from regimen.trainer.tasks.gan import GAN
from regimen.trainer.trainer import Trainer
from toys import Samples, assert_equal, distance, in_group, loader

SAMPLES = 21
LATENT = 5
SGD = {"_target_": "torch.optim.SGD", "lr": 0.01}
PARTS = {
    "generator": {**SGD, "params": {"match": "^generator"}},
    "discriminator": {**SGD, "params": {"match": "^discriminator"}},
}


def network():
    """Return the same generator and discriminator each time."""
    torch.manual_seed(3)
    return gan.GAN(in_channels=1, image_size=8, latent_dim=LATENT, width=4).double()


def image_loader(steps=1, strategy=None):
    """Load images in [-1, 1] with noise."""
    generator = torch.Generator().manual_seed(7)
    shares = torch.rand(SAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64)
    images = Samples(shares * 2 - 1, torch.zeros(SAMPLES))
    return loader(WithNoise(images, LATENT), steps, strategy=strategy)


def discriminator_loss(model, images, noise, r1):
    """Return the loss of the discriminator, with a penalty on its slope at true images."""
    images = images.requires_grad_()
    made = model.generator(noise).detach()
    of_true = model.discriminator(images)
    of_made = model.discriminator(made)
    loss_of_true = softplus(-of_true).mean()
    loss_of_made = softplus(of_made).mean()
    (slope,) = torch.autograd.grad(of_true.sum(), images, create_graph=True)
    penalty = slope.square().sum((1, 2, 3)).mean()
    return loss_of_true + loss_of_made + r1 / 2 * penalty


def generator_loss(model, noise):
    of_made = model.discriminator(model.generator(noise))
    return softplus(-of_made).mean()


def by_hand(r1, epochs=2):
    model = network()
    generator = torch.optim.SGD(model.generator.parameters(), lr=0.01)
    discriminator = torch.optim.SGD(model.discriminator.parameters(), lr=0.01)
    for epoch in range(epochs):
        for micro_batch in image_loader().epoch(epoch):
            images, noise = micro_batch.batch
            noise = noise.double()
            discriminator.zero_grad()
            discriminator_loss(model, images, noise, r1).backward()
            discriminator.step()
            generator.zero_grad()
            generator_loss(model, noise).backward()
            generator.step()
    return model


def trainer_of(steps=1, r1=0.0, strategy=None):
    model = network()

    def make(parameters):
        return build_optimizers(model, {"optimizers": PARTS})

    data = image_loader(steps, strategy)
    val = None if strategy else image_loader()
    task = GAN(r1=r1)
    return toys.trainer_of(
        task,
        data,
        model=model,
        make=make,
        val=val,
        strategy=strategy,
    )


@pytest.mark.parametrize("r1", [pytest.param(0.0, id="plain"), pytest.param(2.0, id="r1")])
def test_training_is_the_same_as_by_hand_by_any_number_of_processes(ranks, r1):
    def train(strategy, steps):
        trainer = trainer_of(steps, r1, strategy)
        trainer.fit()
        return trainer.model

    wanted = by_hand(r1)
    for steps in (1, 3):
        first, second = ranks(2, in_group(partial(train, steps=steps)))
        assert_equal(train(None, steps), wanted, 1e-11)
        assert_equal(first, wanted, 1e-11)
        assert_equal(second, wanted, 1e-11)


def test_the_penalty_matters():
    """The negative control: without it the networks end elsewhere."""
    assert distance(by_hand(0.0), by_hand(2.0)) > 1e-5


def test_the_metrics_named_are_those_that_come():
    trainer = trainer_of()
    trainer.fit()

    metrics = trainer.metrics
    of_validation = {name for name in metrics if name.startswith("val/")}
    parts = metrics["val/loss_discriminator"] + metrics["val/loss_generator"]

    assert of_validation == {f"val/{name}" for name in trainer.task.metric_names()}
    assert metrics["val/loss"] == pytest.approx(parts)
    assert {"train/loss_generator", "train/grad_norm_discriminator"} <= metrics.keys()


def test_an_evaluation_needs_no_optimizers_and_a_training_one_for_each_turn():
    model = network()
    trained = trainer_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = Trainer(model, GAN(), plain, image_loader(), precision="fp64")
    wanted = trained.evaluate(image_loader(), "test")

    assert trainer.evaluate(image_loader(), "test") == wanted
    with pytest.raises(ModelError, match=r"but those of task\.turns discriminator, generator"):
        trainer.fit()


def test_images_of_another_size_are_refused():
    images = torch.zeros(2, 1, 16, 16).double()
    noise = torch.zeros(2, LATENT).double()
    with pytest.raises(ModelError, match=r"model\.image_size"):
        GAN().turn_step(network(), (images, noise), "discriminator")
