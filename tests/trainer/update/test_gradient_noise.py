"""Noise on gradients: a function of seed and update alone."""

import pytest
import torch
from torch import Tensor, nn

from toys import assert_equal, network, trainer_of
from trainer.options import GradientNoise, TrainerOptions
from trainer.rng import derived
from trainer.tasks.regression import Regression
from trainer.update.gradients import add_noise

NOISE = GradientNoise(eta=0.1, gamma=0.5)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(3, 8, 5, generator=generator, dtype=torch.float64)
    return [(part, part.sum(1)) for part in x]


def trained(noise: GradientNoise | None, steps: int = 1, clip: float | None = None) -> nn.Module:
    options = {"gradient_noise": noise, "seed": 3, "clip_grad_norm": clip, "momentum": 0.0}
    options |= {"gradient_accumulation_steps": steps, "model": network(1)}
    trainer = trainer_of(Regression(), batches(), **options)
    trainer.fit()
    return trainer.model


def by_hand(clip: float | None = None) -> nn.Module:
    model = network(1)
    for update, (x, y) in enumerate(batches() * 2):
        model.zero_grad()
        (model(x).squeeze(1) - y).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        generator = torch.Generator().manual_seed(derived(3, "gradient noise", update, ""))
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
                p -= 0.1 * (p.grad + (0.1 / (1 + update) ** 0.5) ** 0.5 * noise)
    return model


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("steps", [1, 3])
def test_noise_is_added_after_clipping(steps: int, clip: float | None) -> None:
    assert_equal(trained(NOISE, steps, clip), by_hand(clip))


def test_noise_changes_the_weights() -> None:
    with pytest.raises(AssertionError):
        assert_equal(trained(None), by_hand())


def test_the_training_s_random_numbers_are_left_alone() -> None:
    torch.manual_seed(0)
    trained(None)
    expected = torch.rand(3)
    torch.manual_seed(0)
    trained(NOISE)
    assert torch.equal(torch.rand(3), expected)


def noise_at(update: int, turn: str = "", eta: float = 0.5, gamma: float = 0.55) -> Tensor:
    parameter = nn.Parameter(torch.zeros(200, 200))
    parameter.grad = torch.zeros_like(parameter)
    noise = GradientNoise(eta=eta, gamma=gamma)
    add_noise(TrainerOptions(gradient_noise=noise), [parameter], update, turn)
    return parameter.grad


@pytest.mark.parametrize("update", [0, 9, 999])
def test_the_variance_of_the_noise_is_the_published_one(update: int) -> None:
    expected = 0.5 / (1 + update) ** 0.55
    assert noise_at(update).var().item() == pytest.approx(expected, rel=0.05)


def test_each_update_and_each_turn_has_its_own_noise() -> None:
    drawn = [noise_at(0), noise_at(1, gamma=0.0), noise_at(0, "generator")]
    for i, one in enumerate(drawn):
        for other in drawn[i + 1 :]:
            both = torch.stack([one.flatten(), other.flatten()])
            assert abs(torch.corrcoef(both)[0, 1].item()) < 0.03


def test_parameters_without_a_gradient_stay_so() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    add_noise(TrainerOptions(gradient_noise=NOISE), [parameter], 0)
    assert parameter.grad is None
