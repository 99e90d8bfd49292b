"""Training with the loss that a model computes itself, as those of transformers do."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from regimen.data.batch import IGNORED
from regimen.trainer.device import count_true
from regimen.trainer.errors import ModelError, describe_value, qualified_name
from regimen.trainer.task import Metric, StepOutput, Task
from regimen.trainer.tasks.supervised import Supervised


class OwnLoss(Task):
    """Train on batches `(inputs, labels)` with the loss that the model returns.

    The model is called as `model(inputs, labels=labels)` and returns `(loss, output)`, where the
    loss is a mean over the labels that are not -100 (or over all, of real numbers). An update has
    that mean over all its micro-batches. Scores, metrics and the meaning of the output are those of
    `task`, whose own loss is not computed.
    """

    count_names: Sequence[str] = ("",)

    def __init__(self, task: Supervised) -> None:
        self._task = task
        self.output_kind = task.output_kind

    def metric_names(self) -> list[str]:
        """Return the loss, and the task's metrics besides its losses."""
        losses = self._task.losses.names
        return ["loss", *(n for n in self._task.metric_names() if n not in losses)]

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics of the task."""
        return self._task.metrics()

    def modes(self) -> Mapping[str, str]:
        """Return the directions of the task's metrics."""
        return self._task.modes()

    def counts(self, batch: Any) -> Mapping[str, Tensor | int]:
        """Return the number of labels that the model's mean is over."""
        labels = batch[1]
        if labels.is_floating_point():
            return {"": len(labels)}
        return {"": count_true(labels != IGNORED)}

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Let the model compute its loss; compute the scores."""
        inputs, labels = batch
        losses: list[Tensor] = []

        def model_with_labels(values: Any) -> Any:
            result = model(values, labels=labels)
            is_pair = isinstance(result, tuple) and len(result) == 2
            if not (is_pair and isinstance(result[0], Tensor)):
                raise ModelError(
                    f"{qualified_name(model)}.forward(inputs, labels=...) returned "
                    f"{describe_value(result)}, and "
                    "not (loss, output): task.task alone computes a loss from an output"
                )
            losses.append(result[0])
            return result[1]

        output = self._task.answer(model_with_labels, inputs)  # type: ignore[arg-type]
        target = self._task.target_of(labels)
        self._task.check(output, target)
        scores = self._task.scores(output, target)
        return StepOutput({"": losses[0]}, self.counts(batch), scores, output)

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute loss, scores and metrics."""
        result = self.training_step(model, batch)
        self._task.update_metrics(result.output, self._task.target_of(batch[1]))
        return result

    def prediction_step(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output, as the task does."""
        return self._task.prediction_step(model, batch)

    def interpret(self, output: Any) -> Any:
        """Convert an output to the values of the task's kind."""
        return self._task.interpret(output)
