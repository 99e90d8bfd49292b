"""Base class of tasks that compare a model's output with a target."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from regimen.data.batch import inputs_of
from regimen.trainer.device import count_true
from regimen.trainer.errors import ModelError, SampleError, describe_value, qualified_name
from regimen.trainer.task import Metric, StepOutput, Task, takes_names
from regimen.trainer.tasks.losses import Loss, Losses
from regimen.trainer.tasks.metrics import ConfusionMatrix, PerClassAccuracy, Perplexity
from regimen.trainer.tasks.text_metrics import takes_texts
from regimen.trainer.tasks.trials import check_padding, parts_of

Scores = dict[str, tuple[Tensor, Tensor | int]]
Metrics = Mapping[str, Metric | None]
Shape = Sequence[Any]  # of integers, as `Tensor.shape` is


LABELS = "labels"  # the target in a batch of named tensors, as in those of transformers


class NamedInputs(dict[str, Any]):
    """Inputs that a model takes by name: `model(**inputs)`."""


def _call_by_name(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    return call_model(model, NamedInputs(inputs))


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Return the model's output for inputs; of an object with `logits`, as of transformers, these.

    `NamedInputs` are passed by name, any others as they are.
    """
    output = model(**inputs) if isinstance(inputs, NamedInputs) else model(inputs)
    return getattr(output, "logits", output)


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch: `(inputs, target)`, or named tensors with `labels`.

    Raises SampleError for a batch that is neither.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        inputs, target = batch
    elif isinstance(batch, Mapping) and LABELS in batch:
        inputs = named_inputs(batch)
        target = batch[LABELS]
    else:
        returned = "nothing (None)"
        if batch is not None:
            returned = f"samples that make a batch {describe_value(batch)}"
        names = [*batch][:2] if isinstance(batch, Mapping) else []
        example = ", ".join(f"sample[{name!r}]" for name in names) or "inputs, target"
        raise SampleError(
            f"the data set returned {returned}, and this task takes pairs: let __getitem__ return "
            f"({example}), a dict whose {LABELS!r} are the target, or write a task of your own"
        )
    is_text = isinstance(target, list | tuple) and any(isinstance(t, str) for t in target)
    if target is None or is_text:
        returned = (
            "None as a target" if target is None else f"texts as targets ({target[0]!r}, ...)"
        )
        raise SampleError(
            f"the data set returned {returned}: let __getitem__ return a number for each sample, "
            "such as self.classes.index(name) of a class"
        )
    return inputs, target


def named_inputs(batch: Mapping[str, Any]) -> NamedInputs:
    """Return what a model is given of a batch of named tensors: all but the labels."""
    return NamedInputs({name: value for name, value in batch.items() if name != LABELS})


class Supervised(Task):
    """Train with a loss, scores that are means, and metrics.

    Batches are `(inputs, target)`; or, as those of transformers and its collators, dicts of named
    tensors, of which `labels` are the target and the model is given all others by name.

    A subclass may override `answer`, which calls the model, `scores` and `score_names`, the values
    reported besides the loss, and `shape` or `check`, which say which outputs fit.
    """

    score_names: Sequence[str] = ()
    num_classes: int | None = None  # set by tasks whose targets are class indices

    def __init__(
        self,
        loss: Loss,
        metrics: Metrics | None = None,
        *,
        ignore_index: int | None = None,
        **own: Metric,
    ) -> None:
        """`own`: metrics of the task itself, in front of those that are given.

        `ignore_index`: a label that no score and no metric counts; that of the loss neither.
        """
        self.losses = Losses(loss, ignore_index)
        self.count_names = self.losses.counted
        every = {**own, **(metrics or {})}
        self._metrics = {name: metric for name, metric in every.items() if metric is not None}
        for name, metric in self._metrics.items():
            missing = [n for n in ("reset", "update", "compute") if not hasattr(metric, n)]
            if missing:
                raise ValueError(
                    f"metrics.{name}: {qualified_name(metric)} has no {', '.join(missing)}"
                )
            if takes_texts(metric) and not self.writes_texts:
                raise ModelError(
                    f"task.metrics.{name}",
                    f"{qualified_name(metric)} compares texts, and the task writes none",
                    "task=chat does with task.generate.max_new_tokens=64",
                )

    def answer(self, model: nn.Module, inputs: Any) -> Any:
        """Return the model's output for inputs, in the shape that the losses expect."""
        return call_model(model, inputs)

    def check_training(self, model: nn.Module, dataset: Any) -> None:
        """Raise ModelError for a model that sees the empty places behind a text."""
        for part in parts_of(dataset):
            if hasattr(part, "padding_trial"):
                alone, padded = part.padding_trial()
                check_padding(model, partial(_call_by_name, model), alone, padded)

    def target_of(self, target: Any) -> Any:
        """Return a batch's target in the shape that the losses expect."""
        return target

    def scores(self, output: Any, target: Any) -> Scores:
        """Return for each of `score_names` the sum over the batch and the number of summands."""
        return {}

    def shape(self, target: Any) -> Shape | None:
        """Return the shape of an output that fits a target; None if any does."""
        return None

    def check(self, output: Any, target: Any) -> None:
        """Raise ModelError where the shape differs, which broadcasting could hide."""
        shape = self.shape(target)
        if shape is None:
            return
        if not isinstance(output, Tensor):
            returned = "nothing (None)" if output is None else f"a {type(output).__name__}"
            raise ModelError(f"the model returned {returned}, where the task takes a tensor")
        wanted = tuple(shape)
        if output.shape != wanted:
            solution = f"let the model's forward return {[*wanted]}"
            if self.num_classes and output.ndim > 1 and output.shape[2:] == wanted[2:]:
                solution = (
                    f"the model has {output.shape[1]} outputs for data.num_classes="
                    f"{self.num_classes}: give it as many (model.num_classes, if it takes that)"
                )
            raise ModelError(
                f"the model's output has shape {[*output.shape]}, but the targets, "
                f"{[*target.shape]}, require {[*wanted]}: {solution}"
            )

    def metric_names(self) -> list[str]:
        """Return the names of the metrics of an evaluation: one for each key of a metric."""
        names = [*self.losses.names, *self.score_names]
        for name, metric in self._metrics.items():
            keys = getattr(metric, "keys", ())
            if isinstance(keys, list | tuple) and keys:
                names += [f"{name}_{key}" for key in keys]
            else:
                names.append(name)
        return names

    def modes(self) -> Mapping[str, str]:
        """Return the directions of the metrics, and "max" for the accuracy of each class."""
        modes = dict(super().modes())
        for name, metric in self._metrics.items():
            if isinstance(metric, PerClassAccuracy):
                modes |= {f"{name}_{key}": "max" for key in metric.keys}
        return modes

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics that keep a state."""
        return self._metrics

    def counts(self, batch: Any) -> Mapping[str, Tensor | int]:
        """Return the denominators that depend on the labels."""
        return self.losses.counts(pair_of(batch)[1])

    def own_modules(self) -> dict[str, nn.Module]:
        """Return the losses, and the modules that a subclass adds."""
        return {**super().own_modules(), **self.losses.modules}

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute loss and scores of a batch."""
        inputs, target = pair_of(batch)
        target = self.target_of(target)
        inputs = self.losses.prepare_inputs(inputs)
        return self._compute(self.answer(model, inputs), target, inputs, model)

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute loss, scores and metrics of a batch."""
        inputs, target = pair_of(batch)
        target = self.target_of(target)
        output = self.answer(model, inputs)
        result = self._compute(output, target, inputs, model)
        self.update_metrics(output, target)
        result.output = output
        return result

    def update_metrics(self, output: Any, target: Any) -> None:
        """Add a batch to the metrics; those that count classes get `labels_of` the target."""
        for metric in self._metrics.values():
            if takes_texts(metric):
                continue  # `update_text_metrics`
            if isinstance(metric, (ConfusionMatrix, Perplexity)):
                metric.update(output, self.labels_of(target))
            else:
                metric.update(output, target)

    def update_text_metrics(self, answers: Sequence[str], references: Sequence[str]) -> None:
        """Add the texts that a model wrote, and those that the data have, to the metrics of texts.

        Nothing is added of a batch without a text.
        """
        if not answers:
            return
        for metric in self._metrics.values():
            if takes_texts(metric):
                metric.update(answers, references)

    def labels_of(self, target: Tensor) -> Tensor:
        """Return the class at each position of a target; below 0 where the loss ignores it."""
        labels, _ = self.losses.valid_labels(target)
        return labels

    def prediction_step(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output for a batch, with or without targets."""
        if isinstance(batch, Mapping) and (LABELS in batch or takes_names(model, batch)):
            return self.answer(model, named_inputs(batch))
        return self.answer(model, inputs_of(batch))

    def _correct(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor | int]:
        """Return how many labels (n, ...) the largest logits (n, classes, ...) hit, of how many."""
        labels, count = self.losses.valid_labels(target)
        return count_true(output.detach().argmax(1) == labels), count

    def _compute(self, output: Any, target: Any, inputs: Any, model: nn.Module) -> StepOutput:
        try:
            self.check(output, target)
        except ModelError as error:
            error.change(
                lambda problem: replace(
                    problem,
                    message=f"{problem.message} ({qualified_name(model)}.forward was given "
                    f"{describe_value(inputs)})",
                )
            )
            raise
        try:
            loss, counts = self.losses(output, target, inputs, model)
        except IndexError as error:  # torch's "Target 7 is out of bounds"
            # The host waits for the labels: the run ends here.
            low = int(target.min())
            high = int(target.max())
            solution = f"; with more classes set data.num_classes={high + 1}" if low >= 0 else ""
            raise SampleError(
                f"labels from {low} to {high}, but data.num_classes={self.num_classes}: what the "
                "data set returns as a label must be at least 0 and less than that: labels start "
                f"at 0{solution}"
            ) from error
        return StepOutput(loss, counts, self.scores(output, target))
