"""Generative adversarial networks: two networks, each with its own optimizer."""

from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from regimen.trainer.errors import ModelError
from regimen.trainer.task import StepOutput, Task

DISCRIMINATOR: Final = "discriminator"
GENERATOR: Final = "generator"


class GAN(Task):
    """Train a discriminator and a generator in turns.

    Batches are `(images, noise)`. The noise belongs to the sample, so that an update does not
    depend on how it is split. The model is called as `model(x, part=...)`; the parts have the names
    of the optimizers. The generator's loss is the non-saturating one (Goodfellow et al. 2014). `r1`
    is the weight of a penalty on the discriminator's gradient at real images (Mescheder et al.
    2018). `fresh_batches`: each turn has a batch of its own, as in WGAN-GP, where `turns` has the
    critic several times.
    """

    def __init__(
        self,
        turns: Sequence[Literal["discriminator", "generator"]] = (DISCRIMINATOR, GENERATOR),
        r1: float = 0.0,
        fresh_batches: bool = False,
    ) -> None:
        self.turns = turns
        self.fresh_batches = fresh_batches
        self._r1 = r1

    def metric_names(self) -> list[str]:
        """Return the names of the metrics of an evaluation."""
        return ["loss", f"loss_{DISCRIMINATOR}", f"loss_{GENERATOR}", "accuracy_real", "fooled"]

    def monitor(self) -> None:
        """Return None: neither loss measures the quality of the images."""

    def turn_step(self, model: nn.Module, batch: Any, turn: str) -> StepOutput:
        """Compute the loss of the network whose turn it is."""
        images, noise = batch
        if turn == GENERATOR:
            logits = model(model(noise, part=GENERATOR), part=DISCRIMINATOR)
            return StepOutput(softplus(-logits).mean(), sums={"fooled": _positive(logits)})
        with torch.no_grad():
            fake = model(noise, part=GENERATOR)
        images = images.detach().requires_grad_(self._r1 > 0)
        real_logits, _, loss = self._discriminate(model, images, fake)
        sums = {"accuracy_real": _positive(real_logits)}
        if not self._r1:
            return StepOutput(loss, sums=sums)
        (gradient,) = torch.autograd.grad(real_logits.sum(), images, create_graph=True)
        squared_norms = gradient.flatten(1).square().sum(1)
        r1 = squared_norms.mean() * (self._r1 / 2)
        return StepOutput({"told": loss, "r1": r1}, sums=sums)

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute both losses and the fraction of images that the discriminator takes for real."""
        images, noise = batch
        fake = model(noise, part=GENERATOR)
        real_logits, fake_logits, loss = self._discriminate(model, images, fake)
        losses = {DISCRIMINATOR: loss, GENERATOR: softplus(-fake_logits).mean()}
        sums = {"accuracy_real": _positive(real_logits), "fooled": _positive(fake_logits)}
        return StepOutput(losses, sums=sums, output=fake)

    def prediction_step(self, model: nn.Module, batch: Any) -> Any:
        """Return the images generated from noise."""
        return model(batch[1] if isinstance(batch, (tuple, list)) else batch, part=GENERATOR)

    def _discriminate(self, model: nn.Module, images: Tensor, fake: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of real and of generated images, and the discriminator's loss."""
        if images.shape != fake.shape:
            raise ModelError(
                f"the images have shape {list(images.shape)}, those of the generator "
                f"{list(fake.shape)}: set model.image_size and model.in_channels to match the data"
            )
        # One call for both: wrappers such as DDP expect one forward pass before each backward pass.
        logits = model(torch.cat([images, fake]), part=DISCRIMINATOR)
        real_logits, fake_logits = logits.chunk(2)
        loss = softplus(-real_logits).mean() + softplus(fake_logits).mean()
        return real_logits, fake_logits, loss


def _positive(logits: Tensor) -> tuple[Tensor, int]:
    return (logits.detach() > 0).sum(), logits.numel()
