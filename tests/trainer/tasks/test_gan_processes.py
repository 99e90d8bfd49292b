"""A GAN trained by several processes and in micro-batches is the one trained by one in whole."""

import pytest
import torch
from torch import Tensor

from data.loading.loader import Loader
from data.noise import WithNoise
from data.orders import Shuffled
from data.updates import UpdateSampler
from toy_gan import LATENT, SAMPLES, Images, network
from trainer.optimizers.optimizers import build_optimizers
from trainer.options import TrainerOptions
from trainer.strategies.ddp import DDP
from trainer.strategies.replicas import Processes
from trainer.strategies.strategy import Strategy
from trainer.tasks.gan import GAN
from trainer.trainer import Trainer

BATCH = 8
NODE = {
    "lr": 1e-2,
    "optimizers": {
        "generator": {"_target_": "torch.optim.SGD", "params": {"match": "^generator"}},
        "discriminator": {"_target_": "torch.optim.SGD", "params": {"match": "^discriminator"}},
    },
}


def trained(steps: int, strategy: Strategy, r1: float) -> dict[str, Tensor]:
    model = strategy.prepare(network())
    sampler = UpdateSampler(
        Shuffled(SAMPLES, seed=1),
        batch_size=BATCH,
        gradient_accumulation_steps=steps,
        rank=strategy.group.rank,
        world_size=strategy.group.world_size,
    )
    trainer = Trainer(
        model,
        GAN(r1=r1),
        build_optimizers(model, NODE),
        Loader(WithNoise(Images(), LATENT), sampler, seed=1),
        strategy=strategy,
        options=TrainerOptions(max_epochs=2),
        precision="fp64",
    )
    trainer.fit()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("r1", [pytest.param(0.0, id="plain"), pytest.param(2.0, id="r1")])
def test_processes_change_nothing(ranks, steps: int, r1: float) -> None:
    alone = trained(1, Strategy("cpu"), r1)

    def train(rank: int) -> dict[str, Tensor]:
        strategy = DDP(Processes("gloo", 60, "cpu"))
        strategy.setup()
        result = trained(steps, strategy, r1)
        strategy.group.leave()
        return result

    for result in ranks(2, train):
        for name, value in alone.items():
            torch.testing.assert_close(result[name], value, rtol=0, atol=1e-11)
