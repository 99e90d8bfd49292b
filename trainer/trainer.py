"""The loop: fit, one update, validation; everything else is a collaborator's."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from data.batch import MicroBatch
from trainer import snapshot
from trainer.base import TrainerBase
from trainer.callback import saver_of
from trainer.errors import SampleError
from trainer.evaluation import EvaluationAbandoned, Watcher
from trainer.pace import log_is_due, validation_is_due
from trainer.state import MAX_TIME
from trainer.task import coupling_remark
from trainer.update.batch import updates
from trainer.user_code import account

_log = logging.getLogger(__name__)


class Trainer(TrainerBase):
    """Train a model: objects in, no config.

    `train_loader` and `val_loader` are `data.loading.loader.Loader`s, or any iterable of batches
    on one process; `optimizer` and `lr_scheduler` may be torch's own. Without `callbacks` each
    epoch prints a line. `run_dir` is where callbacks write: it is made where it is missing.
    """

    @property
    def _ended(self) -> bool:
        return self.done or self.state.stop_reason is not None

    def fit(self, resume: Path | str | None = None) -> None:
        """Train until the horizon, or until a stop is requested.

        `resume`: a checkpoint or the directory of a run to go on from; "auto" goes on with what
        `run_dir` holds, and starts there if it holds nothing.

        setup, resume (`trainer.snapshot.restore`), on_fit_start
        each epoch:             on_epoch_start
            each update:        on_update_start, (forward, backward) x micro-batches -> unscale
                                -> clip -> on_gradients -> step -> zero -> scheduler, on_update_end
                boundary:       scalars, on_log -> on_validation_start, _batch, _end -> on_boundary
            after the last one: on_epoch_end, before its boundary
        on_fit_end | on_exception, and teardown always
        `end`, after the test: on_run_end
        """
        try:
            self._warn_unsaved()
            if resume is not None:
                snapshot.go_on(self, resume)
            self._begin()
            while not self._ended:
                length = self.steps_per_epoch
                self.hooks.emit("on_epoch_start", self)
                for micro_batches in self._epoch(length):
                    self.hooks.emit("on_update_start", self, micro_batches)
                    self.update(micro_batches)
                    self.hooks.emit("on_update_end", self)
                    if self.state.position != length and self._boundary():
                        break
                else:
                    if not self.state.stop_code:  # else a signal ended the wait for a batch
                        self._end_epoch()
            self.updater.confirm()
            with self.timer.spending("start and end"):
                self.hooks.emit("on_fit_end", self)
        except BaseException as error:
            if (said := account(error)) is not None:
                error.add_note(said)  # below the traceback, in a notebook too
            self.hooks.emit("on_exception", self, error)
            raise
        finally:
            self.train_loader.close()
            if self.val_loader is not None:
                self.val_loader.close()
            with self.timer.spending("start and end"):
                self.hooks.emit("teardown", self)

    def setup(self) -> None:
        """Let the callbacks prepare; `fit` does it, a resume needs it before."""
        if not self._is_set_up:
            self._is_set_up = True
            self.hooks.emit("setup", self)

    def _warn_unsaved(self) -> None:
        saver = saver_of(self.callbacks)
        if self.run_dir is None and saver is not None and self.is_main:
            _log.warning("callbacks.%s saves nothing: the Trainer was given no run_dir", saver.name)

    def _begin(self) -> None:
        self.timer.start()
        with self.timer.spending("start and end"):
            self._before_updates()
        self.timer.reset()

    def _before_updates(self) -> None:
        self.setup()
        pieces = self.options.gradient_accumulation_steps, self.strategy.devices
        if self.is_main and (remark := coupling_remark(self.task, *pieces)):
            _log.warning("%s", remark)
        self.wrapped.train()
        if self.options.max_time is not None:
            self._deadline = time.monotonic() + self.options.max_time
        if self.options.validate_at_start and self.val_loader is not None and not self.resumed:
            self.evaluate(self.val_loader, "val", limit=self.options.validate_at_start)
        self.hooks.emit("on_fit_start", self)
        if self.val_loader is not None and validation_is_due(self.options, self.state):
            self._boundary()  # a signal came while the run before this one validated
        else:
            self._agree()

    def _epoch(self, length: int | None) -> Iterator[list[MicroBatch]]:
        """Draw what is left of an epoch's updates, until a signal ends the wait for one."""
        state = self.state
        stream = self.draw(state.epoch, state.position, length)
        while length is None or state.position < length:
            self.timer.lap("callbacks")
            micro_batches = self.waiting.next(stream)
            self.timer.lap("data")
            if micro_batches is not None:
                yield micro_batches
            elif state.position or state.stop_code:
                return
            else:
                raise SampleError(
                    f"train_loader gave no batch in epoch {state.epoch}: what it reads from "
                    "is empty, or can be read only once"
                )

    def draw(
        self, epoch: int, start: int = 0, stop: int | None = None
    ) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of an epoch's updates `start` to `stop`, on the device."""
        return updates(self.train_loader.epoch(epoch, start, stop), self.to_device)

    def _end_epoch(self) -> None:
        self.updater.confirm()  # before anything counts or averages what the epoch ended with
        self.state.epoch += 1
        self.state.position = 0
        self.lr_schedule.after_epoch()
        self.hooks.emit("on_epoch_end", self)
        self._boundary()

    def _agree(self) -> None:
        """Agree with the other processes on whether this update was the last."""
        state = self.state
        if self._deadline is not None and time.monotonic() >= self._deadline:
            state.request_stop(MAX_TIME)
        # Where all wait for each other anyway, all learn at once of one process's request.
        meeting = self.done or not state.position or state.validated_at == state.global_step
        self.group.agree(state, at_once=meeting, in_step=not meeting)

    def update(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Apply one optimizer update, or skip it, and count; `trainer.update.updater` draws it."""
        applied = self.updater.apply(micro_batches)
        self.state.count(len(micro_batches), micro_batches[0].piece.total, applied)
        if applied:
            self.optimizers.keep_rates()
            self.lr_schedule.after_update()
        else:
            self.updater.count_skipped(1)

    def _boundary(self) -> bool:
        """Do what is due between two updates; each part once, also across a resume.

        Returns whether the run ends here.
        """
        if log_is_due(self.options, self.state, bool(self.updater.epoch_sums)):
            self._log()
        if self.val_loader is not None and validation_is_due(self.options, self.state):
            self._validate()
        self.hooks.emit("on_boundary", self)
        self._agree()
        return self._ended

    def _log(self) -> None:
        self.updater.confirm()
        ended = not self.state.position
        scalars = self.updater.take_means()
        epoch = self.updater.epoch_means(ended) if ended or self.done else {}
        scalars |= epoch | self.updater.counts()
        for contribute in self.hooks.listeners("scalars"):
            scalars |= contribute(self)
        self.state.logged_at = self.state.global_step
        self.timer.reset()
        if ended:
            self.lr_schedule.after_validation(epoch)
        self.log(scalars)

    def _validate(self) -> None:
        with self.timer.spending("evaluation"), suppress(EvaluationAbandoned):
            self.updater.confirm()
            self.hooks.emit("on_validation_start", self)
            watchers = self.hooks.listeners("on_validation_batch")
            limit = self.options.limit_val_batches
            metrics = self.evaluate(self.val_loader, "val", limit, watchers=watchers)
            self.state.validated_at = self.state.global_step
            self.lr_schedule.after_validation(metrics)
            self.log(metrics)
            self.hooks.emit("on_validation_end", self, metrics)

    def evaluate(
        self,
        loader: Any,
        stage: str,
        limit: int | None = None,
        step: int | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> dict[str, float]:
        """Return the metrics over a data set, each sample counted once (I4): `<stage>/<name>`.

        What is drawn at random is keyed by the seed and the `step` of the weights (default: the
        run's), and leaves the training's random state untouched.
        """
        step = self.state.global_step if step is None else step
        with self.timer.spending("evaluation"):
            weights = self.evaluation_weights()
            return self._evaluator.run(loader, stage, weights, limit, step, watchers)

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context in which the model answers as in a validation, for callbacks."""
        return self._evaluator.prepared(self.evaluation_weights(), self.state.global_step)

    def evaluation_weights(self) -> AbstractContextManager[Any]:
        """Return the context in which the model has the weights to evaluate, or an average's."""
        return nullcontext() if self.average is None else self.average.swap(self)
