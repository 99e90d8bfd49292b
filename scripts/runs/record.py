"""The directory of a run: it is locked during the run, and records how the run ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from conf.schema import Config
from scripts.cli.console import describe, exit_code, log_file
from scripts.cli.request import Request
from scripts.runs.log import Backlog, logged_to
from scripts.runs.report import best_of, results_of
from scripts.runs.resume import Resume
from trainer.build.experiment import Experiment
from trainer.callback import Results
from trainer.errors import EXIT_CODES, Interrupted, StorageError
from trainer.inference.facts import facts_of
from trainer.runs.directory import (
    CONFIG,
    RunDirectory,
    in_new_parent,
    name_folder,
    reserve,
    timestamp,
)
from trainer.runs.status import ENDED_WELL
from trainer.trainer import Trainer

logger = logging.getLogger("regimen")
RUNS = Path("runs")


def new_folder(config: Config) -> Path:
    """Return the run directory: `run_dir`, or a new folder from the run's name and the time."""
    if config.run_dir is None:
        return reserve(name_folder(RUNS, config.name), timestamp())
    return Path(config.run_dir)


@contextmanager
def held_directory(
    request: Request, experiment: Experiment, resume: Resume | None, earlier: Backlog
) -> Iterator[RunDirectory | None]:
    """Lock the run directory in the main process, and record there how the run ends."""
    config, trainer = experiment.config, experiment.trainer
    directory = None
    if trainer.is_main:
        facts = _facts(experiment)
        if resume is not None and resume.run_dir is not None:
            directory = RunDirectory.resume(resume.run_dir, facts=facts)
        else:
            directory = RunDirectory.create(
                new_folder(config),
                config_yaml=request.config_text(),
                overrides=request.overrides,
                facts=facts,
            )
        if not directory.inference_path.exists():
            facts_of(config, experiment.data, trainer.task).write(directory.path)
        directory.running(
            resume=request.resume_command(directory.path)
        )  # for a run that is killed by SIGKILL
    trainer.run_dir = trainer.group.broadcast(directory and directory.path)
    with logged_to(directory.log_path if directory else None, earlier):
        try:
            yield directory
        except BaseException as error:
            results = _failure(experiment, error)
            if directory is not None:
                began = trainer.state.updates or (resume is not None and resume.run_dir is not None)
                if results.code == ConfigError.exit_code and not began:
                    _discard(directory, config)
                else:
                    log_file.error("error: %s", results.reason, exc_info=error)
                    _record(request, directory, experiment, results)
            trainer.end(results)
            raise
        finally:
            if directory is not None:
                directory.release()


def record_config(request: Request, experiment: Experiment, directory: RunDirectory) -> None:
    """Write again what a resumed run's directory says of a configuration that has changed."""
    text, path = request.config_text(), directory.path / CONFIG
    if path.is_file() and path.read_bytes() == text.encode():
        return
    directory.configure(text, request.overrides)
    task = experiment.trainer.task
    facts_of(experiment.config, experiment.data, task).write(directory.path)


def _discard(directory: RunDirectory, config: Config) -> None:
    """Remove the directory of a run that a configuration error kept from starting."""
    directory.discard()
    parents = [directory.path.parent]
    if config.run_dir is None:
        parents.append(RUNS.absolute())
    elif not in_new_parent(Path(config.run_dir)):
        parents.clear()
    for folder in parents:
        with suppress(OSError):  # other runs are in it
            folder.rmdir()


def _failure(experiment: Experiment, error: BaseException) -> Results:
    code = exit_code(error)
    state = "preempted" if code in EXIT_CODES.values() else "failed"
    return Results(state, results_of(experiment, {}), code, describe(error))


def _record(
    request: Request, directory: RunDirectory, experiment: Experiment, results: Results
) -> None:
    try:
        directory.finish(
            results.state,
            code=results.code,
            reason=results.reason,
            resume=request.resume_command(directory.path),
            best=best_record(experiment),
            seconds=experiment.trainer.timer.seconds,
        )
    except StorageError:
        logger.warning("status.json could not be written")


def best_record(experiment: Experiment) -> dict[str, Any] | None:
    """Return metric, value and step of the best checkpoint, for `status.json`."""
    best = best_of(experiment)
    return None if best is None else dict(zip(("metric", "value", "step"), best, strict=True))


def record_skipped(directory: RunDirectory, trainer: Trainer) -> None:
    """List in the manifest the samples that could not be loaded, if there are any."""
    if skipped := getattr(trainer.train_loader, "skipped", []):
        listed = [{"sample": s.index, "file": s.path, "reason": s.reason} for s in skipped]
        directory.update_manifest({"skipped_samples": listed})


def outcome(experiment: Experiment, tested: dict[str, float]) -> Results:
    """Return how a run ended that no exception ended: `pruned` or `stopped` are not `finished`."""
    trainer, metrics = experiment.trainer, results_of(experiment, tested)
    state = trainer.state
    where = f"epoch {state.epoch}, step {state.global_step}"
    if state.pruned:
        return Results("pruned", metrics, reason=f"pruned at {where}")
    if trainer.done or not state.interrupted:
        return Results("finished", metrics)
    limit = f"trainer.max_time={experiment.config.trainer.max_time}"
    return Results("stopped", metrics, reason=f"its time limit ended it at {where} ({limit})")


def record_end(
    request: Request, experiment: Experiment, directory: RunDirectory, results: Results
) -> None:
    """Record the end of a run."""
    finished = results.state in ENDED_WELL
    directory.finish(
        results.state,
        reason=results.reason,
        resume=None if finished else request.resume_command(directory.path),
        results=results.metrics,
        best=best_record(experiment),
        seconds=experiment.trainer.timer.seconds,
    )


def interrupted(request: Request, trainer: Trainer) -> Interrupted:
    """Return the error of a run that a signal stopped, with what was saved and how to resume."""
    state = trainer.state
    assert trainer.run_dir is not None
    last = trainer.run_dir / "checkpoints" / "last.pt"
    if not state.updates:
        saved = "before the first update: there was nothing to save"
    elif not last.exists():
        saved = f"step {state.global_step} was not saved: there is no callbacks.checkpoint"
    else:
        saved = f"saved {last} at step {state.global_step}"
    command = request.resume_command(trainer.run_dir)
    return Interrupted(
        f"stopped by {state.stop_reason}; {saved}; go on with: {command}", state.stop_code
    )


def _facts(experiment: Experiment) -> dict[str, Any]:
    config, trainer = experiment.config, experiment.trainer
    return {
        "seed": config.seed,
        "device": str(trainer.strategy.device),
        "strategy": trainer.strategy.name,
        "world_size": trainer.group.world_size,
        "switches": {
            **experiment.switches,
            "channels_last": config.trainer.channels_last,
            "compile": config.trainer.compile,
            "detect_anomaly": config.trainer.detect_anomaly,
        },
        "precision": trainer.precision.name,
        "data": experiment.data.describe(),
        "threads": experiment.threads,
    }
