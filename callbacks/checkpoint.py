"""When to save, what to keep, and which is the best; `regimen.trainer.checkpoints.store` writes."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regimen.callbacks.support import AUTO, Monitor, check_least, require
from regimen.conf.errors import problems_at
from regimen.trainer.callback import Saver, keeps_weights
from regimen.trainer.checkpoints import shards
from regimen.trainer.checkpoints.archive import on_host, write_safetensors
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.device import current_stream, pins
from regimen.trainer.errors import StorageError
from regimen.trainer.state import TrainState
from regimen.trainer.task import Task
from regimen.trainer.trainer import Trainer

_log = logging.getLogger(__name__)


_FIRST, _LARGEST = 2**20, 2**26  # bytes of slabs of pinned memory, powers of two
_ALIGNED = 64  # bytes, at least as for any number format


class PinnedMemory:
    """Pinned memory in slabs, of which tensors take pieces one after the other.

    torch rounds each request up to a power of two, and asks the driver for each, which takes longer
    than a copy: so a few slabs of such sizes, which grow with what they have to hold.
    """

    def __init__(self) -> None:
        self._slabs = list[Tensor]()
        self._number = 0  # of the slab that is taken from
        self._offset = 0  # bytes of it that are taken
        self._length = _FIRST  # of the next slab

    @property
    def nbytes(self) -> int:
        """The bytes of all slabs."""
        return sum(slab.nbytes for slab in self._slabs)

    def restart(self) -> None:
        """Take from the first slab again: the tensors so far may be overwritten."""
        self._number = 0
        self._offset = 0

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized tensor of another's shape, dtype and, if dense, strides."""
        form = torch.empty_like(tensor, device="cpu")
        if not form.nbytes:
            return form
        slab, offset = self._room(form.nbytes)
        # Not a view of the slab: torch.save writes the whole storage of a tensor.
        count = form.untyped_storage().nbytes() // form.itemsize
        batch_slice = torch.frombuffer(slab.numpy(), dtype=form.dtype, count=count, offset=offset)
        return batch_slice.as_strided(form.shape, form.stride())

    def _room(self, size: int) -> tuple[Tensor, int]:
        """Return a slab with room for so many bytes, and where it begins there."""
        size = -(-size // _ALIGNED) * _ALIGNED
        while self._number < len(self._slabs):
            slab = self._slabs[self._number]
            offset = self._offset
            if offset + size <= slab.nbytes:
                self._offset += size
                return slab, offset
            self._number += 1
            self._offset = 0
        length = max(self._length, 1 << (size - 1).bit_length())
        self._length = min(2 * self._length, _LARGEST)
        self._slabs.append(torch.empty(length, dtype=torch.uint8, pin_memory=True))
        self._offset = size
        return self._slabs[-1], 0


class Staging:
    """Copies of tensors in host memory, whose buffers are used again by the next save.

    Allocating memory costs several times as much as copying. Pinned memory, which asynchronous
    copies from an accelerator need, costs even more.
    """

    def __init__(self) -> None:
        self._buffers = dict[Any, list[Tensor]]()  # by shape, stride and dtype: not pinned
        self._pinned = PinnedMemory()
        self._events = list[torch.Event]()

    @torch.no_grad()
    def copy(self, tree: Any) -> Any:
        """Return a copy of `tree`; the previous one is overwritten.

        Copies from an accelerator are complete after `wait`.
        """
        free, self._buffers = self._buffers, defaultdict(list)
        self._pinned.restart()
        devices = set[torch.device]()

        def copied(tensor: Tensor) -> Tensor:
            if pins(tensor.device):
                devices.add(tensor.device)
                return self._pinned.empty_like(tensor).copy_(tensor, non_blocking=True)
            kind = (tensor.shape, tensor.stride(), tensor.dtype)
            if free.get(kind):
                buffer = free[kind].pop()
            else:
                buffer = torch.empty_like(tensor, device="cpu")
            self._buffers[kind].append(buffer)
            return buffer.copy_(tensor)

        result = on_host(tree, copied)
        self._events = [current_stream(device).record_event() for device in devices]
        return result

    def wait(self) -> None:
        """Wait until the copies from an accelerator are complete; called by the writer thread."""
        for event in self._events:
            event.synchronize()


@dataclass(eq=False)
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

    every_n_epochs: int | None = 1
    every_n_steps: int | None = None
    save_top_k: int = 1
    monitor: str | None = AUTO  # its name; None if there is none
    mode: str = AUTO
    save_last: bool = True
    save_weights: bool = False
    background: bool = True
    persistent = ("ranking",)  # with the state that is being saved

    def __post_init__(self) -> None:
        require(self.save_top_k >= -1, f"save_top_k={self.save_top_k}: choose -1 (all) or more")
        check_least(every_n_epochs=self.every_n_epochs, every_n_steps=self.every_n_steps)
        self._judge = Monitor(self.monitor, self.mode)
        self._store: CheckpointStore | None = None
        self._resumed_from = -1  # its step, which is never removed
        self._logged: tuple[int, dict[str, float]] = -1, {}  # after how many updates, and what
        self.ranking = list[tuple[int, float]]()  # step and value of the metric, the best first
        self._saved = dict[str, Any]()  # the counters of the last save
        self._failures = 0  # in a row
        self._staging, self._staged_weights = Staging(), Staging()
        self._write: Future[None] | None = None  # of the main process
        # A save whose end is not known yet: its step, and ranking and counters if it fails.
        self._under_way: tuple[int, list[tuple[int, float]], dict[str, Any]] | None = None
        self._wrote = False

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
        store, step = self._store, trainer.state.global_step
        if not trainer.resumed or store is None:
            return
        steps = store.steps()
        here = [(at, value) for at, value in self.ranking if at in steps]
        self.ranking = trainer.group.broadcast(here)  # what is gone cannot be the best
        if not trainer.group.broadcast(store.path_of(step).exists()):  # it is another run's
            return
        self._resumed_from = step
        try:
            trainer.group.run_on_main(self._work(trainer, store, written=True))
            self._saved = trainer.state.state_dict()  # else the next save writes this state again
        except StorageError as error:
            self._warn(trainer, step, error)

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Remember the values that belong to this update; `best/<metric>` is none of them."""
        own = {key: value for key, value in scalars.items() if not key.startswith("best/")}
        self._logged = trainer.state.updates, self._values(trainer.state) | own

    def _values(self, state: TrainState) -> dict[str, float]:
        """Return the values that were logged since the last update."""
        updates, values = self._logged
        return values if updates == state.updates else {}

    def on_boundary(self, trainer: Trainer) -> None:
        """Take note of a save that has ended meanwhile; save if it is time to."""
        state = trainer.state
        logged = state.logged_at == state.global_step
        if logged or trainer.group.world_size == 1:  # several processes agree where they meet
            self._settle(trainer, wait=False)
        by_step = self.every_n_steps and state.global_step % self.every_n_steps == 0
        by_epoch = self.every_n_epochs and state.epoch % self.every_n_epochs == 0
        applied = state.global_step and not state.skipped_in_a_row  # a skipped update is no step
        due = bool((by_step and applied) or (by_epoch and not state.position))
        if not due:
            if not (self._failures and logged) or trainer.done:  # the end saves anyway
                return
            self._settle(trainer, wait=True)  # what is under way may succeed
            if not self._failures:
                return
        try:
            # What writing imports is imported by the first save, with no thread beside it: a
            # worker forked in the middle of an import could never finish that.
            self.save_now(trainer, ranked=due, wait=not (self.background and self._wrote))
        except StorageError as error:
            self._warn(trainer, state.global_step, error)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Save where the run ended. Raises StorageError."""
        self.save_now(trainer, ranked=trainer.done or not trainer.state.interrupted)

    def teardown(self, trainer: Trainer) -> None:
        """Wait for a save that is under way when an exception ends the run."""
        try:
            self._finish()
        except Exception as error:
            _log.warning("the last save failed: %s", error)

    def save_now(self, trainer: Trainer, ranked: bool = True, wait: bool = True) -> None:
        """Save, unless this very state is saved already or nothing is trained yet.

        A save that the run would not do if nothing disturbed it is not `ranked`: it must not
        decide which checkpoint is the best. Between two updates only; a collective of all
        processes. Raises StorageError on all.
        """
        trainer.updater.check_deferred_nonfinite()  # or what a GPU left out would be saved as done
        with trainer.timer.spending("checkpoints"):
            self._settle(trainer, wait=True)
            counters = trainer.state.state_dict()
            if self._store is None or not trainer.state.updates or counters == self._saved:
                return
            self._under_way = trainer.state.global_step, self.ranking, self._saved
            if ranked:
                self._rank(trainer)
            self._saved = counters
            try:
                work = self._work(trainer, self._store)
                if trainer.is_main:
                    executor = ThreadPoolExecutor(1, "checkpoint")
                    self._write = executor.submit(work)
                    executor.shutdown(wait=False)  # the end of the process waits for the thread
                if wait:
                    self._end(trainer)
            except StorageError:
                self._take_back(trainer)
                raise

    def _rank(self, trainer: Trainer) -> None:
        """Put this state where it belongs; log `best/<metric>` if it is the best so far."""
        known, step = dict(self.ranking), trainer.state.global_step
        name = self.monitor  # without a metric the newest is the best
        value = self._values(trainer.state).get(name, math.nan) if name else float(step)
        if not math.isnan(value):
            known[step] = value
        best = self._judge.best_first(known)
        self.ranking = best[: max(self.save_top_k, 1)] if self.save_top_k else []
        if not keeps_weights(trainer.callbacks):
            self.ranking = []  # of a test of learning rates no weights are the best
        found = self.best_result()
        if found is not None and found[2] == step:
            trainer.log({f"best/{found[0]}": found[1]})

    def _finish(self) -> None:
        write, self._write = self._write, None
        if write is not None:
            write.result()

    def _end(self, trainer: Trainer) -> None:
        """Wait for the save under way. Raises StorageError on all processes."""
        trainer.group.run_on_main(self._finish)
        self._under_way, self._failures, self._wrote = None, 0, True

    def _settle(self, trainer: Trainer, wait: bool) -> None:
        """Take note of how the save under way ended, if it has; its failure is a warning."""
        if self._under_way is None:
            return
        step, ended = self._under_way[0], self._write is None or self._write.done()
        if wait or trainer.group.broadcast(ended):
            try:
                self._end(trainer)
            except StorageError as error:
                self._take_back(trainer)
                self._warn(trainer, step, error)

    def _take_back(self, trainer: Trainer) -> None:
        assert self._under_way is not None
        assert self._store is not None
        step, ranking, self._saved = self._under_way
        if not trainer.group.broadcast(self._store.path_of(step).exists()):
            self.ranking = ranking  # else it is whole, and only its names are not
        self._under_way = None

    def _warn(self, trainer: Trainer, step: int, error: StorageError) -> None:
        self._failures += 1
        # A disk that stays full must not fill the log: the 1st, 2nd, 4th, 8th... are told.
        if trainer.is_main and self._failures & (self._failures - 1) == 0:
            _log.warning("no checkpoint at step %d: %s", step, error)

    def _work(
        self, trainer: Trainer, store: CheckpointStore, written: bool = False
    ) -> Callable[[], None]:
        """Return what the main process is to write, once each has written its shards.

        With a copy of all that the training goes on changing; of a checkpoint that is `written`,
        its names and what follows from it. Raises StorageError on all.
        """
        step, strategy, payload = trainer.state.global_step, trainer.strategy, None
        strategy.group.run_on_main(store.prepare)
        if not written:
            copy = self._staging.copy if self.background else on_host
            payload = trainer.state_dict(copy)
            if strategy.sharded_checkpoint:
                payload = shards.write(payload, store.path_of(step), strategy.group)
        metrics, kept = self._values(trainer.state), [at for at, _ in self.ranking]
        names = {"last": step} if self.save_last else {}
        names |= {"best": kept[0]} if kept else {}
        weights = None
        if self.save_weights and names.get("best") == step:
            with trainer.evaluation_weights():  # those of an average are the model's only here
                weights = strategy.gather_tensors(dict(trainer.model.state_dict()), only_main=True)
                weights = self._staged_weights.copy(weights) if trainer.is_main else None

        def write() -> None:
            if payload is not None:
                self._staging.wait()
                new = [name for name, at in names.items() if at == step]
                store.save(payload, step=step, metrics=metrics, names=new)
            if self.save_top_k >= 0:
                # Before the other names: they may be copies, which need its room.
                store.prune([*kept, self._resumed_from])
            store.name(names)
            if weights is not None:
                self._staged_weights.wait()
                try:
                    write_safetensors(store.folder / "best.safetensors", weights)
                except StorageError as error:
                    _log.warning("%s", error)

        return write
