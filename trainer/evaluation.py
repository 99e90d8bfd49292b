"""Evaluation and prediction: metrics with each sample counted once on any devices (I4), answers."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from regimen.data.batch import MicroBatch, concat_batches, map_tensors
from regimen.trainer import rng
from regimen.trainer.callback import Hooks
from regimen.trainer.components.components import Components
from regimen.trainer.components.setup import in_callers_words
from regimen.trainer.components.sources import as_source
from regimen.trainer.errors import (
    SHAPE_ERRORS,
    ModelError,
    UserCodeError,
    explain_shape_error,
    qualified_name,
)
from regimen.trainer.options import batches_of
from regimen.trainer.strategies.strategy import NULL_CONTEXT, Strategy
from regimen.trainer.task import Metric, as_output, diagnose_step_output
from regimen.trainer.update.guard import UpdateBackup
from regimen.trainer.update.means import MeanAccumulator
from regimen.trainer.update.updater import WHY_NO_LABEL_COUNTS, warn_without_labels

_UNFIT = "this batch of an evaluation does not fit (does transforms.eval do as transforms.train?)"


class EvaluationAbandoned(Exception):  # noqa: N818 (not an error: a signal came)
    """A stop was requested while evaluating."""


@torch.no_grad()
def evaluate(
    components: Components,
    loader: Any,
    stage: str,
    limit: int | None = None,
    step: int = 0,
    hooks: Hooks | None = None,
    shows_batches: bool = False,
) -> dict[str, float]:
    """Return `<stage>/<name>` of the first `limit` batches; see `Trainer.evaluate`.

    Nothing, and a warning, where no label counts: sums over no label would read like results.
    `step`: of the weights; it keys what is drawn at random. `hooks`: of the callbacks that are told
    of the progress, and with `shows_batches` also given each batch and what the model answered. A
    collective of all processes. Raises EvaluationAbandoned when a signal has requested a stop.
    """
    group = components.group
    state = components.state
    loader = components.bind_loader(loader)
    if not getattr(getattr(loader, "dataset", None), "has_labels", True):
        warn_without_labels(
            components,
            stage,
            f"no label counts in {stage}, whose figures are left out: the data have no labels",
        )
        return {}
    means = MeanAccumulator(components.strategy.device)
    metrics = components.task.metrics()
    for metric in metrics.values():
        metric.reset()
    source = as_source(loader, f"{stage}_loader", 1, components.options.seed)
    source = components.reader.connect(source)
    batches = batches_of(source, limit, "limit")
    done = 0
    stream = source.epoch(0, 0, limit)
    with in_callers_words(components.options), evaluation_mode(components, stage, step):
        last_batch = None
        while (micro_batch := components.reader.next(stream)) is not None:
            _add_batch(components, micro_batch, means, hooks if shows_batches else None)
            last_batch = micro_batch.batch
            done += 1
            if hooks is not None:
                hooks.emit("on_evaluation_batch", stage, done, batches)
            # A collective whose answer may come one batch later, so that nobody waits for it.
            group.agree_on_stop(state, at_once=False)
            if state.stop_code:
                break
        if last_batch is not None:
            _end_alike(components, last_batch)
    if state.stop_code:
        raise EvaluationAbandoned

    # Collectives: the means and metrics are those over the samples of all processes.
    means.add_missing_keys(group)
    values = means.means(group.reduce)
    if means.has_no_labels:
        warn_without_labels(
            components,
            stage,
            f"no label counts in {stage}, whose figures are left out: {WHY_NO_LABEL_COUNTS}",
        )
        return {}
    for name, metric in metrics.items():
        parts = named_values(name, merged(metric, components.strategy).compute())
        for taken in sorted(parts.keys() & values.keys()):
            raise UserCodeError(
                f"{qualified_name(components.task)}: {stage}/{taken} would be two metrics, one of "
                f"metrics() ({name}) and another: give one of them another name"
            )
        values |= parts
    return {f"{stage}/{name}": value for name, value in values.items()}


def _add_batch(
    components: Components, micro_batch: MicroBatch, means: MeanAccumulator, hooks: Hooks | None
) -> None:
    """Add the loss and metrics of a batch; `hooks` are given it, and what the model answered."""
    task = components.task
    strategy = components.strategy
    model = _called_model(components)
    batch = components.to_device(micro_batch.batch)
    output = None
    with components.precision.autocast():
        if not micro_batch.batch_slice.count:
            if strategy.evaluates_in_step:
                # The other processes wait for this process's shards of the parameters.
                task.prediction_step(model, batch)
            return
        try:
            output = as_output(task.evaluation_step(model, batch), task, "evaluation_step")
            means.add_output(output, micro_batch.batch_slice.count)
            means.stack_pending()
        except SHAPE_ERRORS as error:
            if output is not None:
                wrong = diagnose_step_output(output, task, "evaluation_step")
                if wrong is not None:
                    raise wrong from None
                raise error from None
            explained = explain_shape_error(error, batch, components.state.updates, _UNFIT)
            if explained is not None:
                raise explained from error
            raise
        if hooks is not None:
            hooks.emit("on_validation_batch", batch, output.output)


def _called_model(components: Components) -> nn.Module:
    """Return the form of the model that an evaluation calls."""
    if components.strategy.evaluates_wrapped:
        return components.training_model
    return components.compiled_model


def _end_alike(components: Components, batch: Any) -> None:
    """Let what was called last be the whole model, where processes call parts of it at will.

    The first backward pass after an evaluation gathers ahead, with FSDP, what was called before its
    forward pass: on each process the same, or they would wait for each other for ever.
    """
    if components.task.writes_texts and components.strategy.evaluates_in_step:
        with components.precision.autocast():
            components.task.prediction_step(_called_model(components), components.to_device(batch))


def predict(components: Components, data: Any, batch_size: int) -> Any:
    """Return the interpreted outputs for all samples of `data`; see `Trainer.predict`.

    Raises ModelError for data that are neither batches nor inputs, or that hold no sample.
    """
    task = components.task
    answers = []
    with evaluation_mode(components), torch.inference_mode():
        for batch in _batches_of(components, data, batch_size):
            batch = components.to_device(batch)
            try:
                with components.precision.autocast():
                    output = task.prediction_step(components.model, batch)
                    values = task.interpret(output)
            except SHAPE_ERRORS as error:
                explained = explain_shape_error(error, batch, 0)
                if explained is not None:
                    raise explained from error
                raise
            # Waits for the device: the outputs of a large data set need not fit on it.
            answers.append(map_tensors(lambda value: value.cpu(), values))
    if not answers:
        raise ModelError("predict: the data hold no sample")
    if task.output_kind == "boxes":  # a list of the samples' answers
        return [answer for batch_answers in answers for answer in batch_answers]
    return concat_batches(answers)


def _batches_of(components: Components, data: Any, batch_size: int) -> Iterator[Any]:
    """Yield the batches of a loader, or those of inputs that are one tensor."""
    inputs = data
    if hasattr(data, "to_numpy"):  # a DataFrame of pandas or Polars
        inputs = data.to_numpy()
    if isinstance(inputs, np.ndarray):
        inputs = torch.from_numpy(np.ascontiguousarray(inputs))
    if isinstance(inputs, Tensor):
        if inputs.is_floating_point():  # an array of numpy's is float64, and hardly any model
            inputs = inputs.to(components.parameter_dtype or torch.get_default_dtype())
        for start in range(0, len(inputs), batch_size):
            yield inputs[start : start + batch_size]
    elif hasattr(data, "epoch"):  # a loader of ours
        _refuse_shuffled(getattr(data, "shuffles", False))
        for micro_batch in components.bind_loader(data).epoch(0, 0):
            if micro_batch.batch_slice.count:  # else all of its samples were left out
                yield micro_batch.batch
    elif isinstance(data, Iterable):
        _refuse_shuffled(isinstance(getattr(data, "sampler", None), RandomSampler))
        yield from data
    else:
        raise ModelError(
            f"predict: {type(data).__name__} is neither a loader (an iterable of batches) nor a "
            "tensor, an array or a DataFrame of inputs"
        )


def _refuse_shuffled(shuffles: bool) -> None:
    """Raise ModelError for a loader whose answers would be in an unknown order."""
    if shuffles:
        raise ModelError(
            "predict: the loader shuffles, so that no answer could be told to its sample: make one "
            "with shuffle=False"
        )


@contextmanager
def evaluation_mode(
    components: Components, stage: str = "predict", step: int | None = None
) -> Iterator[None]:
    """Bring model and task into the state of an evaluation, without gradients.

    The model has the weights to evaluate, the buffers of the main process on all, and random states
    derived from the seed and `step` (default: the run's): the training that follows is not changed,
    and a repeated evaluation draws the same numbers. The task is told the `stage`. Each module's
    mode, the task's state between batches and the buffers of its modules are as before afterwards.
    """
    strategy = components.strategy
    task_modules = list(components.task.own_modules().values())
    called = nn.ModuleList([components.training_model, *task_modules])
    modes = [(module, module.training) for module in called.modules()]
    if step is None:
        step = components.state.global_step
    seed = rng.derived_seed(components.options.seed, "evaluation", step, strategy.group.data_rank)
    saved = nn.ModuleList([components.model, *task_modules])
    before = UpdateBackup(task_modules, task=components.task)
    before.save()
    with torch.no_grad(), rng.seeded(strategy.device, seed):
        called.eval()
        try:
            with evaluation_weights(components), strategy.evaluating(saved):
                whole: AbstractContextManager[Any] = NULL_CONTEXT
                if components.task.writes_texts:
                    whole = strategy.unsharded(components.model)
                with whole:
                    components.task.on_evaluation_start(stage)
                    yield
        finally:
            before.restore()
            for module, mode in modes:  # a frozen module stays in evaluation mode
                module.training = mode


def evaluation_weights(components: Components) -> AbstractContextManager[Any]:
    """Return the context in which the model has the weights to evaluate: an average's, or its own.

    They are its own outside of this context.
    """
    if components.average is None:
        return NULL_CONTEXT
    return components.average.swap(components.model)


def check_metrics(metrics: Mapping[str, Metric], strategy: Strategy) -> None:
    """Raise ModelError for metrics that cannot be combined over several processes."""
    if strategy.devices == 1 or not strategy.starts_processes:
        return
    for name, metric in metrics.items():
        can_merge = hasattr(metric, "merge") or hasattr(metric, "merge_state")
        if not can_merge and not _synchronizes_itself(metric):
            raise ModelError(
                f"task.metrics.{name}: {type(metric).__name__} sees the samples of one process of "
                f"{strategy.devices}: give it merge(reduce), where reduce(tensor) is the sum over "
                "the processes, or merge_state(others); or use strategy=single"
            )


def _synchronizes_itself(metric: Metric) -> bool:
    # A metric of torchmetrics synchronizes in `compute`.
    return any(cls.__module__.partition(".")[0] == "torchmetrics" for cls in type(metric).mro())


def merged(metric: Any, strategy: Strategy) -> Any:
    """Return the metric of the samples of all processes; a collective."""
    group = strategy.group
    if hasattr(metric, "merge"):
        # A collective for each tensor of the metric's state.
        metric.merge(group.reduce)
    elif _synchronizes_itself(metric):
        if group.data is not None:
            for part in metric.modules():
                part.process_group = group.data
    elif hasattr(metric, "merge_state") and group.data_size > 1:
        # A collective: each process merges the metrics of all.
        metric, *others = group.gather_data(metric)
        metric.merge_state(others)
    return metric


def named_values(name: str, value: Any) -> dict[str, float]:
    """Return a metric's value, or its several values, by name; waits for the device."""
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(single) for key, single in value.items()}
    if isinstance(value, torch.Tensor) and value.ndim:
        # Waits for the device, once for all entries.
        return {f"{name}_{i}": single for i, single in enumerate(value.flatten().tolist())}
    return {name: float(value)}
