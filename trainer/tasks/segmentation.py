"""Semantic segmentation: one class for each pixel."""

from torch import Tensor, nn

from regimen.trainer.device import count_true
from regimen.trainer.errors import ModelError
from regimen.trainer.tasks.losses import Loss
from regimen.trainer.tasks.metrics import MeanIoU
from regimen.trainer.tasks.supervised import Metrics, Scores, Shape, Supervised


class Segmentation(Supervised):
    """Classify pixels; batches are `(images, masks)`, masks [n, H, W] of class indices.

    Pixels of `ignore_index`, which may be one of the classes, and those that the loss ignores are
    excluded from the scores and the metrics as well: the loss is the mean over all other pixels of
    an update, however it is split.
    Reports `pixel_accuracy` and `miou`, the mean intersection over union of the classes.
    """

    output_kind = "mask"
    score_names = ("pixel_accuracy",)

    def __init__(
        self,
        num_classes: int,
        loss: Loss | None = None,
        ignore_index: int = 255,
        metrics: Metrics | None = None,
    ) -> None:
        loss = loss or nn.CrossEntropyLoss(ignore_index=ignore_index)
        super().__init__(loss, metrics, ignore_index=ignore_index, miou=MeanIoU(num_classes))
        self.num_classes = num_classes

    def monitor(self) -> str:
        """Return the metric that the best checkpoint is chosen by."""
        return "miou"

    def interpret(self, output: Tensor) -> Tensor:
        """Return the predicted class of each pixel."""
        return output.argmax(1)

    def shape(self, target: Tensor) -> Shape:
        """Return [n, classes, H, W]. Raises ModelError for targets that are no masks."""
        if target.ndim < 2:
            raise ModelError(
                f"segmentation takes masks [n, H, W] of class numbers, not {list(target.shape)}: "
                "one class for each sample is task=classification"
            )
        return len(target), self.num_classes, *target.shape[1:]

    def scores(self, output: Tensor, target: Tensor) -> Scores:
        """Count the pixels that are predicted correctly."""
        labels, count = self.losses.valid_labels(target)
        correct = count_true(output.detach().argmax(1) == labels)
        return {"pixel_accuracy": (correct, count)}
