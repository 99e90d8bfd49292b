"""A run between two updates, as one dict: what a checkpoint holds (I5)."""

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from regimen.trainer.callback import Average, Callback, saver_of
from regimen.trainer.checkpoints import borrowed, reader, shards
from regimen.trainer.checkpoints.archive import on_host
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.components.components import Components
from regimen.trainer.device import product_name
from regimen.trainer.distributed import Group
from regimen.trainer.errors import CheckpointError
from regimen.trainer.options import updates_left
from regimen.trainer.state import LogPoint
from regimen.trainer.task import batches_per_update
from regimen.trainer.update.updater import Updater

_log = logging.getLogger(__name__)


def capture(
    components: Components,
    updater: Updater,
    on_main: Callable[[Any], Any] = on_host,
) -> dict[str, Any]:
    """Return everything that the rest of the run depends on; a collective, which waits.

    `on_main`: what the main process, which writes it, does with the whole dict. Shards stay where
    they are, and the tensors that other processes have to gather have no values there.
    """
    strategy = components.strategy
    unshard: Callable[[Any], Any] = strategy.gather_tensors
    if strategy.sharded_checkpoint:
        unshard = dict
    model = components.model
    average = components.average
    saver = saver_of(components.callbacks)
    sources = left_out(components)
    states = {}
    for name, callback in components.callbacks.items():
        state = dict(callback.state_dict())
        if isinstance(callback, Average) and "model" in state:
            # The average of what never changes is exactly that.
            state["model"] = borrowed.without(state["model"], sources)
        states[name] = state
    callbacks = unshard(states)
    averaged = {} if average is None else callbacks.pop(average.name, {})
    local_buffers = {} if strategy.shares_buffers else dict(model.named_buffers())
    skipped = {}
    loader = components.train_loader
    if hasattr(loader, "skipped_state"):  # a plain loader loads all samples
        skipped = {"skipped": loader.skipped_state()}

    gather = strategy.group.gather_data
    payload = {
        "model": unshard(borrowed.without(model.state_dict(), sources)),
        "optimizer": unshard(components.optimizers.state_dict()),
        "lr_scheduler": components.lr_schedule.state_dict(),
        "scaler": components.precision.state_dict(),
        "ema": averaged,
        "callbacks": callbacks,
        "state": {
            "counters": components.state.state_dict(),
            # Collectives: a list with the entry of each process, in the order of the ranks.
            "sums": gather(updater.log_accumulator.state_dict()),
            "epoch_sums": gather(updater.epoch_accumulator.state_dict()),
            "loader": gather(skipped),
            "own": gather(on_host(local_buffers)),
            "unsaved": gather(on_host(components.extra_state.state_dict(sources))),
            "metrics": dict(components.metrics),
            "data": components.data_facts,
            "lengths": _lengths(components),
            "roles": {"average": average and average.name, "saver": saver and saver.name},
            "world_size": strategy.group.data_size,  # those of a tensor group count as one
            "made_with": _environment(components),
        },
        "rng": gather(components.random.state_dict()),  # a collective, as those above
        "config": components.config_text,
        "format_version": reader.FORMAT_VERSION,
    }
    if not components.is_main:
        return payload
    if sources:
        payload[borrowed.KEY] = borrowed.entries_of(sources)
    return dict(on_main(payload))


def left_out(components: Components) -> dict[str, borrowed.WeightsSource | None]:
    """Return the parameters that a checkpoint leaves out now; the main process knows the sources.

    A collective where weights were read from files.
    """
    saver = saver_of(components.callbacks)
    # What changes weights may change frozen ones, too.
    changes = any(callback.changes_weights for callback in components.callbacks.values())
    if saver is None or changes or not components.borrowed:
        return {}
    sources = components.borrowed.names(saver.borrow) if components.is_main else {}
    # A collective: what is left out is gathered by no process.
    names = components.group.broadcast([*sources])
    return {name: sources.get(name) for name in names}


def load(
    components: Components,
    updater: Updater,
    payload: Mapping[str, Any],
    hyper_parameters: bool = True,
    same_run: bool = True,
) -> list[str]:
    """Let a training go on where `payload` was captured; return what cannot be exact, in words.

    With `hyper_parameters` false those that the training was built with are used from here on.
    Unless it is the `same_run`, the state of callbacks that describes a run directory's files is
    not loaded.
    """
    saved = payload["state"]
    remarks = [
        f"{key}: saved with {saved['made_with'][key]}, goes on with {value}: the last digits may "
        "differ"
        for key, value in _environment(components).items()
        if saved["made_with"].get(key, value) != value
    ]
    state = components.state
    state.load_state_dict(saved["counters"])
    changes = _find_position(components, saved)
    remarks += changes

    model = components.model
    strategy = components.strategy
    parameters = dict(model.named_parameters())
    payload = shards.read(payload, parameters)
    # The weights that the checkpoint leaves out the model has read already: see `check_fit`.
    weights = borrowed.completed(payload["model"], model.state_dict())
    strategy.load_model_state(model, weights)
    components.borrowed.continue_from(borrowed.read_entries(payload))
    optimizers = strategy.split_like(payload["optimizer"], parameters)
    remarks += components.optimizers.load_state_dict(optimizers, hyper_parameters)
    schedule = dict(payload["lr_scheduler"])
    left = updates_left(components.options, state, components.steps_per_epoch)
    if changes and left is not None:
        # As much of the curve is left as of the run.
        schedule["updates"] = (components.total_steps or left) - left
    components.lr_schedule.load_state_dict(schedule, hyper_parameters and not changes)
    components.precision.load_state_dict(payload["scaler"])
    _load_callbacks(components, payload, lambda callback: same_run or not callback.of_run)
    components.metrics.update(saved["metrics"])
    state.resumed = True
    state.branched = not hyper_parameters

    if saved["world_size"] == strategy.group.data_size:
        remarks += _load_same_processes(components, updater, payload)
    else:
        remarks += _load_other_processes(components, updater, saved)
    return remarks


def _load_same_processes(
    components: Components, updater: Updater, payload: Mapping[str, Any]
) -> list[str]:
    """Load what each process has for itself; as many processes as there were: exact."""
    saved = payload["state"]
    rank = components.group.data_rank
    loader = components.train_loader
    remarks = components.extra_state.load_state_dict(saved["unsaved"][rank])
    if hasattr(loader, "load_skipped_state"):
        loader.load_skipped_state([*saved["loader"][rank].get("skipped", [])])
    updater.log_accumulator.load_state_dict([saved["sums"][rank]])
    updater.epoch_accumulator.load_state_dict([saved["epoch_sums"][rank]])
    buffers = saved["own"][rank]
    with torch.no_grad():
        for name, buffer in components.model.named_buffers():
            buffer.copy_(buffers.get(name, buffer))
    return remarks + components.random.load_state_dict(payload["rng"][rank])


def _load_other_processes(
    components: Components, updater: Updater, saved: Mapping[str, Any]
) -> list[str]:
    """Load what each process had for itself, where their number has changed.

    The first process loads the sums and the skipped samples of all; the others load none, so that
    each counts once. Buffers and random states of single processes are lost.
    """
    is_first = components.group.data_rank == 0
    loader = components.train_loader
    remarks = components.extra_state.load_state_dict(saved["unsaved"][0])
    if hasattr(loader, "load_skipped_state"):
        skipped = [entry for part in saved["loader"] for entry in part.get("skipped", [])]
        loader.load_skipped_state(skipped if is_first else [])
    updater.log_accumulator.load_state_dict(saved["sums"], include_values=is_first)
    updater.epoch_accumulator.load_state_dict(saved["epoch_sums"], include_values=is_first)
    if saved["unsaved"][0].get("attributes"):
        remarks.append(
            "the task's state between batches (`persistent`) is that of the first process on all"
        )
    remarks.append(
        f"saved by {saved['world_size']} processes, resumed by {components.group.data_size}: "
        "the samples of every update stay the same; dropout masks and the last digits do not"
    )
    return remarks


def _lengths(components: Components) -> dict[str, int | None]:
    """Return what the position in an epoch and the schedule depend on; None: not known."""
    sampler = getattr(components.train_loader, "sampler", None)
    return {
        "loader.batch_size": getattr(sampler, "batch_size", None),
        "samples of an epoch": getattr(sampler, "samples", None),
        "updates of an epoch": components.steps_per_epoch,
    }


def _find_position(components: Components, saved: Mapping[str, Any]) -> list[str]:
    """Go on behind the samples of the epoch that were seen; return what has changed, in words.

    The updates of an epoch follow from the batch size and the data, which may both be others than
    those that the checkpoint was saved with.
    """
    state = components.state
    now = _lengths(components)
    then = saved.get("lengths", now)
    batch_size = now["loader.batch_size"]
    length = now["updates of an epoch"]
    if state.position and batch_size is not None and length is not None:
        batches_each = batches_per_update(components.task)
        # A checkpoint of an earlier version, whose batch size was this one.
        if "epoch_samples" not in saved["counters"]:
            state.epoch_samples = state.position * batch_size * batches_each
        sampler = components.train_loader.sampler
        batch = sampler.resume(state.epoch, state.epoch_samples, length * batches_each)
        if batch is not None:
            # With another batch size less than an update may be left over, and is left out.
            state.position = math.ceil(batch / batches_each)
            state.epoch_samples += (state.position * batches_each - batch) * batch_size
    changes = [f"{name}: {then[name]} -> {now[name]}" for name in now if then[name] != now[name]]
    if not changes:
        return []
    return [
        f"{', '.join(changes)}: the run goes on behind the {state.epoch_samples} samples that it "
        f"has seen of epoch {state.epoch}; as much of the schedule is left as of the run"
    ]


def _environment(components: Components) -> dict[str, Any]:
    """Return what an exact resume depends on, beside the configuration."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": product_name(components.strategy.device),
    }


def find(
    group: Group, run_dir: Path | None, resume: Path | str
) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint that a training is to go on from, with its path; a collective.

    `resume`: a checkpoint, or a run's directory, whose newest is meant. "auto" stands for the
    training's own `run_dir`; None where that holds no checkpoint yet. Raises CheckpointError.
    """
    place = run_dir if resume == "auto" else Path(resume)
    if place is None:
        raise CheckpointError("resume='auto' goes on with what run_dir holds: give Trainer one")
    # A collective: the other processes may not see the main process's files.
    selected = group.broadcast(_read_newest(place) if group.is_main else None)
    if selected is None and resume == "auto":
        return None
    if selected is None:
        raise CheckpointError(f"resume={place}: there is no checkpoint in it")
    path, payload = selected
    latest = max(CheckpointStore(path.parent).steps(), default=0)
    if reader.is_inside(path, run_dir) and latest > log_point_of(payload).step:
        raise CheckpointError(
            f"{path}: run_dir holds checkpoints of later steps: go on with resume='auto', or give "
            "Trainer another run_dir"
        )
    return path, payload


def _read_newest(place: Path) -> tuple[Path, dict[str, Any]] | None:
    if place.is_file():
        return place, reader.read_checkpoint(place)
    newest = CheckpointStore(place / "checkpoints").newest()
    if newest is None:
        return None
    path, payload, damaged = newest
    for reason in damaged:
        _log.warning("%s: passed over", reason)
    return path, payload


def check_fit(components: Components, payload: Mapping[str, Any], path: Path | None = None) -> None:
    """Raise CheckpointError unless a checkpoint's weights, and those it borrows, are the model's.

    Before anything is changed.
    """
    where = "" if path is None else f"{path}: "
    components.borrowed.check(borrowed.read_entries(payload, where), where)
    reader.compare_names(payload, components.model.state_dict(), path)


def load_weights(
    components: Components, payload: Mapping[str, Any], path: Path | None = None
) -> None:
    """Give the model the weights of a checkpoint, its averages and its task's, nothing else."""
    model = components.model
    check_fit(components, payload, path)
    parameters = dict(model.named_parameters())
    needed = ("model", "callbacks", "ema", "shards", "state")
    payload = shards.read({key: payload[key] for key in needed if key in payload}, parameters)
    with reader.loading("the weights"):
        weights = borrowed.completed(payload["model"], model.state_dict())
        components.strategy.load_model_state(model, weights)
        extra_states = payload.get("state", {}).get("unsaved")
        if extra_states:
            components.extra_state.load_state_dict(extra_states[0])
        _load_callbacks(components, payload, lambda callback: isinstance(callback, Average))


def _load_callbacks(
    components: Components, payload: Mapping[str, Any], is_wanted: Callable[[Callback], bool]
) -> None:
    saved = dict(payload["callbacks"])
    average = name_of("average", payload)  # the state of the one that is evaluated stands apart
    if average:
        saved[average] = payload["ema"]
    parameters = dict(components.model.named_parameters())
    saved = components.strategy.split_like(saved, parameters)
    for name, callback in components.callbacks.items():
        if saved.get(name) and is_wanted(callback):
            callback.load_state_dict(saved[name])


def name_of(role: str, payload: Mapping[str, Any]) -> str | None:
    """Return how the callback with a role was called."""
    roles: Mapping[str, str | None] = payload.get("state", {}).get("roles", {})
    return roles.get(role)


def log_point_of(payload: Mapping[str, Any]) -> LogPoint:
    """Return the step and the epoch of a checkpoint's weights."""
    counters = payload["state"]["counters"]
    return LogPoint(int(counters["global_step"]), int(counters["epoch"]))
