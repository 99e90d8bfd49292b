"""When to save, what to keep, and which is the best; `trainer.checkpoints.store` writes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from callbacks.saving.best_weights import BestWeights
from callbacks.saving.due import Due
from callbacks.saving.ranking import Logged, Saved, from_state, ranking_with
from callbacks.support.errors import CallbackError
from callbacks.support.monitor import AUTO, Monitor
from conf.errors import problems_at
from trainer import snapshot
from trainer.callback import Saver
from trainer.checkpoints.background import Staging, Writer
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import StorageError
from trainer.strategies.strategy import describe_device

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_log = logging.getLogger(__name__)


class _UnderWay(NamedTuple):
    """A save whose end is not known yet, and what holds if it fails."""

    step: int
    ranking: list[Saved]
    saved: dict[str, Any]


class Checkpoint(Saver):
    """Save between two updates: every so often, and at the end, whatever ended the run.

    `every_n_epochs`, `every_n_steps`: either, both or, with None, neither. `monitor` and `mode`
    choose `best.pt` among the saved: its value must come from the very update that is saved; of
    equal values the earlier wins and NaN never does. What a signal or `max_time` makes the run save
    does not take part: the best must not depend on who disturbed it. With `monitor` None, or
    without the validation set that it needs, the newest is the best. `save_top_k`: how many of the
    best to keep (-1: every checkpoint, 0: no best); the newest two are kept anyway. `save_last`:
    also name the newest `last.pt`. `save_weights`: also write the best's weights, those that were
    evaluated, to `best.safetensors`.

    In the `background` a save costs the loop a copy of the state in host memory; a thread writes
    it, one save at a time. The first one is waited for, and so is every one at the end of the run,
    whatever ends it.

    A save that fails is a warning, tried again when values are next logged; at the end it is an
    error. Earlier checkpoints stay as they are.
    """

    def __init__(
        self,
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
        save_top_k: int = 1,
        monitor: str | None = AUTO,
        mode: str = AUTO,
        save_last: bool = True,
        save_weights: bool = False,
        background: bool = True,
    ) -> None:
        if save_top_k < -1:
            raise CallbackError(f"save_top_k={save_top_k}: choose -1 (all) or more")
        self._due = Due(every_n_epochs, every_n_steps)
        self._save_top_k = save_top_k
        self._monitor = Monitor(monitor, mode)
        self._save_last = save_last
        self._best_weights = BestWeights() if save_weights else None
        self.background = background
        self._store: CheckpointStore | None = None
        self._logged = Logged()
        self._ranking: list[Saved] = []  # the best first
        self._saved: dict[str, Any] = {}  # the counters of the last save
        self._failures = 0  # in a row
        self._writer = Writer()
        self._staging = Staging()
        self._under_way: _UnderWay | None = None
        self._wrote = False

    @property
    def monitor(self) -> str | None:
        """The metric's name; None if there is none, or until the task is known."""
        return None if self._monitor.name == AUTO else self._monitor.name

    @property
    def best(self) -> Saved | None:
        """The best checkpoint; None if there is none, or nothing to judge it by."""
        return self._ranking[0] if self._ranking and self.monitor else None

    def best_result(self) -> tuple[str, float, int] | None:
        """Return metric, value and step of the best checkpoint, if one was chosen."""
        if self.monitor is None or self.best is None:
            return None
        return self.monitor, self.best.value, self.best.step

    def improves(self, value: float, than: float | None) -> bool:
        """Compare by `mode`; NaN never improves."""
        return self._monitor.better(value, than)

    def setup(self, trainer: Trainer) -> None:
        """Find the folder and the metric."""
        with problems_at(f"callbacks.{self.name}"):
            self._monitor.resolve(trainer)
        if self._monitor.on_validation and trainer.val_loader is None:
            _log.info("no validation set: the newest checkpoint counts as the best")
            self._monitor = Monitor(None)
        if trainer.run_dir is not None:
            facts = {"device": describe_device(trainer.strategy.device)}
            self._store = CheckpointStore(trainer.run_dir / "checkpoints", facts=facts)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Protect the checkpoint that this run goes on from."""
        if not trainer.resumed or self._store is None:
            return
        store = self._store
        here = [saved for saved in self._ranking if store.holds(saved.step)]
        self._ranking = trainer.group.broadcast(here)  # what is gone cannot be the best
        path = store.path_of(trainer.state.global_step)
        if trainer.group.broadcast(path.exists()):  # or it is another run's
            self._saved = trainer.state.state_dict()
            self._store.resumed_from = trainer.state.global_step
            self._complete(trainer, store)

    def _complete(self, trainer: Trainer, store: CheckpointStore) -> None:
        """Do what was left of the save that wrote this state, if the run was killed in it."""
        step, tidy = trainer.state.global_step, self._tidying(trainer, store)

        def complete() -> None:
            store.complete(step, self._names(step))
            tidy()

        try:
            trainer.group.on_main(complete)
        except StorageError as error:
            self._saved = {}  # the next save writes this state again
            self._warn(trainer, step, error)

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Remember the values that belong to this update."""
        self._logged.add(trainer.state.updates, scalars)

    def on_boundary(self, trainer: Trainer) -> None:
        """Take note of a save that has ended meanwhile; save if it is time to."""
        state = trainer.state
        logged = state.logged_at == state.global_step
        if logged or trainer.group.world_size == 1:  # several processes agree where they meet
            self._settle(trainer, wait=False)
        due = self._due.at(state)
        if not due and not (logged and self._must_try_again(trainer)):
            return
        try:
            # What writing imports is imported by the first save, with no thread beside it: a
            # worker forked in the middle of an import could never finish that.
            self._save(trainer, ranked=due, wait=not (self.background and self._wrote))
        except StorageError as error:
            self._warn(trainer, state.global_step, error)

    def _must_try_again(self, trainer: Trainer) -> bool:
        """Return whether the last save failed; one that is under way may be the one that succeeds.

        The end of the run saves anyway, and ranks what it saves.
        """
        if self._failures and not trainer.done:
            self._settle(trainer, wait=True)
        return self._failures > 0 and not trainer.done

    def on_fit_end(self, trainer: Trainer) -> None:
        """Save where the run ended. Raises StorageError."""
        state = trainer.state
        self.save_now(trainer, ranked=trainer.done or not state.interrupted)

    def teardown(self, trainer: Trainer) -> None:
        """Wait for a save that is under way when an exception ends the run."""
        try:
            self._writer.finish()
        except Exception as error:
            _log.warning("the last save failed: %s", error)

    def save_now(self, trainer: Trainer, ranked: bool = True) -> None:
        """Save and wait, unless this very state is saved already or nothing is trained yet.

        A save that the run would not do if nothing disturbed it is not `ranked`: it must not
        decide which checkpoint is the best. Between two updates only; a collective of all
        processes. Raises StorageError on all.
        """
        self._save(trainer, ranked, wait=True)

    def _save(self, trainer: Trainer, ranked: bool, wait: bool) -> None:
        trainer.updater.confirm()  # or what a GPU left out would be saved as done
        with trainer.timer.spending("checkpoints"):
            self._settle(trainer, wait=True)
            counters = trainer.state.state_dict()
            if self._store is None or not trainer.state.updates or counters == self._saved:
                return
            self._under_way = _UnderWay(trainer.state.global_step, self._ranking, self._saved)
            if ranked:
                values, step = self._logged.after(trainer.state.updates), counters["global_step"]
                among = self._ranking, step, values, self._monitor, self._save_top_k
                self._ranking = ranking_with(*among)
                self._log_best(trainer)
            self._saved = counters
            try:
                work = self._work(trainer, self._store)
            except StorageError:
                self._take_back()
                raise
            if trainer.is_main:
                self._writer.start(work)
            if wait:
                self._finish(trainer)

    def _log_best(self, trainer: Trainer) -> None:
        """Log `best/<metric>` at the step of a checkpoint that is the best so far."""
        best = self.best_result()
        if best is not None and best[2] == trainer.state.global_step:
            trainer.log({f"best/{best[0]}": best[1]})

    def _settle(self, trainer: Trainer, wait: bool) -> None:
        """Take note of how the save under way ended, if it has; its failure is a warning."""
        save = self._under_way
        if save is None or not (wait or trainer.group.broadcast(not self._writer.busy)):
            return
        try:
            self._finish(trainer)
        except StorageError as error:
            self._warn(trainer, save.step, error)

    def _finish(self, trainer: Trainer) -> None:
        """Wait for the save under way; its failure is raised on all processes."""
        try:
            trainer.group.on_main(self._writer.finish)
        except StorageError:
            self._take_back()
            raise
        self._under_way, self._failures, self._wrote = None, 0, True

    def _take_back(self) -> None:
        assert self._under_way is not None
        _, self._ranking, self._saved = self._under_way
        self._under_way = None

    def _warn(self, trainer: Trainer, step: int, error: StorageError) -> None:
        self._failures += 1
        # A disk that stays full must not fill the log: the 1st, 2nd, 4th, 8th... are told.
        if trainer.is_main and self._failures & (self._failures - 1) == 0:
            _log.warning("no checkpoint at step %d: %s", step, error)

    def _work(self, trainer: Trainer, store: CheckpointStore) -> Callable[[], None]:
        """Return what the main process is to write, once each has written its shards.

        With a copy of all that the training goes on changing. Raises StorageError on all.
        """
        step, strategy = trainer.state.global_step, trainer.strategy
        strategy.group.on_main(store.prepare)
        copy = self._staging.copy if self.background else snapshot.on_host
        payload = strategy.write_shards(snapshot.take(trainer, copy), store.path_of(step))
        names, metrics = self._names(step), self._logged.after(trainer.state.updates)
        tidy = self._tidying(trainer, store)

        def write() -> None:
            self._staging.wait()
            store.save(payload, step=step, metrics=metrics, names=names)
            tidy()

        return write

    def _names(self, step: int) -> list[str]:
        """Return the names of the newest checkpoint, that of `step`."""
        return ["last"] * self._save_last + ["best"] * self._is_best(step)

    def _is_best(self, step: int) -> bool:
        return bool(self._ranking) and self._ranking[0].step == step

    def _tidying(self, trainer: Trainer, store: CheckpointStore) -> Callable[[], None]:
        """Return what is to be done after a checkpoint was written and named."""
        kept = [saved.step for saved in self._ranking]
        best_weights = self._best_weights if self._is_best(trainer.state.global_step) else None
        if best_weights is not None:
            best_weights.take(trainer)

        def tidy() -> None:
            if self._save_top_k >= 0:
                store.prune(kept)
            if best_weights is not None:
                best_weights.write(store.folder)

        return tidy

    def state_dict(self) -> dict[str, Any]:
        """Return the ranking, the state being saved included."""
        return {"ranking": [list(saved) for saved in self._ranking]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the ranking."""
        self._ranking = from_state(state["ranking"])
