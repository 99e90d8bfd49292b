"""The metrics of a data set: each sample counted once, for any number of devices (I4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from trainer.batch import MicroBatch, as_source
from trainer.metrics import Sums
from trainer.misfit import MISFITS, misfit
from trainer.parts import Parts
from trainer.task import StepOutput
from trainer.waiting import Waiting


class EvaluationAbandoned(Exception):  # noqa: N818 (not an error: a signal came)
    """A stop was requested while evaluating."""


class Evaluator:
    """Judge a model with a task's metrics."""

    def __init__(self, parts: Parts, waiting: Waiting) -> None:
        wraps = parts.strategy.evaluates_wrapped
        self._module = parts.wrapped if wraps else parts.compiled
        self._parts = parts
        self._waiting = waiting

    @torch.no_grad()
    def run(
        self, loader: Any, stage: str, weights: AbstractContextManager[Any], limit: int | None
    ) -> dict[str, float]:
        """Return `<stage>/<name>` of the first `limit` batches, within the context `weights`.

        Raises EvaluationAbandoned once a signal has asked for a stop.
        """
        sums, metrics = Sums(self._parts.strategy.device), self._parts.task.metrics()
        for metric in metrics.values():
            metric.reset()
        stream = as_source(loader, 1).epoch(0, 0, limit)
        alike = self._parts.strategy.evaluating(self._parts.model)
        with self._evaluating(), weights, alike:
            while (micro_batch := self._waiting.next(stream, measured=False)) is not None:
                self._add(micro_batch, sums)
                self._parts.strategy.agree(self._parts.state, at_once=False)
                if self._parts.state.stop_code:
                    break
        if self._parts.state.stop_code:
            raise EvaluationAbandoned
        values = sums.means(self._parts.strategy.reduce)
        for name, metric in metrics.items():
            if hasattr(metric, "merge"):  # torchmetrics' own meet when they compute
                metric.merge(self._parts.strategy.reduce)
            values |= named_values(name, metric.compute())
        return {f"{stage}/{name}": value for name, value in values.items()}

    def _add(self, micro_batch: MicroBatch, sums: Sums) -> None:
        batch = self._parts.to_device(micro_batch.batch)
        count = micro_batch.piece.count
        with self._parts.precision.autocast():
            if count:
                sums.add_output(self._judged(batch), count)
            elif self._parts.strategy.evaluates_in_step:
                # The others wait for this process's part of the parameters.
                self._parts.task.prediction_step(self._module, batch)

    def _judged(self, batch: Any) -> StepOutput:
        try:
            return self._parts.task.evaluation_step(self._module, batch)
        except MISFITS as error:
            if (known := misfit(error, batch, self._parts.state.updates)) is not None:
                raise known from error
            raise

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self._parts.wrapped.modules()]
        self._parts.wrapped.eval()
        try:
            yield
        finally:
            for module, mode in modes:  # a frozen module stays in evaluation
                module.training = mode


def named_values(name: str, value: Any) -> dict[str, float]:
    """Return a metric's value, or its several values, by name."""
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(single) for key, single in value.items()}
    if isinstance(value, torch.Tensor) and value.ndim:
        return {f"{name}_{i}": single for i, single in enumerate(value.flatten().tolist())}
    return {name: float(value)}
