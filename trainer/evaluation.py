"""Evaluation and prediction: metrics with each sample counted once on any devices (I4), answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from regimen.data.batch import MicroBatch, concat_batches, map_tensors
from regimen.trainer import rng
from regimen.trainer.errors import (
    SHAPE_ERRORS,
    ModelError,
    UserCodeError,
    explain_shape_error,
    qualified_name,
)
from regimen.trainer.options import count
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.task import Metric, as_output, diagnose_step_output
from regimen.trainer.update.batch import as_source
from regimen.trainer.update.setup import in_callers_words
from regimen.trainer.update.sums import Sums

if TYPE_CHECKING:
    from regimen.trainer.trainer import Trainer

_UNFIT = "this batch of an evaluation does not fit (does transforms.eval do as transforms.train?)"


class EvaluationAbandoned(Exception):  # noqa: N818 (not an error: a signal came)
    """A stop was requested while evaluating."""


@torch.no_grad()
def evaluate(
    trainer: Trainer,
    loader: Any,
    stage: str,
    limit: int | None,
    step: int,
    shown: bool = False,
) -> dict[str, float]:
    """Return `<stage>/<name>` of the first `limit` batches; see `Trainer.evaluate`.

    `shown`: callbacks are called with each batch and what the model answered. Raises
    EvaluationAbandoned when a signal has requested a stop.
    """
    group, state = trainer.group, trainer.state
    loader = trainer.for_this_run(loader)
    sums, metrics = Sums(trainer.strategy.device), trainer.task.metrics()
    for metric in metrics.values():
        metric.reset()
    source = as_source(loader, f"{stage}_loader", 1, trainer.options.seed)
    source = trainer.waiting.attend(source)
    batches = limit
    with suppress(TypeError):  # a stream has no length
        batches = count(limit, len(source))
    done, stream = 0, source.epoch(0, 0, limit)
    with in_callers_words(trainer.options), prepared(trainer, step):
        while (micro_batch := trainer.waiting.next(stream)) is not None:
            _add(trainer, micro_batch, sums, shown)
            done += 1
            trainer.hooks.emit("on_evaluation_batch", trainer, stage, done, batches)
            group.agree_on_stop(state, at_once=False)
            if state.stop_code:
                break
    if state.stop_code:
        raise EvaluationAbandoned
    sums.join(group)
    values = sums.means(group.reduce)
    trainer.updater.warn_of_labels(stage, sums)
    for name, metric in metrics.items():
        found = named_values(name, merged(metric, trainer.strategy).compute())
        for taken in sorted(found.keys() & values.keys()):
            raise UserCodeError(
                f"{qualified_name(trainer.task)}: {stage}/{taken} would be two metrics, one of "
                "metrics() "
                f"({name}) and another: give one of them another name"
            )
        values |= found
    return {f"{stage}/{name}": value for name, value in values.items()}


def predict(trainer: Trainer, data: Any, batch_size: int) -> Any:
    """Return the interpreted outputs for all samples of `data`; see `Trainer.predict`.

    Raises ModelError for data that are neither batches nor inputs, or that hold no sample.
    """
    answers = []
    with torch.inference_mode(), prepared(trainer, trainer.state.global_step):
        for batch in _batches_of(trainer, data, batch_size):
            placed = trainer.to_device(batch)
            try:
                with trainer.precision.autocast():
                    output = trainer.task.prediction_step(trainer.model, placed)
                    values = trainer.task.interpret(output)
            except SHAPE_ERRORS as error:
                known = explain_shape_error(error, placed, 0)
                if known is not None:
                    raise known from error
                raise
            # On the host at once: the outputs of a large data set need not fit the device.
            answers.append(map_tensors(lambda value: value.cpu(), values))
    if not answers:
        raise ModelError("predict: the data hold no sample")
    return concat_batches(answers)


def _batches_of(trainer: Trainer, data: Any, batch_size: int) -> Iterator[Any]:
    """Yield the batches of a loader, or those of inputs that are one tensor."""
    inputs = data
    if hasattr(data, "to_numpy"):  # a DataFrame of pandas or Polars
        inputs = data.to_numpy()
    if isinstance(inputs, np.ndarray):
        inputs = torch.from_numpy(np.ascontiguousarray(inputs))
    if isinstance(inputs, Tensor):
        if inputs.is_floating_point():  # an array of numpy's is float64, and hardly any model
            inputs = inputs.to(trainer.parameter_dtype or torch.get_default_dtype())
        for start in range(0, len(inputs), batch_size):
            yield inputs[start : start + batch_size]
    elif hasattr(data, "epoch"):  # a loader of ours
        _refuse_shuffled(data.shuffles)
        for micro_batch in trainer.for_this_run(data).epoch(0, 0):
            count = micro_batch.batch_slice.count
            yield map_tensors(lambda value, count=count: value[:count], micro_batch.batch)  # type: ignore[misc]
    elif isinstance(data, Iterable):
        _refuse_shuffled(isinstance(getattr(data, "sampler", None), RandomSampler))
        yield from data
    else:
        raise ModelError(
            f"predict: {type(data).__name__} is neither a loader (an iterable of batches) nor a "
            "tensor, an array or a DataFrame of inputs"
        )


def _refuse_shuffled(shuffles: bool) -> None:
    """Raise ModelError for a loader whose answers would be in an order that nobody knows."""
    if shuffles:
        raise ModelError(
            "predict: the loader shuffles, so that no answer could be told to its sample: make one "
            "with shuffle=False"
        )


@contextmanager
def prepared(trainer: Trainer, step: int) -> Iterator[None]:
    """Bring the model into the state of an evaluation, without gradients.

    With the weights to evaluate, the buffers of the main process on all, and random states derived
    from the seed and `step`: the training that follows is not changed, and a repeated evaluation
    draws the same numbers. Each module's mode and the buffers of the task's modules are as before
    afterwards.
    """
    strategy, others = trainer.strategy, list(trainer.task.own_modules().values())
    parts = nn.ModuleList([trainer.wrapped, *others])
    modes = [(module, module.training) for module in parts.modules()]
    seed = rng.derived_seed(trainer.options.seed, "evaluation", step, strategy.group.data_rank)
    saved = nn.ModuleList([trainer.model, *others])
    with torch.no_grad(), rng.seeded(strategy.device, seed):
        parts.eval()
        try:
            with trainer.evaluation_weights(), strategy.evaluating(saved):
                yield
        finally:
            for module, mode in modes:  # a frozen module stays in evaluation mode
                module.training = mode


def _add(trainer: Trainer, micro_batch: MicroBatch, sums: Sums, shown: bool) -> None:
    task, strategy, count = trainer.task, trainer.strategy, micro_batch.batch_slice.count
    model = trainer.wrapped if strategy.evaluates_wrapped else trainer.compiled
    batch, output = trainer.to_device(micro_batch.batch), None
    with trainer.precision.autocast():
        if not count:
            if strategy.evaluates_in_step:
                # The other processes wait for this process's shards of the parameters.
                task.prediction_step(model, batch)
            return
        try:
            output = as_output(task.evaluation_step(model, batch), task, "evaluation_step")
            sums.add_output(output, count)
            sums.pack()
        except SHAPE_ERRORS as error:
            if output is not None:
                raise diagnose_step_output(output, task, "evaluation_step") or error from None
            if known := explain_shape_error(error, batch, trainer.state.updates, _UNFIT):
                raise known from error
            raise
        if shown:
            trainer.hooks.emit("on_validation_batch", trainer, batch, output.output)


def check_metrics(metrics: Mapping[str, Metric], strategy: Strategy) -> None:
    """Raise ModelError for metrics that cannot be combined over several processes."""
    if strategy.devices == 1 or not strategy.starts_processes:
        return
    for name, metric in metrics.items():
        if not (hasattr(metric, "merge") or hasattr(metric, "merge_state") or _meets(metric)):
            raise ModelError(
                f"task.metrics.{name}: {type(metric).__name__} sees the samples of one process of "
                f"{strategy.devices}: give it merge(reduce), where reduce(tensor) is the sum over "
                "the processes, or merge_state(others); or use strategy=single"
            )


def _meets(metric: Metric) -> bool:
    # A metric of torchmetrics synchronizes in `compute`.
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(metric).mro())


def merged(metric: Any, strategy: Strategy) -> Any:
    """Return the metric of the samples of all processes; a collective."""
    if hasattr(metric, "merge"):
        metric.merge(strategy.group.reduce)
    elif _meets(metric):
        for part in metric.modules() if strategy.group.data is not None else ():
            part.process_group = strategy.group.data
    elif hasattr(metric, "merge_state") and strategy.group.data_size > 1:
        metric, *others = strategy.group.gather_data(metric)
        metric.merge_state(others)
    return metric


def named_values(name: str, value: Any) -> dict[str, float]:
    """Return a metric's value, or its several values, by name."""
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(single) for key, single in value.items()}
    if isinstance(value, torch.Tensor) and value.ndim:
        return {f"{name}_{i}": single for i, single in enumerate(value.flatten().tolist())}
    return {name: float(value)}
