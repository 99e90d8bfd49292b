"""Evaluation: the metrics of a data set, with each sample counted once on any devices (I4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from data.batch import MicroBatch
from trainer import rng
from trainer.errors import ModelError
from trainer.rng import derived
from trainer.strategies.strategy import Strategy
from trainer.task import Metric, StepOutput, as_output, unsound
from trainer.update.batch import BatchSource, as_source
from trainer.update.labels import Labels
from trainer.update.misfit import MISFITS, misfit
from trainer.update.parts import Parts
from trainer.update.sums import Sums
from trainer.update.waiting import Waiting

_UNFIT = "this batch of an evaluation does not fit (does transforms.eval do as transforms.train?)"
Watcher = Callable[[Any, Any, Any], None]  # trainer, batch, the model's answer


class EvaluationAbandoned(Exception):  # noqa: N818 (not an error: a signal came)
    """A stop was requested while evaluating."""


class Evaluator:
    """Evaluate a model with a task's metrics."""

    def __init__(self, parts: Parts, waiting: Waiting) -> None:
        wraps = parts.strategy.evaluates_wrapped
        self._module = parts.wrapped if wraps else parts.compiled
        check_metrics(parts.task.metrics(), parts.strategy)
        self._parts = parts
        self._waiting = waiting
        self._labels = Labels()

    @torch.no_grad()
    def run(
        self,
        loader: Any,
        stage: str,
        weights: AbstractContextManager[Any],
        limit: int | None,
        step: int,
        watchers: Sequence[Watcher] = (),
    ) -> dict[str, float]:
        """Return `<stage>/<name>` of the first `limit` batches, within the context `weights`.

        `watchers` are called with each batch and what the model answered.

        The evaluation has its own random states, derived from the seed and `step`: it does not
        change the training that follows, and a repeated evaluation draws the same numbers.

        Raises EvaluationAbandoned when a signal has requested a stop.
        """
        sums, metrics = Sums(self._parts.strategy.device), self._parts.task.metrics()
        for metric in metrics.values():
            metric.reset()
        source = as_source(loader, 1)
        stream, batches = self._waiting.attend(source).epoch(0, 0, limit), _batches(source, limit)
        done = 0
        with self.prepared(weights, step):
            while (micro_batch := self._waiting.next(stream)) is not None:
                self._add(micro_batch, sums, watchers)
                done += 1
                self._parts.hooks.emit("on_evaluation_batch", self._parts, stage, done, batches)
                self._parts.strategy.group.agree(self._parts.state, at_once=False)
                if self._parts.state.stop_code:
                    break
        if self._parts.state.stop_code:
            raise EvaluationAbandoned
        # A process may have had no sample at all, but must take part in the reduction.
        for names in self._parts.strategy.group.gather(sums.names):
            sums.take_part(names)
        values = sums.means(self._parts.strategy.group.reduce)
        self._labels.look(stage, sums, self._parts.strategy.group.is_main)
        for name, metric in metrics.items():
            values |= named_values(name, merged(metric, self._parts.strategy).compute())
        return {f"{stage}/{name}": value for name, value in values.items()}

    @contextmanager
    def prepared(self, weights: AbstractContextManager[Any], step: int) -> Iterator[None]:
        """Bring the model into the state of an evaluation, without gradients."""
        alone = self._own_generators(step), self._evaluating()
        with torch.no_grad(), alone[0], alone[1], weights, self._alike():
            yield

    def _add(self, micro_batch: MicroBatch, sums: Sums, watchers: Sequence[Watcher]) -> None:
        batch = self._parts.to_device(micro_batch.batch)
        count = micro_batch.piece.count
        with self._parts.precision.autocast():
            if count:
                output = self._evaluation_step(batch)
                self._add_output(output, count, sums)
                for watch in watchers:
                    watch(self._parts, batch, output.output)
            elif self._parts.strategy.evaluates_in_step:
                # The other processes wait for this process's shards of the parameters.
                self._parts.task.prediction_step(self._module, batch)

    def _add_output(self, output: StepOutput, count: int, sums: Sums) -> None:
        try:
            sums.add_output(output, count)
            sums.pack()
        except MISFITS as error:
            task = self._parts.task
            raise unsound(output, task, "evaluation_step") or error from None

    def _own_generators(self, step: int) -> AbstractContextManager[None]:
        strategy = self._parts.strategy
        seed = derived(self._parts.options.seed, "evaluation", step, strategy.group.rank)
        return rng.keyed(strategy.device, seed)

    @contextmanager
    def _alike(self) -> Iterator[None]:
        """Use the main process's buffers on all processes; restore those of the task after."""
        strategy = self._parts.strategy
        with strategy.evaluating(self._parts.model), ExitStack() as stack:
            if strategy.group.world_size > 1:
                for module in self._parts.task.own_modules().values():
                    stack.enter_context(_kept(module))
                    stack.enter_context(strategy.evaluating(module))
            yield

    def _evaluation_step(self, batch: Any) -> StepOutput:
        try:
            result = self._parts.task.evaluation_step(self._module, batch)
            return as_output(result, self._parts.task, "evaluation_step")
        except MISFITS as error:
            updates = self._parts.state.updates
            if (known := misfit(error, batch, updates, _UNFIT)) is not None:
                raise known from error
            raise

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        parts = [self._parts.wrapped, *self._parts.task.own_modules().values()]
        modes = [(module, module.training) for part in parts for module in part.modules()]
        for part in parts:
            part.eval()
        try:
            yield
        finally:
            for module, mode in modes:  # a frozen module stays in evaluation mode
                module.training = mode


def _batches(source: BatchSource, limit: int | None) -> int | None:
    try:
        length = len(source)
    except TypeError:
        return limit
    return length if limit is None else min(limit, length)


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in values:
            buffer.copy_(value)


def check_metrics(metrics: Mapping[str, Metric], strategy: Strategy) -> None:
    """Raise ModelError for metrics that cannot be combined over several processes."""
    if strategy.devices == 1 or strategy.name not in ("ddp", "fsdp"):
        return
    for name, metric in metrics.items():
        if not (hasattr(metric, "merge") or hasattr(metric, "merge_state") or _meets(metric)):
            raise ModelError(
                f"task.metrics.{name}: {type(metric).__name__} sees the samples of one process of "
                f"{strategy.devices}: give it merge(reduce), where reduce(tensor) is the sum over "
                "the processes, or merge_state(others); or use strategy=single"
            )


def _meets(metric: Metric) -> bool:
    """Return whether a metric is from torchmetrics, which synchronizes in `compute`."""
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(metric).mro())


def merged(metric: Any, strategy: Strategy) -> Any:
    """Return the metric of the samples of all processes; a collective."""
    if hasattr(metric, "merge"):
        metric.merge(strategy.group.reduce)
    elif hasattr(metric, "merge_state") and strategy.group.world_size > 1 and not _meets(metric):
        metric, *others = strategy.group.gather(metric)
        metric.merge_state(others)
    return metric


def named_values(name: str, value: Any) -> dict[str, float]:
    """Return a metric's value, or its several values, by name."""
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(single) for key, single in value.items()}
    if isinstance(value, torch.Tensor) and value.ndim:
        return {f"{name}_{i}": single for i, single in enumerate(value.flatten().tolist())}
    return {name: float(value)}
