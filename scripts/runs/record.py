"""The directory of a run: it is locked during the run, and records how the run ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from conf.schema import Config
from scripts.cli.arguments import Request
from scripts.cli.console import describe, exit_code, log_file
from scripts.runs.report import best_of, results_of
from scripts.runs.resume import Resume
from trainer.assembly.experiment import Experiment
from trainer.callback import Results
from trainer.errors import EXIT_CODES, Interrupted, StorageError
from trainer.files.append_log import LogFileHandler
from trainer.inference.facts import facts_of
from trainer.runs.directory import CONFIG, RunDirectory, name_folder, reserve, timestamp
from trainer.runs.status import CHECKPOINTS, ENDED_WELL, INFERENCE, LOG
from trainer.trainer import Trainer

logger = logging.getLogger("regimen")
RUNS = Path("runs")


@dataclass(slots=True)
class BuiltRun:
    """A run that is built; what it records, it records on the main process."""

    request: Request  # with the configuration of the resumed run
    experiment: Experiment
    resume: Resume | None
    directory: RunDirectory | None = None  # on the main process, while it is held

    @property
    def goes_on(self) -> bool:
        """Whether an earlier run is continued in its directory."""
        return self.resume is not None and self.resume.run_dir is not None

    def hold(self) -> RunDirectory:
        """Make or take the run's directory and lock it, on the main process."""
        config, facts = self.experiment.config, _facts(self.experiment)
        if self.resume is not None and self.resume.run_dir is not None:
            self.directory = RunDirectory.resume(self.resume.run_dir, facts=facts)
        else:
            text, overrides = self.request.config_text(), self.request.overrides
            self.directory = RunDirectory.create(
                new_folder(config), config_yaml=text, overrides=overrides, facts=facts
            )
        if not (self.directory.path / INFERENCE).exists():
            self._write_inference_facts(self.directory)
        # For a run that is killed by SIGKILL.
        self.directory.running(resume=self.request.resume_command(self.directory.path))
        return self.directory

    def record_config(self) -> None:
        """Write again what a continued run's directory says of a configuration that has changed."""
        if self.directory is None or not self.goes_on:
            return
        text, path = self.request.config_text(), self.directory.path / CONFIG
        if not (path.is_file() and path.read_bytes() == text.encode()):
            self.directory.configure(text, self.request.overrides)
            self._write_inference_facts(self.directory)

    def record_skipped(self) -> None:
        """List in the manifest the samples that could not be loaded, if there are any."""
        skipped = getattr(self.experiment.trainer.train_loader, "skipped", [])
        if self.directory is not None and skipped:
            listed = [{"sample": s.index, "file": s.path, "reason": s.reason} for s in skipped]
            self.directory.update_manifest({"skipped_samples": listed})

    def record_end(self, results: Results) -> None:
        """Record how the run ended. Raises StorageError."""
        if self.directory is None:
            return
        ended, best = results.state in ENDED_WELL, best_of(self.experiment)
        self.directory.finish(
            results.state,
            code=results.code,
            reason=results.reason,
            resume=None if ended else self.request.resume_command(self.directory.path),
            results=None if results.code else results.metrics,
            best=best and dict(zip(("metric", "value", "step"), best, strict=True)),
            seconds=self.experiment.trainer.timer.seconds,
        )

    def record_failure(self, error: BaseException, results: Results) -> None:
        """Record what ended the run; a mistake that kept it from starting leaves no directory."""
        began = self.experiment.trainer.state.updates or self.goes_on
        if self.directory is not None and results.code == ConfigError.exit_code and not began:
            self.directory.discard()
            if self.experiment.config.run_dir is None:
                with suppress(OSError):  # other runs are in it
                    for folder in (self.directory.path.parent, RUNS.absolute()):
                        folder.rmdir()
        elif self.directory is not None:
            log_file.error("error: %s", results.reason, exc_info=error)
            try:
                self.record_end(results)
            except StorageError:
                logger.warning("status.json could not be written")

    def _write_inference_facts(self, directory: RunDirectory) -> None:
        experiment = self.experiment
        facts = facts_of(experiment.config, experiment.data, experiment.trainer.task)
        facts.write(directory.path)


@contextmanager
def recorded(run: BuiltRun, log: MemoryHandler) -> Iterator[None]:
    """Hold the run directory and its log, and record there an exception that ends the run."""
    trainer = run.experiment.trainer
    directory = run.hold() if trainer.is_main else None
    trainer.run_dir = trainer.group.broadcast(directory and directory.path)
    file = logging.NullHandler() if directory is None else LogFileHandler(directory.path / LOG)
    log.setTarget(file)
    log.flush()
    try:
        yield
    except BaseException as error:
        code = exit_code(error)
        state = "preempted" if code in EXIT_CODES.values() else "failed"
        results = Results(state, results_of(run.experiment, {}), code, describe(error))
        run.record_failure(error, results)
        trainer.end(results)
        raise
    finally:
        if directory is not None:
            directory.release()
        log.setTarget(None)
        file.close()


def new_folder(config: Config) -> Path:
    """Return the run directory: `run_dir`, or a new folder from the run's name and the time."""
    if config.run_dir is None:
        return reserve(name_folder(RUNS, config.name), timestamp())
    return Path(config.run_dir)


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


def interrupted(request: Request, trainer: Trainer) -> Interrupted:
    """Return the error of a run that a signal stopped, with what was saved and how to resume."""
    state = trainer.state
    assert trainer.run_dir is not None
    last = trainer.run_dir / CHECKPOINTS / "last.pt"
    if not state.updates:
        saved = "before the first update: there was nothing to save"
    elif not last.exists():
        saved = f"step {state.global_step} was not saved: there is no callbacks.checkpoint"
    else:
        saved = f"saved {last} at step {state.global_step}"
    go_on = f"go on with: {request.resume_command(trainer.run_dir)}"
    return Interrupted(f"stopped by {state.stop_reason}; {saved}; {go_on}", state.stop_code)


def _facts(experiment: Experiment) -> dict[str, Any]:
    config, trainer = experiment.config, experiment.trainer
    switches = ("channels_last", "compile", "detect_anomaly")
    return {
        "seed": config.seed,
        "device": str(trainer.strategy.device),
        "strategy": trainer.strategy.name,
        "world_size": trainer.group.world_size,
        "switches": experiment.switches | {n: getattr(config.trainer, n) for n in switches},
        "precision": trainer.precision.name,
        "data": experiment.data.describe(),
        "threads": experiment.threads,
    }
