"""A run between two updates, as one dict: what a checkpoint holds (I5)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regimen.trainer.callback import Average, Callback, saver_of
from regimen.trainer.checkpoints import reader, shards
from regimen.trainer.checkpoints.archive import on_host
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.device import product_name
from regimen.trainer.errors import CheckpointError
from regimen.trainer.state import LogPoint
from regimen.trainer.task import Task

if TYPE_CHECKING:
    from regimen.trainer.trainer import Trainer

_log = logging.getLogger(__name__)


def take(trainer: Trainer, on_main: Callable[[Any], Any] = on_host) -> dict[str, Any]:
    """Return everything that the rest of the run depends on; a collective of all processes.

    The main process, which writes it, does `on_main` to it; shards stay where
    they are, and the tensors that other processes have to gather have no values there.
    """
    strategy = trainer.strategy
    whole: Callable[[Any], Any] = partial(strategy.gather_tensors, only_main=True)
    if strategy.sharded_checkpoint:
        whole = dict
    callbacks = whole({name: call.state_dict() for name, call in trainer.callbacks.items()})
    own = {} if strategy.shares_buffers else dict(trainer.model.named_buffers())
    skips = hasattr(trainer.train_loader, "skipped_state")  # a plain loader loads all samples
    average, saver = trainer.average, saver_of(trainer.callbacks)
    gather, updater, loader = strategy.group.gather_data, trainer.updater, trainer.train_loader
    payload = {
        "model": whole(dict(trainer.model.state_dict())),
        "optimizer": whole(trainer.optimizers.state_dict()),
        "lr_scheduler": trainer.lr_schedule.state_dict(),
        "scaler": trainer.precision.state_dict(),
        "ema": callbacks.pop(average.name, {}) if average else {},
        "callbacks": callbacks,
        "state": {
            "counters": trainer.state.state_dict(),
            "sums": gather(updater.sums.state_dict()),
            "epoch_sums": gather(updater.epoch_sums.state_dict()),
            "loader": gather({"skipped": loader.skipped_state()} if skips else {}),
            "own": gather(on_host(own)),
            "unsaved": gather(on_host(trainer.unsaved.state_dict())),
            "metrics": dict(trainer.metrics),
            "data": trainer.data_facts,
            "lengths": _lengths(trainer),
            "roles": {"average": average and average.name, "saver": saver and saver.name},
            "world_size": strategy.group.data_size,  # those of a tensor group count as one
            "made_with": _circumstances(trainer),
        },
        "rng": gather(trainer.random.state_dict()),
        "config": trainer.config_text,
        "format_version": reader.FORMAT_VERSION,
    }
    return dict(on_main(payload)) if trainer.is_main else payload


def restore(
    trainer: Trainer,
    payload: Mapping[str, Any],
    hyper_parameters: bool = True,
    same_run: bool = True,
) -> list[str]:
    """Make `trainer` go on where `payload` was taken; return what cannot be exact, in words.

    With `hyper_parameters` false those that the trainer was built with hold from here on. Unless it
    is the `same_run` nothing is taken over that tells of a run directory's files.
    """
    reader.check_payload(payload, None)
    trainer.setup()
    # The strategy's wrapper learns what it had learnt when the run was saved.
    batches = functools.cache(lambda: next(trainer.draw(trainer.state.epoch)))
    trainer.wrapped.train()
    trainer.strategy.warm_up(trainer.wrapped, lambda: trainer.updater.dry_run_backward(batches()))
    reader.compare_names(payload, trainer.model.state_dict())
    with reader.taking_over("the state"):
        return _take_over(trainer, payload, hyper_parameters, same_run)


def find(trainer: Trainer, resume: Path | str) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint that a trainer is to go on from, with its path; nothing is changed.

    resume: a checkpoint, or a run's directory, whose newest is meant. "auto" stands for the
    trainer's own `run_dir`; None where that holds no checkpoint yet. Raises CheckpointError.
    """
    place = trainer.run_dir if resume == "auto" else Path(resume)
    if place is None:
        raise CheckpointError("resume='auto' goes on with what run_dir holds: give Trainer one")
    found: tuple[Path, dict[str, Any]] | None
    found = trainer.group.broadcast(_found(place) if trainer.is_main else None)
    if found is None and resume == "auto":
        return None
    if found is None:
        raise CheckpointError(f"resume={place}: there is no checkpoint in it")
    path, payload = found
    later = max(CheckpointStore(path.parent).steps(), default=0) > log_point_of(payload).step
    if later and _is_own(trainer, path):
        raise CheckpointError(
            f"{path}: run_dir holds checkpoints of later steps: go on with resume='auto', or give "
            "Trainer another run_dir"
        )
    return found


def go_on(trainer: Trainer, path: Path, payload: Mapping[str, Any]) -> None:
    """Let a trainer go on from a checkpoint that `find` returned."""
    notes = restore(trainer, payload, same_run=_is_own(trainer, path))
    if trainer.is_main:
        for note in notes:
            _log.warning("%s", note)
        _log.info("resumed from %s at step %d", path, trainer.state.global_step)


def _is_own(trainer: Trainer, path: Path) -> bool:
    run_dir = trainer.run_dir
    return run_dir is not None and path.parent.parent.resolve() == run_dir.resolve()


def _found(place: Path) -> tuple[Path, dict[str, Any]] | None:
    if place.is_file():
        return place, reader.read_checkpoint(place)
    if (newest := CheckpointStore(place / "checkpoints").newest()) is None:
        return None
    path, payload, passed = newest
    for reason in passed:
        _log.warning("%s: passed over", reason)
    return path, payload


def _take_over(
    trainer: Trainer, payload: Mapping[str, Any], hyper_parameters: bool, same_run: bool
) -> list[str]:
    state, rank = payload["state"], trainer.group.data_rank
    notes = [
        f"{key}: saved with {then}, goes on with {now}: the last digits may differ"
        for key, now in _circumstances(trainer).items()
        if (then := state["made_with"].get(key, now)) != now
    ]
    trainer.state.load_state_dict(state["counters"])
    changed = _find_place(trainer, state)
    notes += changed
    parameters = dict(trainer.model.named_parameters())
    payload = shards.read(payload, parameters)
    trainer.strategy.load_model_state(trainer.model, payload["model"])
    optimizer = trainer.strategy.split_like(payload["optimizer"], parameters)
    notes += trainer.optimizers.load_state_dict(optimizer, hyper_parameters)
    schedule = dict(payload["lr_scheduler"])
    if changed and (left := trainer.updates_left) is not None:
        schedule["updates"] = (trainer.total_steps or left) - left  # as much of the curve is left
    trainer.lr_schedule.load_state_dict(schedule, hyper_parameters and not changed)
    trainer.precision.load_state_dict(payload["scaler"])
    _load_callbacks(trainer, payload, lambda callback: same_run or not callback.of_run)
    same = state["world_size"] == trainer.group.data_size
    own = slice(rank, rank + 1) if same else slice(None)  # of what is saved by process
    notes += trainer.unsaved.load_state_dict(state["unsaved"][rank if same else 0])
    trainer.metrics.update(state["metrics"])
    trainer.resumed, trainer.branched = True, not hyper_parameters
    if hasattr(trainer.train_loader, "load_skipped_state"):
        left_out = [entry for part in state["loader"][own] for entry in part.get("skipped", [])]
        trainer.train_loader.load_skipped_state([] if rank and not same else left_out)
    for key in ("sums", "epoch_sums"):
        getattr(trainer.updater, key).load_state_dict(*state[key][own], takes=int(same or not rank))
    if same:
        with torch.no_grad():
            for name, buffer in trainer.model.named_buffers():
                buffer.copy_(state["own"][rank].get(name, buffer))
        notes += trainer.random.load_state_dict(payload["rng"][rank])
    else:
        notes.append(
            f"saved by {state['world_size']} processes, resumed by {trainer.group.data_size}: "
            "the samples of every update stay the same; dropout masks and the last digits do not"
        )
    return notes


def _lengths(trainer: Trainer) -> dict[str, int | None]:
    """Return what the place in an epoch and the schedule depend on; None of what is not known."""
    sampler = getattr(trainer.train_loader, "sampler", None)
    return {
        "loader.batch_size": getattr(sampler, "batch_size", None),
        "samples of an epoch": getattr(sampler, "samples", None),
        "updates of an epoch": trainer.steps_per_epoch,
    }


def _find_place(trainer: Trainer, saved: Mapping[str, Any]) -> list[str]:
    """Go on behind the samples of the epoch that were seen; return what has changed, in words.

    The updates of an epoch follow from the batch size and the data, which may both be others than
    those that the checkpoint was saved with.
    """
    state, now = trainer.state, _lengths(trainer)
    then = saved.get("lengths", now)
    size, length = now["loader.batch_size"], trainer.steps_per_epoch
    if state.position and size is not None and length is not None:
        if "epoch_samples" not in saved["counters"]:  # of an earlier version: the size was this one
            state.epoch_samples = state.position * size
        begin = trainer.train_loader.sampler.resume(state.epoch, state.epoch_samples, length)
        if begin is not None:
            state.position = begin
    changed = [f"{n}: {then[n]} -> {now[n]}" for n in now if then[n] != now[n]]
    if not changed:
        return []
    return [
        f"{', '.join(changed)}: the run goes on behind the {state.epoch_samples} samples that it "
        f"has seen of epoch {state.epoch}; as much of the schedule is left as of the run"
    ]


def _circumstances(trainer: Trainer) -> dict[str, Any]:
    """Return what an exact resume depends on, beside the configuration."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": product_name(trainer.strategy.device),
    }


def load_weights(trainer: Trainer, payload: Mapping[str, Any], path: Path | None = None) -> None:
    """Give the model the weights of a checkpoint, its averages and its task's, nothing else."""
    reader.compare_names(payload, trainer.model.state_dict(), path)
    parameters = dict(trainer.model.named_parameters())
    needed = ("model", "callbacks", "ema", "shards", "state")
    payload = shards.read({k: payload[k] for k in needed if k in payload}, parameters)
    with reader.taking_over("the weights"):
        trainer.strategy.load_model_state(trainer.model, payload["model"])
        if others := payload.get("state", {}).get("unsaved"):
            trainer.unsaved.load_state_dict(others[0])
        _load_callbacks(trainer, payload, lambda callback: isinstance(callback, Average))


def _load_callbacks(
    trainer: Trainer, payload: Mapping[str, Any], wanted: Callable[[Callback], bool]
) -> None:
    average = name_of("average", payload)  # what was evaluated is saved apart
    saved = {**payload["callbacks"], **({average: payload["ema"]} if average else {})}
    saved = trainer.strategy.split_like(saved, dict(trainer.model.named_parameters()))
    for name, callback in trainer.callbacks.items():
        if saved.get(name) and wanted(callback):
            callback.load_state_dict(saved[name])


def name_of(role: str, payload: Mapping[str, Any]) -> str | None:
    """Return how the callback with a role was called."""
    roles: Mapping[str, str | None] = payload.get("state", {}).get("roles", {})
    return roles.get(role)


def log_point_of(payload: Mapping[str, Any]) -> LogPoint:
    """Return the step and the epoch of a checkpoint's weights."""
    counters = payload["state"]["counters"]
    return LogPoint(int(counters["global_step"]), int(counters["epoch"]))


class Unsaved:
    """Save state that the model's state dict lacks, and name what cannot be saved.

    Saved are the state of the task's own modules (the weights of a loss, moving centres), and
    buffers with `persistent=False` that differ from their initial value: constants, such as masks,
    are not saved. Plain attributes (numbers, tensors) are not saved; those that change
    are named once in the log.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        self._task = {f"task.{name}.": part for name, part in task.own_modules().items()}
        self._parts = {"": model, **self._task}
        self._built = {name: _copied(buffer) for name, (*_, buffer) in self._passing()}
        self._marks = dict(self._attributes())
        self._told: set[str] = set()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return this process's state on the host; warn about attributes that changed."""
        marks = dict(self._attributes())
        moved = {name for name, mark in marks.items() if self._marks.get(name, mark) != mark}
        self._marks = marks  # a new attribute is taken for a cache until it changes
        for name in sorted(moved - self._told):
            _log.warning(
                "%s changes in training but is not a buffer: checkpoints lack it, and a resume "
                "starts from its initial value; use register_buffer to save it",
                name,
            )
        self._told |= moved
        buffers = {
            name: _copied(buffer)
            for name, (*_, buffer) in self._passing()
            if name not in self._built or not torch.equal(buffer.cpu(), self._built[name])
        }
        return {"buffers": buffers, "task": {n: _copied(v) for n, v in self._own_state().items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Load what `state_dict` returned; return a message for each entry that does not fit."""
        places, own = dict(self._passing()), self._own_state()
        for name, (module, key, buffer) in places.items():
            value = state["buffers"].get(name, self._built.get(name, buffer))
            if buffer.shape == value.shape:
                buffer.copy_(value)
            else:
                setattr(module, key, value.to(buffer))
        missing = [name for name in state["buffers"] if name not in places]
        for name, value in state["task"].items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)
            else:
                missing.append(name)
        return [f"the checkpoint's {name} is not in this run" for name in missing]

    def _own_state(self) -> dict[str, Tensor]:
        return {
            root + name: value
            for root, part in self._task.items()
            for name, value in part.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }

    def _passing(self) -> Iterator[tuple[str, tuple[nn.Module, str, Tensor]]]:
        """Yield the non-persistent buffers by name: those that a state dict lacks."""
        for root, part in self._parts.items():
            saved = part.state_dict()
            for name, buffer in part.named_buffers():
                if name not in saved:
                    owner, _, key = name.rpartition(".")
                    yield root + name, (part.get_submodule(owner), key, buffer)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield a mark for each number and tensor, which changes when the attribute does."""
        for root, part in self._parts.items():
            for name, module in part.named_modules():
                prefix = f"{root}{name}." if name else root
                for key, value in vars(module).items():
                    if isinstance(value, Tensor):
                        yield prefix + key, (id(value), value._version)
                    elif isinstance(value, int | float | complex) and key != "training":
                        yield prefix + key, repr(value)  # NaN equals itself


def _copied(value: Tensor) -> Tensor:
    return value.detach().cpu().clone()
