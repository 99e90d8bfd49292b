"""The turns of a Wasserstein GAN with gradient penalty, and how its images are judged."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from regimen import StepOutput, Task
from regimen.trainer.task import Metric


class Pixels(nn.Flatten):
    """The pixels of images (N, 1, H, W) as features (N, H * W), in place of Inception's."""

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.num_features = image_size**2


class WassersteinGAN(Task):
    """Train a critic for several steps, each on a batch of its own, then a generator for one.

    Batches are `(images, noise, share)`. `penalty`: weight of the squared difference from 1 of the
    norm of the critic's gradient, at a point between a real and a generated image.
    """

    fresh_batches = True

    def __init__(self, image_size: int, critic_steps: int = 5, penalty: float = 10.0) -> None:
        self.turns = [*["critic"] * critic_steps, "generator"]
        self._last_critic_turn = critic_steps - 1
        self._penalty = penalty
        self._fid = FrechetInceptionDistance(Pixels(image_size))

    def metric_names(self) -> list[str]:
        """Return the names of the metrics of an evaluation."""
        return ["wasserstein", "fid"]

    def monitor(self) -> str:
        """Return what the best checkpoint is chosen by."""
        return "fid"

    def metrics(self) -> Mapping[str, Metric]:
        """Return the Frechet distance of pixels, which `evaluation_step` updates."""
        return {"fid": self._fid}

    def turn_step(self, model: nn.Module, batch: Any, turn: str, index: int = 0) -> StepOutput:
        """Compute the loss of the network whose turn it is, for each sample."""
        images, noise, share = batch
        if turn == "generator":
            return StepOutput(-model(model(noise, part="generator"), part="critic"))
        with torch.no_grad():
            fakes = model(noise, part="generator")
        between = (share * images + (1 - share) * fakes).requires_grad_()
        # One call for all: wrappers such as DDP expect one forward pass before each backward pass.
        scores = model(torch.cat([images, fakes, between]), part="critic")
        real, fake, middle = scores.chunk(3)
        (gradient,) = torch.autograd.grad(middle.sum(), between, create_graph=True)
        excess = gradient.flatten(1).norm(dim=1) - 1
        losses = {"distance": fake - real, "penalty": self._penalty * excess.square()}
        # The critic is nearest to its optimum just before the generator's turn: the estimate of the
        # distance is that of its last step.
        sums = {}
        if index == self._last_critic_turn:
            sums["wasserstein"] = ((real - fake).detach().sum(), len(real))
        return StepOutput(losses, sums=sums)

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compare generated images with real ones."""
        images, _, _ = batch
        fakes = self.prediction_step(model, batch)
        real, fake = model(torch.cat([images, fakes]), part="critic").chunk(2)
        self._fid.update(images, real=True)
        self._fid.update(fakes, real=False)
        sums = {"wasserstein": ((real - fake).sum(), len(real))}
        return StepOutput({}, sums=sums, output=fakes)

    def prediction_step(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the images (N, 1, H, W) generated from a batch's noise."""
        _, noise, _ = batch
        fakes: Tensor = model(noise, part="generator")
        return fakes
