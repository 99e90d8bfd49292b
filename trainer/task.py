"""The interface of tasks: what a step computes, its loss and the sums for metrics."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from regimen.data.batch import dtype_for, inputs_of, map_tensors, to_device
from regimen.trainer.device import module_to_device
from regimen.trainer.errors import ModelError, UserCodeError, describe_value, qualified_name

# How the names of buffers end that hold the frequencies of rotary positions: angles are these times
# a position, so that one rounded to bfloat16 is off by radians after some hundred positions.
_FREQUENCIES = "inv_freq"


class Metric(Protocol):
    """A metric that keeps a state, such as a class of torchmetrics.

    The metrics of torchmetrics synchronize over processes by themselves. With several processes any
    other metric needs either `merge(reduce)`, which replaces its state by that of all processes
    (`reduce` returns the sum of a tensor over them), or `merge_state(others)`, which adds the state
    of the metrics of the other processes.
    """

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch to the state."""

    def compute(self) -> Any:
        """Return the value over all batches since `reset`."""

    def reset(self) -> None:
        """Reset the state."""


class _Sum(Enum):
    """Marks a loss term as a sum over the samples, which is not divided by a denominator."""

    SUM = "sum"


SUM: Final = _Sum.SUM


@dataclass(slots=True)
class StepOutput:
    """The results of one micro-batch.

    `loss`: a scalar, the mean over the samples of the micro-batch, or one value for each sample; or
    a dict of such terms by name, which are added.
    `counts`: the denominators of terms whose mean is not over the samples (but over tokens, or with
    class weights): the part of this micro-batch, as `Task.counts` returns it; or `SUM` for a sum
    over the samples, which is logged divided by their number.
    `sums`: for each metric the sum over the micro-batch and the number of summands.
    `output`: of an evaluation, what the model answered, for callbacks that show it.
    """

    loss: Tensor | Mapping[str, Tensor]
    counts: Mapping[str, Tensor | float | _Sum] = field(default_factory=dict)
    sums: Mapping[str, tuple[Tensor, Tensor | int]] = field(default_factory=dict)
    output: Any = None

    @property
    def terms(self) -> Mapping[str, Tensor]:
        """The terms of the loss by name; a single one has none."""
        return {"": self.loss} if isinstance(self.loss, Tensor) else self.loss


def as_output(result: Any, task: Task, step: str) -> StepOutput:
    """Return what a step of a task returned as a StepOutput: a tensor is a loss.

    Raises UserCodeError for anything else.
    """
    if isinstance(result, StepOutput):
        return result
    if isinstance(result, Tensor):
        return StepOutput(result)
    change = "return the loss"
    if isinstance(result, Mapping):
        change = "return StepOutput(loss) with regimen.StepOutput, where a loss may be a dict"
    elif result is None:
        change = "its last line must return the loss"
    raise UserCodeError(
        f"{qualified_name(task)}.{step} returned {describe_value(result)}, and not a loss (a "
        f"tensor) or a StepOutput: {change}"
    )


def diagnose_step_output(
    output: StepOutput, task: Task, step: str, model: nn.Module | None = None
) -> UserCodeError | None:
    """Return what is wrong with a step's result, after it could not be used; None if nothing is.

    `model`: the one that was trained; None in an evaluation.
    """
    where = f"{qualified_name(task)}.{step} returned a StepOutput whose"
    terms = output.loss if isinstance(output.loss, Mapping) else {"": output.loss}
    has_gradient = any(isinstance(term, Tensor) and term.requires_grad for term in terms.values())
    for name, term in terms.items():
        which = f"loss {name!r}" if name else "loss"
        if not isinstance(term, Tensor):
            return UserCodeError(
                f"{where} {which} is {describe_value(term)}: give the tensor, without .item() or "
                "float()"
            )
        if model is not None and not has_gradient:
            return UserCodeError(
                f"{where} {which} ({describe_value(term)}) has no gradient: compute it from what "
                f"{qualified_name(model)}.forward returns, and neither there nor in the task with "
                ".detach(), .item(), numpy or torch.no_grad()"
            )
    for name, pair in output.sums.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Tensor)):
            return UserCodeError(
                f"{where} sums[{name!r}] is {describe_value(pair)}: give the sum over the samples "
                "as a tensor and their number, such as (hits.sum(), len(labels))"
            )
    return None


class Task:
    """Base class of tasks: the loss and the metrics that a model is trained with.

    The model is an argument of every step, so that a task never holds a wrapped model (DDP,
    compiled).
    """

    # Names of the optimizers that take turns on each update's batch (for example those of a GAN),
    # each with its own loss. Empty: all step together on one loss.
    turns: Sequence[str] = ()
    # Whether each turn has a batch of `loader.batch_size` samples of its own; else all turns of an
    # update have the same one. An epoch ends where less than a batch for each turn is left.
    fresh_batches: bool = False
    # Names of the loss terms whose denominators depend on the data; `counts` returns these.
    count_names: Sequence[str] = ()
    # Whether the loss of a sample depends on the other samples of its micro-batch, as that of
    # contrastive learning does: an update that is split is then another one. The plan and the log
    # say so.
    couples_samples: bool = False
    # Names of attributes that are its state between batches: the hidden state of truncated
    # backpropagation, a memory bank. Tensors and plain values, also in lists, tuples and dicts.
    # Checkpoints hold them; an evaluation, and an update that is undone, put them back.
    persistent: Sequence[str] = ()
    # Whether an evaluation calls parts of the model, and each process as often as it likes: sharded
    # parameters are then gathered once, for the whole of it.
    writes_texts: bool = False
    # The kind of values that `interpret` returns: "classes" (probabilities [n, classes]),
    # "labels" (probabilities [n, labels]), "values" ([n] or [n, outputs]), "mask" (class indices
    # [n, H, W]), "text" (logits of the next token, [n, vocabulary, length]), "boxes" (for each
    # sample a dict of `boxes` [m, 4] as x1 y1 x2 y2, `scores` [m] and `labels` [m]), or "array"
    # (anything else).
    output_kind: str = "array"

    def metric_names(self) -> Sequence[str]:
        """Return the names of the metrics of an evaluation, without the stage: `loss`, ..."""
        return ["loss"]

    def monitor(self) -> str | None:
        """Return the metric that the best checkpoint is chosen by; None if there is none.

        Callbacks use it where their `monitor` is `auto`.
        """
        return "accuracy" if "accuracy" in self.metric_names() else "loss"

    def modes(self) -> Mapping[str, str]:
        """Return which values of its metrics are better, "min" or "max", by the metric's name.

        Of a metric that is left out the words of its name decide
        (`regimen.trainer.state.direction_of`). The default is the metrics' own `higher_is_better`,
        which those of torchmetrics have.
        """
        modes: dict[str, str] = {}
        for name, metric in self.metrics().items():
            higher_is_better = getattr(metric, "higher_is_better", None)
            if higher_is_better is True:
                modes[name] = "max"
            elif higher_is_better is False:
                modes[name] = "min"
        return modes

    def on_epoch_start(self, epoch: int) -> None:
        """Called before the first batch of an epoch, counted from 0; not where a resume goes on."""

    def on_evaluation_start(self, stage: str) -> None:
        """Called before the first batch of an evaluation, in which the model answers.

        `stage`: `val`, `test`, `val/<set>`, or `predict` where answers are all that is asked for.
        The attributes in `persistent` are put back after it.
        """

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput | Tensor:
        """Compute the loss of a micro-batch; a tensor stands for `StepOutput(loss)`."""
        raise UserCodeError(missing_step(type(self), "training_step"))

    def turn_step(self, model: nn.Module, batch: Any, turn: str) -> StepOutput | Tensor:
        """Compute the loss of a micro-batch for the optimizer whose turn it is.

        An override may have a further parameter, `index`: how many turns of the update were before.
        """
        raise UserCodeError(missing_step(type(self), "turn_step"))

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput | Tensor:
        """Compute loss and metrics without gradients."""
        return self.training_step(model, batch)

    def check_training(self, model: nn.Module, dataset: Any) -> None:
        """Raise ModelError for a model that cannot be trained on a data set.

        Called before a run by all processes, with the model on its device.
        """

    def check_evaluation(self, model: nn.Module, datasets: Mapping[str, Any]) -> None:
        """Raise ModelError for a model, or for data sets, that `evaluation_step` cannot use.

        Called before a run: with a model on the meta device and no data set, then with those that
        are evaluated, by stage.
        """

    def counts(self, batch: Any) -> Mapping[str, Tensor | float]:
        """Return this batch's part of the denominators of `count_names`, on the host if known.

        The denominator of an update is the sum over all its micro-batches and devices, so it must
        be known before the first backward pass.
        """
        return {}

    def own_modules(self) -> Mapping[str, nn.Module]:
        """Return the modules of the task by name, such as losses and teachers.

        The default is all attributes that are modules. Their trainable parameters are trained under
        the name `task.<name>.<parameter>`, and their state is saved.
        """
        return {name: part for name, part in vars(self).items() if isinstance(part, nn.Module)}

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics with a state, the same each time; `evaluation_step` updates them."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the attributes in `persistent`."""
        state = {}
        for name in self.persistent:
            value = getattr(self, name)
            state[name] = map_tensors(lambda tensor: tensor.detach().clone(), value)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Move modules, tensors and metrics to the device of the batches.

        Floating-point tensors, and those of modules, become `dtype`. Raises ModelError for a
        parameter that is in no module: it would not be trained.
        """
        for name, value in list(vars(self).items()):
            if isinstance(value, nn.Parameter):
                raise ModelError(
                    f"{qualified_name(self)}.{name} is a parameter outside of a module, which is "
                    f"not trained: keep it in one, such as self.{name} = nn.ParameterList([...])"
                )
            if first_tensor(value) is not None:
                setattr(self, name, to_device(value, device, dtype))
        for module in self.own_modules().values():
            module_to_device(module if dtype is None else in_format(module, dtype), device)
        for metric in self.metrics().values():
            if hasattr(metric, "to"):
                metric.to(device)

    def prediction_step(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output for a batch.

        If the batch is a dict and the model's `forward` has parameters of the names of its keys,
        these are passed by keyword.
        """
        inputs = inputs_of(batch)
        if not isinstance(inputs, Mapping) or not takes_names(model, inputs):
            return model(inputs)
        parameters = _named_parameters(model)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return model(**inputs)
        return model(**{name: inputs[name] for name in inputs if name in parameters})

    def interpret(self, output: Any) -> Any:
        """Convert the result of `prediction_step` to the values that `output_kind` describes."""
        return output


def takes_names(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether a model's forward has parameters of the names of some inputs."""
    return not _named_parameters(model).keys().isdisjoint(inputs)


def _named_parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters of a model's forward but for `*args`, which no name reaches."""
    parameters = inspect.signature(model.forward).parameters
    return {name: p for name, p in parameters.items() if p.kind is not p.VAR_POSITIONAL}


def first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor of a nested batch."""
    return next(tensors_of(batch), None)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch."""
    if isinstance(batch, Tensor):
        yield batch
        return
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, list | tuple):
        return
    for child in batch:
        yield from tensors_of(child)


def in_format(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Store a module's floating-point tensors in `dtype`, complex ones in its counterpart.

    The frequencies of rotary positions are never rounded: they keep a more precise format.
    """
    frequencies = set[int]()
    for name, buffer in module.named_buffers():
        if name.endswith(_FREQUENCIES) and buffer.dtype.itemsize > dtype.itemsize:
            frequencies.add(id(buffer))

    def converted(tensor: Tensor) -> Tensor:
        if id(tensor) in frequencies:
            return tensor
        # `Module.to(torch.float64)` would discard imaginary parts.
        return tensor.to(dtype_for(tensor, dtype))

    module._apply(converted)  # type: ignore[no-untyped-call]
    return module


def take_turn(task: Task, model: nn.Module, batch: Any, index: int) -> Any:
    """Return what `turn_step` returns for the turn of that number, counted from 0."""
    turn = task.turns[index]
    if _takes_index(type(task).turn_step):
        return task.turn_step(model, batch, turn, index=index)  # type: ignore[call-arg]
    return task.turn_step(model, batch, turn)


@functools.cache
def _takes_index(turn_step: Callable[..., Any]) -> bool:
    return "index" in inspect.signature(turn_step).parameters


def batches_per_update(task: Task) -> int:
    """Return of how many batches of the loader an update consists: of one for each fresh turn."""
    return len(task.turns) if task.fresh_batches and task.turns else 1


def updates_in(batches: int, task: Task) -> int:
    """Return how many updates an epoch of that many batches has.

    Raises ModelError where there are too few for a single one.
    """
    updates = batches // batches_per_update(task)
    if not updates:
        raise ModelError(
            "task.fresh_batches",
            f"gives each of the {len(task.turns)} turns of an update a batch of its own, and an "
            f"epoch has {batches}",
            "lower loader.batch_size, or set task.fresh_batches=false",
        )
    return updates


def check_persistent(task: Task) -> None:
    """Raise ModelError unless `persistent` names attributes of the task."""
    if isinstance(task.persistent, str):
        raise ModelError(
            f"{qualified_name(task)}.persistent is a text: give the names of its attributes, "
            f'such as ("{task.persistent}",)'
        )
    for name in task.persistent:
        if not hasattr(task, name):
            raise ModelError(
                f"{qualified_name(task)}.persistent names {name!r}, and the task has no such "
                f"attribute: set self.{name} = None in its __init__, or in its class"
            )


def missing_step(kind: type, step: str) -> str:
    """Say that a task lacks the method that computes its loss."""
    given = "self, model, batch, turn" if step == "turn_step" else "self, model, batch"
    return (
        f"{kind.__module__}.{kind.__qualname__} defines no {step}({given}): let it return the "
        "loss of a batch, a tensor, or a regimen.trainer.task.StepOutput"
    )


def batch_dependence_warning(
    task: Task, model: nn.Module, micro_batches: int, devices: int
) -> str | None:
    """Say that a split changes the training; None where it does not, or nothing is split.

    A model that computes its own loss has an attribute `couples_samples`, too.
    """
    coupling = [part for part in (task, model) if getattr(part, "couples_samples", False) is True]
    if not coupling or micro_batches * devices == 1:
        return None
    return (
        f"{qualified_name(coupling[0])} couples the samples of a micro-batch (couples_samples): an "
        f"update that is split over {devices} devices and {micro_batches} micro-batches is not "
        "that of the whole batch; the same training needs trainer.gradient_accumulation_steps=1 "
        "and one device"
    )


def by_stage(val_loader: Any) -> dict[str, Any]:
    """Return validation loaders by stage: `val` for one, `val/<set>` for each of a dict."""
    if not isinstance(val_loader, Mapping):
        return {"val": val_loader}
    named = {}
    for name, loader in val_loader.items():
        is_stage = name == "val" or str(name).startswith("val/")
        named[name if is_stage else f"val/{name}"] = loader
    return named


def named_modules(task: Task) -> dict[str, nn.Module]:
    """Return a task's own modules by the prefix of their parameters' names (`task.loss`)."""
    return {f"task.{name}": module for name, module in task.own_modules().items()}
