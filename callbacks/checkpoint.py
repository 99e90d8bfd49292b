"""Decide when to save, what to keep and which is the best; `trainer.checkpoints.store` writes."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from regimen.callbacks.support import AUTO, Monitor, check_least, require
from regimen.conf.errors import problems_at
from regimen.trainer import snapshot
from regimen.trainer.callback import Saver, keeps_weights
from regimen.trainer.checkpoints import shards
from regimen.trainer.checkpoints.archive import on_host, write_safetensors
from regimen.trainer.checkpoints.staging import Staging
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import StorageError
from regimen.trainer.state import TrainState
from regimen.trainer.task import Task
from regimen.trainer.trainer import Trainer

_log = logging.getLogger(__name__)

Ranking = list[tuple[int, float]]  # step and value of the metric, the best first


class PendingSave(NamedTuple):
    """A save whose end is not known yet, and what holds again if it fails."""

    step: int
    former_ranking: Ranking
    former_counters: dict[str, Any]


@dataclass(eq=False)
class Checkpoint(Saver):
    """Save between two updates: every so often, and at the end, whatever ended the run.

    `every_n_epochs`, `every_n_steps`: either, both or, with None, neither.

    `monitor` and `mode` choose `best.pt` among the saved checkpoints. The value must come from the
    very update that is saved. The earlier of equal values wins, and NaN never does. A checkpoint
    that a signal or `max_time` made the run save does not take part: the best must not depend on
    such a disturbance. With `monitor` None, or without the validation set that it needs, the newest
    is the best.

    `save_top_k`: how many of the best to keep (-1: every checkpoint, 0: no best); the newest two
    are kept anyway. `save_last`: also name the newest `last.pt`. `save_weights`: also write the
    weights of the best that were evaluated to `best.safetensors`.

    `borrow`: leave out weights that were read from files and stay frozen; a checkpoint then has the
    folder and the sha256 of the files, which whoever loads it reads again and compares. None: as
    the model says (that of `model=lora` does).

    `background`: a save costs the loop a copy of the state in host memory, and a thread writes it,
    one save at a time. The loop waits for the first save, and for the last one, whatever ends the
    run.

    A save that fails is a warning, and tried again when values are next logged; at the end of the
    run it is an error. Earlier checkpoints stay as they are.
    """

    every_n_epochs: int | None = 1
    every_n_steps: int | None = None
    save_top_k: int = 1
    monitor: str | None = AUTO  # its name; None if there is none
    mode: str = AUTO
    save_last: bool = True
    save_weights: bool = False
    borrow: bool | None = None
    background: bool = True
    persistent = ("ranking",)  # it includes the checkpoint that is being saved
    affects_result = False

    def __post_init__(self) -> None:
        require(self.save_top_k >= -1, f"save_top_k={self.save_top_k}: choose -1 (all) or more")
        check_least(every_n_epochs=self.every_n_epochs, every_n_steps=self.every_n_steps)
        self._judge = Monitor(self.monitor, self.mode)
        self._store: CheckpointStore | None = None
        self._resumed_from = -1  # step of the checkpoint that is never removed
        self._logged_after = -1  # number of updates when `_logged` was logged
        self._logged = dict[str, float]()
        self.ranking: Ranking = []
        self._saved_counters = dict[str, Any]()  # of the last save
        self._failures = 0  # in a row
        self._staging = Staging()
        self._staging_weights = Staging()
        self._writing: Future[None] | None = None  # of the main process
        self._pending: PendingSave | None = None
        self._has_written = False

    def best_result(self) -> tuple[str, float, int] | None:
        """Return metric, value and step of the best checkpoint, if one was chosen."""
        if self.monitor is None or not self.ranking:
            return None
        step, value = self.ranking[0]
        return self.monitor, value, step

    def improves(self, value: float, than: float | None) -> bool:
        """Compare by `mode`; NaN never improves."""
        return self._judge.better(value, than)

    def check_task(self, task: Task, stages: Iterable[str]) -> None:
        """Raise ConfigError if it is not known which values of the metric are better."""
        with problems_at(f"callbacks.{self.name}"):
            self._judge.resolve(task, stages)

    def explain(self, trainer: Trainer) -> Iterator[str]:
        """Say which weights checkpoints leave out, and where they are; a collective."""
        counts = Counter[Path]()
        for source in snapshot.left_out(trainer.components).values():
            if source is not None:
                counts[source.folder] += 1
        for folder, count in counts.items():
            yield (
                f"checkpoints leave out {count} frozen weights, which are read again from {folder} "
                f"(callbacks.{self.name}.borrow=false: they hold all)"
            )

    def setup(self, trainer: Trainer) -> None:
        """Find the folder and the metric."""
        self.check_task(trainer.task, trainer.val_loaders)
        if self._judge.on_validation and not trainer.val_loaders:
            _log.info("no validation set: the newest checkpoint counts as the best")
            self._judge = Monitor(None)
        self.monitor = self._judge.name
        if trainer.run_dir is not None:
            self._store = CheckpointStore(trainer.run_dir / "checkpoints")

    def on_fit_start(self, trainer: Trainer) -> None:
        """Protect the checkpoint that this run goes on from, and finish the save that wrote it."""
        for remark in self.explain(trainer):
            if trainer.is_main:
                _log.info("%s", remark)
        store = self._store
        group = trainer.group
        if not trainer.resumed or store is None:
            return
        existing_steps = store.steps()
        existing = [entry for entry in self.ranking if entry[0] in existing_steps]
        # A collective: all processes rank what the main process sees. A checkpoint that no longer
        # exists cannot be the best.
        self.ranking = group.broadcast(existing)
        step = trainer.state.global_step
        if not group.broadcast(store.path_of(step).exists()):
            return  # the checkpoint is another run's
        self._resumed_from = step
        try:
            group.run_on_main(store.prepare)
            group.run_on_main(self._prepare_names(trainer, store))
            # Not after a failure: then the next save writes this state again.
            self._saved_counters = trainer.state.state_dict()
        except StorageError as error:
            self._warn(trainer, step, error)

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Remember the values that belong to this update; `best/<metric>` is none of them."""
        values = self._current_values(trainer.state)
        for key, value in scalars.items():
            if not key.startswith("best/"):
                values[key] = value
        self._logged = values
        self._logged_after = trainer.state.updates

    def _current_values(self, state: TrainState) -> dict[str, float]:
        """Return a copy of the values that were logged since the last update."""
        if self._logged_after != state.updates:
            return {}
        return dict(self._logged)

    def on_boundary(self, trainer: Trainer) -> None:
        """Take note of a save that has ended meanwhile; save if it is time to."""
        state = trainer.state
        if trainer.components.borrowed:
            trainer.components.borrowed.watch()
        has_logged = state.logged_at == state.global_step
        if has_logged or trainer.group.world_size == 1:
            # A collective of several processes, which log at the same boundaries.
            self._check_pending(trainer, wait=False)
        due = self._is_due(state)
        if not due:
            if not self._failures or not has_logged or trainer.done:  # the end saves anyway
                return
            self._check_pending(trainer, wait=True)  # the save under way may succeed
            if not self._failures:
                return
        try:
            # What writing imports is imported by the first save, with no thread beside it: a
            # worker forked in the middle of an import could never finish that.
            wait = not (self.background and self._has_written)
            self.save_now(trainer, ranked=due, wait=wait)
        except StorageError as error:
            self._warn(trainer, state.global_step, error)

    def _is_due(self, state: TrainState) -> bool:
        # A skipped update is no step.
        is_new_step = state.global_step > 0 and not state.skipped_in_a_row
        if self.every_n_steps and is_new_step and state.global_step % self.every_n_steps == 0:
            return True
        if self.every_n_epochs and state.epoch % self.every_n_epochs == 0:
            return state.position == 0
        return False

    def on_fit_end(self, trainer: Trainer) -> None:
        """Save where the run ended. Raises StorageError."""
        self.save_now(trainer, ranked=trainer.done or not trainer.state.interrupted)

    def teardown(self, trainer: Trainer) -> None:
        """Wait for a save that is under way when an exception ends the run."""
        try:
            self._join_writing()
        except Exception as error:
            _log.warning("the last save failed: %s", error)

    def save_now(self, trainer: Trainer, ranked: bool = True, wait: bool = True) -> None:
        """Save, unless this very state is saved already or nothing is trained yet.

        A save that the run would not do if nothing disturbed it is not `ranked`: it must not
        decide which checkpoint is the best. Between two updates only; a collective of all
        processes. Raises StorageError on all.
        """
        # Raises if the GPU has skipped an update, which would be saved as applied.
        trainer.updater.check_deferred_nonfinite()
        state = trainer.state
        with trainer.timer.spending("checkpoints"):
            self._check_pending(trainer, wait=True)
            counters = state.state_dict()
            if self._store is None or state.updates == 0 or counters == self._saved_counters:
                return
            self._pending = PendingSave(state.global_step, self.ranking, self._saved_counters)
            if ranked:
                self._rank(trainer)
            self._saved_counters = counters
            try:
                write = self._prepare_save(trainer, self._store)
                if trainer.is_main:
                    executor = ThreadPoolExecutor(1, "checkpoint")
                    self._writing = executor.submit(write)
                    executor.shutdown(wait=False)  # the end of the process waits for the thread
                if wait:
                    self._finish_pending(trainer)
            except StorageError:
                self._undo_pending(trainer)
                raise

    def _rank(self, trainer: Trainer) -> None:
        """Put this state where it belongs; log `best/<metric>` if it is the best so far."""
        step = trainer.state.global_step
        if self.monitor:
            value = self._current_values(trainer.state).get(self.monitor, math.nan)
        else:
            value = float(step)  # the newest is the best
        values = dict(self.ranking)
        if not math.isnan(value):
            values[step] = value
        if self.save_top_k == 0 or not keeps_weights(trainer.callbacks):
            self.ranking = []  # a test of learning rates has no best weights
        else:
            # With save_top_k=-1 all files stay, so that one entry is enough.
            self.ranking = self._judge.best_first(values)[: max(self.save_top_k, 1)]
        best = self.best_result()
        if best is not None and best[2] == step:
            trainer.log({f"best/{best[0]}": best[1]})

    def _join_writing(self) -> None:
        """Wait for the thread, and raise what it raised."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def _finish_pending(self, trainer: Trainer) -> None:
        """Wait for the save under way; a collective. Raises StorageError on all processes."""
        trainer.group.run_on_main(self._join_writing)
        self._pending = None
        self._failures = 0
        self._has_written = True

    def _check_pending(self, trainer: Trainer, wait: bool) -> None:
        """Take note of how the save under way ended, if it has; its failure is a warning.

        A collective where a save is under way.
        """
        pending = self._pending
        if pending is None:
            return
        has_ended = self._writing is None or self._writing.done()
        if wait or trainer.group.broadcast(has_ended):
            try:
                self._finish_pending(trainer)
            except StorageError as error:
                self._undo_pending(trainer)
                self._warn(trainer, pending.step, error)

    def _undo_pending(self, trainer: Trainer) -> None:
        """Restore what was known before a save that failed; a collective."""
        pending = self._pending
        self._pending = None
        assert pending is not None
        assert self._store is not None
        self._saved_counters = pending.former_counters
        # A file that exists is complete: only its names are missing.
        if not trainer.group.broadcast(self._store.path_of(pending.step).exists()):
            self.ranking = pending.former_ranking

    def _warn(self, trainer: Trainer, step: int, error: StorageError) -> None:
        self._failures += 1
        # A disk that stays full must not fill the log: warn of the 1st, 2nd, 4th, 8th...
        is_power_of_two = self._failures & (self._failures - 1) == 0
        if trainer.is_main and is_power_of_two:
            _log.warning("no checkpoint at step %d: %s", step, error)

    def _prepare_save(self, trainer: Trainer, store: CheckpointStore) -> Callable[[], None]:
        """Return what the main process is to write, from a copy of all that the training changes.

        A collective: each process has written its own shards when it returns. Raises StorageError
        on all.
        """
        step = trainer.state.global_step
        strategy = trainer.strategy
        strategy.group.run_on_main(store.prepare)
        payload = trainer.state_dict(self._staging.copy if self.background else on_host)
        if strategy.sharded_checkpoint:
            payload = shards.write(payload, store.path_of(step), strategy.group)
        metrics = self._current_values(trainer.state)
        names = [name for name, named_step in self._names(step).items() if named_step == step]
        write_names = self._prepare_names(trainer, store)

        def write() -> None:
            self._staging.wait()
            store.save(payload, step=step, metrics=metrics, names=names)
            write_names()

        return write

    def _names(self, step: int) -> dict[str, int]:
        """Return the steps of the checkpoints that are to be called last and best."""
        names = {}
        if self.save_last:
            names["last"] = step
        if self.ranking:
            names["best"] = self.ranking[0][0]
        return names

    def _prepare_names(self, trainer: Trainer, store: CheckpointStore) -> Callable[[], None]:
        """Return what is to be written once the checkpoint of this step exists; a collective."""
        step = trainer.state.global_step
        names = self._names(step)
        kept_steps = [ranked_step for ranked_step, _ in self.ranking]
        kept_steps.append(self._resumed_from)
        weights = None
        if self.save_weights and names.get("best") == step:
            weights = self._evaluated_weights(trainer)

        def write() -> None:
            if self.save_top_k >= 0:
                # Before the names, which may be copies: these need the room of what is removed.
                store.prune(kept_steps)
            store.name(names)
            if weights is not None:
                self._staging_weights.wait()
                try:
                    write_safetensors(store.folder / "best.safetensors", weights)
                except StorageError as error:
                    _log.warning("%s", error)

        return write

    def _evaluated_weights(self, trainer: Trainer) -> Any:
        """Return a copy of the weights that evaluations use, on the main process; a collective."""
        # Within this context the model has the weights of the average, if there is one.
        with trainer.evaluation_weights():
            state = dict(trainer.model.state_dict())
            weights = trainer.strategy.gather_tensors(state)
            if not trainer.is_main:
                return None
            return self._staging_weights.copy(weights)
