"""The loss of a variational autoencoder: minus the evidence lower bound of each sample."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from regimen import StepOutput, Task


class ELBO(Task):
    """Maximize the evidence lower bound (ELBO) of images with pixels from 0 to 1, in nats.

    Batches are `(images, noise)`: the noise of the reparametrization belongs to the sample, so that
    an update does not depend on how it is split. It is also what the pictures of an evaluation are
    decoded from.
    """

    def metric_names(self) -> list[str]:
        """Return the names of the metrics of an evaluation."""
        return ["loss", "loss_reconstruction", "loss_divergence", "elbo"]

    def monitor(self) -> str:
        """Return what the best checkpoint is chosen by."""
        return "loss"

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return both terms of the bound for each sample."""
        images, noise = batch
        logits, mean, log_variance = model(noise, images)
        pixels = binary_cross_entropy_with_logits(logits, images, reduction="none")
        reconstruction = pixels.flatten(1).sum(1)
        # KL(N(mean, variance) || N(0, 1)): appendix B of the paper.
        divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(1)
        elbo = -(reconstruction + divergence).detach()
        return StepOutput(
            {"reconstruction": reconstruction, "divergence": divergence},
            sums={"elbo": (elbo.sum(), len(elbo))},
        )

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute the same, and pictures from the noise."""
        result = self.training_step(model, batch)
        result.output = self.prediction_step(model, batch)
        return result

    def prediction_step(self, model: nn.Module, batch: Any) -> Tensor:
        """Return pictures (N, 1, H, W) decoded from a batch's noise."""
        _, noise = batch
        (logits,) = model(noise)
        pictures: Tensor = logits.sigmoid()
        return pictures
