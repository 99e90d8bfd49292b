"""The run of a `Trainer` that was given a `run_dir`: its folder, its log and how it ended."""

import inspect
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from regimen.conf.errors import ConfigError
from regimen.conf.schema_trainer import TrainerConfig
from regimen.trainer.callback import Callback, Results, named_callbacks, saver_of
from regimen.trainer.checkpoints.reader import best_or_last, is_inside
from regimen.trainer.components.components import Components
from regimen.trainer.errors import CheckpointError, StorageError, qualified_name
from regimen.trainer.files.atomic import LogFileHandler, write_json
from regimen.trainer.options import is_reached
from regimen.trainer.runs.directory import (
    RUN_FILES,
    RunDirectory,
    refuse_existing,
    refuse_held,
    refuse_links,
)
from regimen.trainer.runs.epoch_lines import EpochLines
from regimen.trainer.runs.interrupt import resume_call
from regimen.trainer.runs.metrics_log import MetricsLog
from regimen.trainer.runs.results import best_record, failure, outcome
from regimen.trainer.runs.status import (
    ENDED_WELL,
    INFERENCE,
    LOG,
    Record,
    RunDirectoryError,
    holds_run,
    read_metrics,
)
from regimen.trainer.state import MAX_TIME, LogPoint, TrainState
from regimen.trainer.task import Task

_log = logging.getLogger(__name__)
OWN_TASKS = "regimen.trainer.tasks."  # the package of the tasks that a name and numbers rebuild


class PythonRun:
    """The run directory of a Trainer, which `fit` holds while it trains; on the main process.

    overwrite: the first `fit` begins anew where the directory holds a run.
    """

    def __init__(self, path: Path, overwrite: bool) -> None:
        self.path = path.absolute()  # user code may change the working directory
        self._overwrite = overwrite
        self._began = False  # whether an earlier `fit` of this Trainer wrote the run
        self._directory: RunDirectory | None = None  # while it is held
        self._log: LogFileHandler | None = None

    def goes_on(self, resume: Path | str | None, checkpoint: Path | None) -> bool:
        """Return whether `fit` goes on with the run that the directory holds.

        checkpoint: what `resume` has selected; None if there is none.
        """
        if self._began:
            return True
        if resume is None or not holds_run(self.path):
            return False
        inside = resume == "auto"
        if checkpoint is not None:
            inside = is_inside(checkpoint, self.path)
        if inside and self._overwrite:
            raise ConfigError(
                "resume",
                f"{self.path} holds the run to go on with, and overwrite=True would remove it",
                "leave out one of the two",
            )
        return inside

    def hold(self, components: Components, plan: str, goes_on: bool) -> None:
        """Make or take the run's directory, lock it, and write what is known before training.

        `plan`: the first text of its log.
        Raises RunDirectoryError for a directory that holds a run which is not gone on with, or that
        another process has locked; StorageError.
        """
        facts = _facts(components)
        command = resume_call(self.path)
        config = components.config_text
        if not config:
            config = yaml.safe_dump(_settings(components.options), sort_keys=False)
        if goes_on:
            directory = RunDirectory.resume(self.path, facts=facts, command=command)
        else:
            self._make_way()
            directory = RunDirectory.create(
                self.path, config_yaml=config, overrides=[], facts=facts, command=command
            )
        self._directory = directory
        try:
            directory.configure(config, [])
            write_json(self.path / INFERENCE, _inference_facts(components))
            self._log = LogFileHandler(self.path / LOG)
        except BaseException:
            self._release()
            raise
        logging.getLogger("regimen").addHandler(self._log)
        self.note(plan)

    def note(self, text: str, error: BaseException | None = None) -> None:
        """Write a text to `train.log`, and the traceback of an error, whatever logging shows."""
        if self._log is None:
            return
        level = logging.INFO if error is None else logging.ERROR
        record = {"msg": text, "levelno": level, "levelname": logging.getLevelName(level)}
        if error is not None:
            record["exc_info"] = type(error), error, error.__traceback__
        self._log.handle(logging.makeLogRecord(record))

    def end(self, components: Components, error: BaseException | None) -> None:
        """Record how `fit` ended, and release the directory."""
        if self._directory is None:
            return
        if error is None:
            results = outcome(components, {})
        else:
            results = failure(components, error)
        began = components.state.updates > 0 or self._began or components.state.resumed
        try:
            if results.code == ConfigError.exit_code and not began:
                self._directory.discard()  # a mistake that kept it from starting leaves nothing
            else:
                self._began = True
                self.note(f"{results.state}: {results.reason or components.state.where}", error)
                self._record(components, results)
        finally:
            self._release()

    def _record(self, components: Components, results: Results) -> None:
        assert self._directory is not None
        resume = resume_call(self.path)
        try:
            self._directory.finish(
                results.state,
                code=results.code,
                reason=results.reason,
                resume=None if results.state in ENDED_WELL else resume,
                results=None if results.code else results.metrics,
                best=best_record(components.callbacks),
                seconds=components.timer.seconds,
            )
        except StorageError:
            if not results.code:
                raise
            _log.warning("status.json could not be written")  # the error on its way matters more

    def _make_way(self) -> None:
        """Refuse a directory that holds a run, or remove that run where it may be overwritten."""
        if not holds_run(self.path):
            return
        if not self._overwrite:
            raise RunDirectoryError(
                "run_dir",
                f"{self.path} already holds a run",
                "fit(resume='auto') goes on with it, Trainer(..., overwrite=True) begins anew; "
                "or choose another run_dir",
            )
        refuse_held(self.path)
        refuse_links(self.path)
        for name in RUN_FILES:  # the manifest first: without it there is no run
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif os.path.lexists(path):
                path.unlink()
        refuse_existing(self.path)

    def _release(self) -> None:
        if self._log is not None:
            logging.getLogger("regimen").removeHandler(self._log)
            self._log.close()
            self._log = None
        if self._directory is not None:
            self._directory.release()
            self._directory = None


@contextmanager
def recorded(run: PythonRun | None, components: Components) -> Iterator[None]:
    """Record how a `fit` ended, where it writes a run of its own."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if run is not None:
            run.end(components, error)


def callbacks_of(
    given: Mapping[str, Callback] | Iterable[Callback] | None, of_run: bool, verbose: bool
) -> dict[str, Callback]:
    """Return the callbacks of a Trainer by name, those that it adds itself first.

    These are `metrics.jsonl` of a run, and the lines of epochs, unless a callback shows the
    progress or none is wanted.
    """
    named = named_callbacks(() if given is None else given)
    added: dict[str, Callback] = {}
    if of_run and not any(isinstance(callback, MetricsLog) for callback in named.values()):
        added["metrics_log"] = MetricsLog()
    is_silent = not verbose or (given is not None and not named)
    shows_progress = any(callback.shows_progress for callback in named.values())
    if not shows_progress and not is_silent:
        added["epoch_lines"] = EpochLines()
    return {**named_callbacks(added), **named}


def check_max_epochs(max_epochs: Any) -> None:
    """Raise ConfigError for what is no number of epochs."""
    if isinstance(max_epochs, bool) or not isinstance(max_epochs, int) or max_epochs < 1:
        raise ConfigError("max_epochs", f"expected an integer >= 1, got {max_epochs!r}")


def add_row(
    history: list[dict[str, float]] | None, at: LogPoint, scalars: Mapping[str, float]
) -> None:
    """Add logged values to the row of their step, which is the last one, or to a new row."""
    if history is None:
        return
    if not history or history[-1]["step"] != at.step:
        history.append({"step": at.step, "epoch": at.epoch})
    history[-1].update(scalars)


def restore_history(
    run: PythonRun | None, history: list[dict[str, float]] | None, last_step: int
) -> None:
    """Load what the run has logged up to the checkpoint that it goes on from, at `last_step`."""
    if history is None or run is None:
        return
    history.clear()
    for line in read_metrics(run.path):
        at = LogPoint(int(line.pop("step")), int(line.pop("epoch")))
        if at.step <= last_step:
            # JSON has no NaN: it stands as null.
            values = {k: math.nan if v is None else float(v) for k, v in line.items()}
            add_row(history, at, values)


def plan_of(components: Components, val_stages: Sequence[str], run_dir: Path | None) -> str:
    """Return what a Trainer is about to do, in ten lines or fewer."""
    options = components.options
    optimizers = components.optimizers
    parameters = list(components.model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    classes = ", ".join(type(o).__name__ for o in optimizers.optimizers.values())
    rates = ", ".join(f"{name} {rate:g}" for name, rate in optimizers.learning_rates().items())
    updates = "a stream of unknown length"
    length = components.steps_per_epoch
    if length is not None:
        updates = f"{length} updates an epoch"
    ends = []
    for name in ("max_epochs", "max_steps", "max_time"):
        value = getattr(options, name)
        if value is not None:
            ends.append(f"{name}={value}")
    rows = {
        "model": f"{type(components.model).__name__}, {trained:,} trained parameters of "
        f"{sum(p.numel() for p in parameters):,}",
        "task": type(components.task).__name__,
        "optimizer": f"{classes} ({rates})",
        "training": f"{updates}, {options.micro_batches} micro-batches an update",
        "validation": ", ".join(val_stages) or "none",
        "length": f"{', '.join(ends)}; {components.state.where} so far",
        "device": f"{components.strategy.device}, {components.precision.name}",
        "callbacks": ", ".join(components.callbacks) or "none",
        "run_dir": str(run_dir) if run_dir else "none: nothing is written",
    }
    return "\n".join(["Trainer", *(f"  {name:<11}{text}" for name, text in rows.items())])


def best_checkpoint(run_dir: Path | None) -> Path:
    """Return the best checkpoint of a run, or the last of one that has no best.

    Raises CheckpointError where there is none.
    """
    if run_dir is None:
        raise CheckpointError(
            "no checkpoint was saved: give Trainer a run_dir, and callbacks=[Checkpoint()] of "
            "regimen.callbacks.checkpoint"
        )
    folder = run_dir / "checkpoints"
    path = best_or_last(folder)
    if path is None:
        raise CheckpointError(
            f"{folder} holds neither best.pt nor last.pt: Trainer(..., callbacks=[Checkpoint()]) "
            "of regimen.callbacks.checkpoint saves them"
        )
    return path


def unsaved_remark(
    run: PythonRun | None, callbacks: Mapping[str, Callback], run_dir: Path | None
) -> str | None:
    """Say that a Trainer saves no checkpoints for lack of a directory or a callback."""
    saver = saver_of(callbacks)
    if run_dir is None and saver is not None:
        return f"callbacks.{saver.name} saves nothing: the Trainer was given no run_dir"
    if run is not None and saver is None:
        return (
            f"run_dir={run.path}: metrics and log are written, and no checkpoints: "
            "callbacks=[Checkpoint()] of regimen.callbacks.checkpoint saves them"
        )
    return None


def end_remark(components: Components) -> str | None:
    """Say why `fit` has nothing left to train; None where it has."""
    state = components.state
    options = components.options
    where = state.where
    if state.stop_reason is not None:
        return (
            f"fit ends at once: the training was stopped at {where} ({state.stop_reason}); "
            "fit(max_epochs=...) goes on"
        )
    if not is_reached(options, state):
        return None
    if options.max_steps is not None and state.global_step >= options.max_steps:
        return f"fit ends at once: max_steps={options.max_steps} is reached, at {where}"
    return (
        f"fit ends at once: max_epochs={options.max_epochs} is reached, at {where}; "
        f"fit(max_epochs={state.epoch + 1}) goes on"
    )


def clear_stop(state: TrainState, longer: bool) -> None:
    """Forget the stop of an earlier `fit`, so that the training goes on.

    A stop by a signal or by the time limit is forgotten; where a `longer` training is asked for,
    so is that of a callback, such as early stopping.
    """
    if state.stop_code or state.stop_reason == MAX_TIME or longer:
        state.stop_reason = None
        state.stop_code = 0
        state.requested = None
        state.signal = None


def _facts(components: Components) -> Record:
    return {
        "seed": components.options.seed,
        "tags": [],
        "device": str(components.strategy.device),
        "strategy": components.strategy.name,
        "world_size": components.group.world_size,
        "precision": components.precision.name,
        "threads": torch.get_num_threads(),
    }


def _settings(options: TrainerConfig) -> Record:
    """Return the options of a Trainer as a part of a configuration: that from Python has no more.

    What describes no object is in it alone, so that `regimen runs` can compare runs.
    """
    values = asdict(options)
    seed = values.pop("seed", 0)
    return {"seed": seed, "trainer": values}


def _inference_facts(components: Components) -> Record:
    """Return what `load_run` needs beside the model, in the form of `inference.json`."""
    task = components.task
    outputs: Record = {"kind": task.output_kind}
    threshold = getattr(task, "threshold", None)
    if threshold is not None:
        outputs["threshold"] = threshold
    name = qualified_name(task)
    if name.startswith(OWN_TASKS):
        outputs["task"] = {"name": name, "arguments": _required_arguments(task)}
    count = getattr(task, "num_classes", None)
    return {
        "classes": None,
        "num_classes": count if isinstance(count, int) else None,
        "inputs": {"kind": "array"},
        "outputs": outputs,
        "transforms": {},
        "model": {"_target_": qualified_name(components.model)},
    }


def _required_arguments(task: Task) -> Record:
    """Return the plain arguments without a default that a task of ours is made with."""
    arguments: Record = {}
    for name, parameter in inspect.signature(type(task)).parameters.items():
        value = getattr(task, name, None)
        if parameter.default is parameter.empty and isinstance(value, int | float | str):
            arguments[name] = value
    return arguments
