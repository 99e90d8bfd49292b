"""The triplet loss with the hardest triplets of a batch, and recall@1 of a whole split."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

from regimen import StepOutput, Task
from regimen.trainer.task import Metric


def batch_hard_loss(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Return the soft-margin triplet loss [n] of each anchor (Hermans et al., 2017, eq. 5).

    Each anchor is compared with the farthest sample of its class in the batch and the nearest of
    another; one without such samples has the loss 0.
    """
    distances = torch.cdist(embeddings, embeddings)
    same = labels[:, None] == labels
    others = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    farthest = distances.masked_fill(~others, 0.0).amax(1)
    nearest = distances.masked_fill(same, torch.inf).amin(1)
    complete = others.any(1) & ~same.all(1)
    nearest = torch.where(complete, nearest, 0.0)  # the gradient at infinity would be NaN
    return torch.where(complete, softplus(farthest - nearest), 0.0)


class RecallAt1:
    """The share of all samples whose nearest neighbour among the others is of their class.

    It needs the embeddings of the whole split, however this is cut into batches and processes.
    """

    higher_is_better = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all embeddings."""
        self._embeddings: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, embeddings: Tensor, labels: Tensor) -> None:
        """Add the embeddings [n, width] of a batch with their labels [n]."""
        self._embeddings.append(embeddings.cpu())
        self._labels.append(labels.cpu())

    def merge_state(self, others: Sequence[Self]) -> None:
        """Add what other processes have seen."""
        for other in others:
            self._embeddings += other._embeddings
            self._labels += other._labels

    def compute(self) -> float:
        """Return the share, from 0 to 1."""
        embeddings = torch.cat(self._embeddings)
        labels = torch.cat(self._labels)
        distances = torch.cdist(embeddings, embeddings).fill_diagonal_(torch.inf)
        return float((labels[distances.argmin(1)] == labels).float().mean())


class MetricLearning(Task):
    """Train embeddings of length 1 by the hardest triplets of each batch."""

    couples_samples = True  # triplets are those of one micro-batch

    def __init__(self, scale: float = 10.0) -> None:
        """`scale`: of the distances in the loss, which lie between 0 and 2."""
        self._scale = scale
        self._recall = RecallAt1()

    def metric_names(self) -> list[str]:
        """Return what an evaluation gives."""
        return ["loss", "recall_at_1"]

    def monitor(self) -> str:
        """Return what the best checkpoint is chosen by."""
        return "recall_at_1"

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metric that `evaluation_step` updates."""
        return {"recall_at_1": self._recall}

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return the loss of each sample as an anchor."""
        images, labels = batch
        embeddings = normalize(model(images))
        return StepOutput(batch_hard_loss(self._scale * embeddings, labels), output=embeddings)

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Keep the embeddings for recall@1; the loss is that of the batch."""
        output = self.training_step(model, batch)
        self._recall.update(output.output, batch[1])
        return output
