"""Training with the loss that a model computes itself, as those of transformers do."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regimen.data.batch import IGNORED
from regimen.trainer.device import count_true
from regimen.trainer.errors import (
    ModelError,
    SampleError,
    describe_value,
    qualified_name,
    unwrapped,
)
from regimen.trainer.task import Metric, StepOutput, Task, check_persistent
from regimen.trainer.tasks.language_model import LanguageModel
from regimen.trainer.tasks.supervised import Supervised, pair_of

# Names by which models take their labels.
_LABELS = ("labels", "targets", "target", "y")


class OwnLoss(Task):
    """Train on batches `(inputs, labels)`, or named tensors, with the loss that the model returns.

    The model is called as `model(inputs, labels=labels)`, or `model(**batch)`, and returns
    `(loss, output)`, `(output, loss)`, an object with `loss` and `logits`, or a dict with `loss`,
    whose output is `logits` or the only other entry. The loss is a scalar, the mean over the labels
    that are not `ignore_index` (or over all, of real numbers). An update has that mean over all its
    micro-batches. Scores, metrics and the meaning of the output are those of `task`, whose own loss
    is not computed.

    `labels`: the parameter of the model's forward that takes the labels; None: `labels`, `targets`,
    `target` or `y`.
    """

    count_names: Sequence[str] = ("",)

    def __init__(
        self, task: Supervised, labels: str | None = None, ignore_index: int = IGNORED
    ) -> None:
        self._task = task
        self._labels = labels
        self._ignore_index = ignore_index
        self.output_kind = task.output_kind
        check_persistent(task)
        if task.persistent:
            self.persistent = ("task_state",)

    @property
    def task_state(self) -> dict[str, Any]:
        """The state of the task between batches."""
        return self._task.state_dict()

    @task_state.setter
    def task_state(self, state: Mapping[str, Any]) -> None:
        self._task.load_state_dict(state)

    def metric_names(self) -> list[str]:
        """Return the loss, and the task's metrics besides its losses."""
        names = ["loss"]
        for name in self._task.metric_names():
            if name not in self._task.losses.names:
                names.append(name)
        return names

    def on_epoch_start(self, epoch: int) -> None:
        """Tell the task of an epoch."""
        self._task.on_epoch_start(epoch)

    def on_evaluation_start(self, stage: str) -> None:
        """Tell the task of an evaluation."""
        self._task.on_evaluation_start(stage)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Move the task, too."""
        super().to(device, dtype)
        self._task.to(device, dtype)

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics of the task."""
        return self._task.metrics()

    def modes(self) -> Mapping[str, str]:
        """Return the directions of the task's metrics."""
        return self._task.modes()

    def counts(self, batch: Any) -> Mapping[str, Tensor | int]:
        """Return the number of labels that the model's mean is over."""
        _, labels = self._pair_of(batch)
        if labels.is_floating_point():
            return {"": len(labels)}
        return {"": count_true(labels != self._ignore_index)}

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Let the model compute its loss; compute the scores."""
        inputs, labels = self._pair_of(batch)
        name = self._labels or _labels_of(model)
        losses: list[Tensor] = []

        def model_with_labels(*values: Any, **named: Any) -> Any:
            result = model(*values, **named, **{name: labels})
            loss, output = _loss_and_output(result)
            if loss is None or output is None:
                raise ModelError(
                    f"{qualified_name(model)}.forward(inputs, {name}=...) returned "
                    f"{describe_value(result)}, and not (loss, output), (output, loss) or a dict "
                    "with `loss` and `logits`, where the loss is a scalar: task.task alone "
                    "computes a loss from an output"
                )
            losses.append(loss)
            return output

        output = self._task.answer(model_with_labels, inputs)  # type: ignore[arg-type]
        target = self._task.target_of(labels)
        self._task.check(output, target)
        scores = self._task.scores(output, target)
        return StepOutput({"": losses[0]}, self.counts(batch), scores, output)

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute loss, scores and metrics."""
        result = self.training_step(model, batch)
        self._task.update_metrics(result.output, self._task.target_of(self._pair_of(batch)[1]))
        return result

    def prediction_step(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output, as the task does."""

        def model_without_loss(*values: Any, **named: Any) -> Any:
            result = model(*values, **named)
            if isinstance(result, Tensor):
                return result
            return _loss_and_output(result)[1]

        model_without_loss.forward = model.forward  # type: ignore[attr-defined]  # its parameters
        return self._task.prediction_step(model_without_loss, batch)  # type: ignore[arg-type]

    def _pair_of(self, batch: Any) -> tuple[Any, Any]:
        """Return inputs and labels of a batch. Raises SampleError."""
        if isinstance(batch, Mapping) and isinstance(self._task, LanguageModel):
            raise SampleError(
                "a batch of named tensors has labels that are not shifted, which a language model "
                "would count in another way: train on it with task=chat"
            )
        return pair_of(batch)

    def interpret(self, output: Any) -> Any:
        """Convert an output to the values of the task's kind."""
        return self._task.interpret(output)


def _labels_of(model: nn.Module) -> str:
    """Return the parameter by which a model takes its labels. Raises ModelError for none."""
    parameters = inspect.signature(unwrapped(model).forward).parameters
    for name in _LABELS:
        if name in parameters:
            return name
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return _LABELS[0]
    raise ModelError(
        "task.labels",
        f"{qualified_name(model)}.forward({', '.join(parameters)}) has none of the parameters "
        f"{', '.join(_LABELS)}",
        "name the one that takes the labels: task.labels=...",
    )


def _loss_and_output(result: Any) -> tuple[Tensor | None, Any]:
    """Return loss and output of what a model has returned; None for what is not there."""
    if isinstance(result, Mapping):
        outputs = {name: value for name, value in result.items() if value is not None}
        loss = outputs.pop("loss", None)
        if "logits" in outputs:
            output = outputs["logits"]
        elif len(outputs) == 1:
            (output,) = outputs.values()
        else:
            output = None
    elif isinstance(result, list | tuple) and len(result) == 2:
        loss, output = result
        if not _is_scalar(loss):
            output, loss = result
    else:
        loss = getattr(result, "loss", None)
        output = getattr(result, "logits", None)
    if not _is_scalar(loss):
        loss = None
    return loss, output


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0
