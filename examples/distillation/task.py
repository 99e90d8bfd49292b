"""The loss of distillation: labels, and the answers of a trained network."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

from regimen import StepOutput, load_run
from regimen.trainer.tasks.classification import Classification


class Distillation(Classification):
    """Classify, with soft targets from the best checkpoint of a finished run.

    `teacher`: the directory of that run, whose data were prepared as those of the student.
    `temperature`: what logits of both are divided by before they are compared. `share`: weight of
    the soft targets; the labels have the rest. An evaluation has the plain cross-entropy.
    """

    def __init__(
        self, num_classes: int, teacher: str, temperature: float = 4.0, share: float = 0.9
    ) -> None:
        super().__init__(num_classes)
        # As an attribute it is moved with the task and saved in checkpoints. Only parameters that
        # require a gradient are trained.
        self.teacher = load_run(teacher, device="cpu").model()
        self.teacher.requires_grad_(False).eval()
        self._temperature = temperature
        self._share = share

    def metric_names(self) -> list[str]:
        """Return the names of the metrics of an evaluation."""
        return ["loss", "accuracy"]

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return both losses for each sample."""
        inputs, labels = batch
        logits = self.answer(model, inputs)
        with torch.no_grad():
            wanted = self.answer(self.teacher, inputs)
        divergence = kl_div(
            (logits / self._temperature).log_softmax(1),
            (wanted / self._temperature).log_softmax(1),
            reduction="none",
            log_target=True,
        )
        # Its gradient falls with the square of the temperature.
        scale = self._share * self._temperature**2
        losses = {
            "labels": (1 - self._share) * cross_entropy(logits, labels, reduction="none"),
            "teacher": scale * divergence.sum(1),
        }
        return StepOutput(losses, sums=self.scores(logits, labels))
