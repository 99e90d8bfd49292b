"""torchvision's RetinaNet on a small ResNet, and the task that trains and judges it."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models import resnet18
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN

from regimen.trainer.task import Metric, StepOutput, Task


def detector(num_classes: int, image_size: int, score_thresh: float = 0.05) -> RetinaNet:
    """Build a RetinaNet for objects of 8 to 40 pixels.

    GroupNorm instead of BatchNorm: an update is the same however it is split into micro-batches.
    """
    network = resnet18(weights=None, norm_layer=partial(nn.GroupNorm, 8))
    layers = {"layer1": "0", "layer2": "1"}  # strides of 4 and 8 pixels
    backbone = BackboneWithFPN(network, layers, in_channels_list=[64, 128], out_channels=64)
    sizes = ((10, 14), (16, 22), (28, 40))  # of the two layers, and of the pooled one
    return RetinaNet(
        backbone,
        num_classes,
        anchor_generator=AnchorGenerator(sizes, ((1.0,),) * len(sizes)),
        min_size=image_size,
        max_size=image_size,
        score_thresh=score_thresh,
        detections_per_img=20,
    )


class AveragePrecision(MeanAveragePrecision):
    """Mean average precision of torchmetrics: at an overlap of 0.5, and over 0.5 to 0.95."""

    def compute(self) -> dict[str, Tensor]:
        """Return both."""
        found = super().compute()
        return {"50": found["map_50"], "50_95": found["map"]}


class Detection(Task):
    """Train a detector of torchvision on the losses that it computes itself.

    Batches are a list of images (C, H, W) and a list of targets. RetinaNet's losses are means over
    the images, so that an update may be split. An evaluation has no loss: the detector gives its
    boxes then, and `val/map_50` says how good they are.
    """

    def __init__(self) -> None:
        self._precision = AveragePrecision()

    def metric_names(self) -> list[str]:
        """Return what an evaluation gives."""
        return ["map_50", "map_50_95"]

    def monitor(self) -> str:
        """Return what the best checkpoint is chosen by."""
        return "map_50"

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return the detector's losses by name."""
        return StepOutput(model(*batch))

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compare the boxes that are found with those that are there."""
        images, targets = batch
        found = model(images)
        self._precision.update(found, targets)
        return StepOutput({}, output=found)

    def metrics(self) -> dict[str, Metric]:
        """Return the metric that `evaluation_step` updates."""
        return {"map": self._precision}
