"""Images that the average of the weights generates, and how far they are from real ones."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchvision.utils import make_grid

from examples.ddpm.task import Diffusion
from regimen import Callback
from regimen.trainer.trainer import Trainer


class Pixels(nn.Flatten):
    """The pixels of images (N, 1, H, W) as features (N, H * W), in place of Inception's."""

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.num_features = image_size**2


class Samples(Callback):
    """Show at each validation what the average generates from the same noise: `samples`.

    `samples/fid` is the Frechet distance of their pixels from those of the validation's images.
    """

    affects_result = False

    def __init__(self, image_size: int, count: int = 256, shown: int = 64, seed: int = 0) -> None:
        self.image_size = image_size
        self.count = count
        self.shown = shown
        self.seed = seed
        self.fid = FrechetInceptionDistance(Pixels(image_size))

    def on_validation_start(self, trainer: Trainer) -> None:
        """Begin a new comparison."""
        self.fid.to(trainer.strategy.device).reset()

    def on_validation_batch(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Add the real images."""
        self.fid.update(batch[0], real=True)

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Sample, show and compare."""
        images = self.sampled(trainer)
        self.fid.update(images, real=False)
        trainer.log_image("samples", make_grid((images[: self.shown] + 1) / 2))
        # Waits for the device, after a validation; with several processes a collective.
        trainer.log({"samples/fid": self.fid.compute().item()})

    def sampled(self, trainer: Trainer) -> Tensor:
        """Return images of the average of the weights."""
        task = trainer.task
        assert isinstance(task, Diffusion)
        with trainer.average_weights(), trainer.evaluating():
            return task.sample(trainer.model, self.count, self.image_size, self.seed)
