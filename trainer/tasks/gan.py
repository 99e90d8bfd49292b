"""Two networks against each other, each with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from trainer.errors import ModelError
from trainer.task import StepOutput, Task

DISCRIMINATOR: Final = "discriminator"
GENERATOR: Final = "generator"


class GAN(Task):
    """Take turns: the discriminator learns to tell images, the generator to deceive it.

    Batches are `(images, noise)`: noise that belongs to a sample keeps an update the same however
    it is split. The model is called `model(x, part=...)`, with parts named as the optimizers.
    The generator's loss is the non-saturating one (Goodfellow et al. 2014). `r1` weighs a penalty
    on the discriminator's gradient at real images (Mescheder et al. 2018).
    """

    def __init__(
        self,
        turns: Sequence[Literal["discriminator", "generator"]] = (DISCRIMINATOR, GENERATOR),
        r1: float = 0.0,
    ) -> None:
        self.turns = turns
        self._r1 = r1

    def metric_names(self) -> list[str]:
        """Name what an evaluation gives."""
        return ["loss", f"loss_{DISCRIMINATOR}", f"loss_{GENERATOR}", "accuracy_real", "fooled"]

    def monitor(self) -> None:
        """Name no metric: neither side's loss says how good the images are."""

    def turn_step(self, model: nn.Module, batch: Any, turn: str) -> StepOutput:
        """Compute the loss of the one whose turn it is."""
        if turn == DISCRIMINATOR:
            return self._discriminate(model, batch)
        fake = model(batch[1], part=GENERATOR)
        said = model(fake, part=DISCRIMINATOR)
        return StepOutput(softplus(-said).mean(), sums={"fooled": _positive(said)})

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute both losses and how often each side succeeds."""
        images, noise = batch
        fake = model(noise, part=GENERATOR)
        real_said, fake_said = self._said(model, images, fake)
        losses = {
            DISCRIMINATOR: softplus(-real_said).mean() + softplus(fake_said).mean(),
            GENERATOR: softplus(-fake_said).mean(),
        }
        sums = {"accuracy_real": _positive(real_said), "fooled": _positive(fake_said)}
        return StepOutput(losses, sums=sums)

    def prediction_step(self, model: nn.Module, batch: Any) -> Any:
        """Return images for noise."""
        noise = batch[1] if isinstance(batch, (tuple, list)) else batch
        return model(noise, part=GENERATOR)

    def _discriminate(self, model: nn.Module, batch: Any) -> StepOutput:
        images, noise = batch
        with torch.no_grad():
            fake = model(noise, part=GENERATOR)
        images = images.detach().requires_grad_(self._r1 > 0)
        real_said, fake_said = self._said(model, images, fake)
        loss = softplus(-real_said).mean() + softplus(fake_said).mean()
        sums = {"accuracy_real": _positive(real_said)}
        if not self._r1:
            return StepOutput(loss, sums=sums)
        (gradient,) = torch.autograd.grad(real_said.sum(), images, create_graph=True)
        r1 = gradient.flatten(1).square().sum(1).mean() * (self._r1 / 2)
        return StepOutput({"told": loss, "r1": r1}, sums=sums)

    def _said(self, model: nn.Module, images: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        # One call for both: wrappers such as DDP expect a single one before each backward.
        if images.shape != fake.shape:
            raise ModelError(
                f"the images are {list(images.shape)} and the generator's {list(fake.shape)}: "
                "set model.image_size and model.in_channels to the data's"
            )
        said = model(torch.cat([images, fake]), part=DISCRIMINATOR)
        real_said, fake_said = said.chunk(2)
        return real_said, fake_said


def _positive(said: Tensor) -> tuple[Tensor, int]:
    return (said.detach() > 0).sum(), said.numel()
