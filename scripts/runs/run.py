"""One process of a run, in order: build, lock the directory, resume, train, test, report."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from logging.handlers import MemoryHandler
from pathlib import Path

import torch

from regimen.callbacks.trial import Trial
from regimen.conf.addresses import is_address
from regimen.conf.check import parse
from regimen.conf.errors import ConfigError, Problem, raise_problems
from regimen.conf.schema import Config
from regimen.data.errors import ClassNamesError
from regimen.models.pretrained import no_initial_weights
from regimen.scripts.cli.arguments import RUNS, RunRequest
from regimen.scripts.cli.console import log_file
from regimen.scripts.runs.plan import make_plan
from regimen.scripts.runs.report import final_block
from regimen.scripts.runs.resume import Resume, changes, find_resume, new_folder
from regimen.scripts.runs.signals import stop_signals
from regimen.trainer import snapshot
from regimen.trainer.assembly.accumulation import find_accumulation_steps
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.assembly.data import with_statistics
from regimen.trainer.assembly.experiment import Experiment, build
from regimen.trainer.assembly.parts import build_strategy
from regimen.trainer.callback import Callback, Results, keeps_weights
from regimen.trainer.checkpoints import borrowed
from regimen.trainer.checkpoints.reader import best_or_last, read_checkpoint
from regimen.trainer.device import product_name
from regimen.trainer.distributed import attempt
from regimen.trainer.errors import CheckpointError, Interrupted, StorageError
from regimen.trainer.evaluation import EvaluationAbandoned
from regimen.trainer.files.atomic import LogFileHandler
from regimen.trainer.files.layout import terminal_width
from regimen.trainer.inference.predictor import inference_metadata
from regimen.trainer.runs.directory import RunDirectory, refuse_existing, refuse_held
from regimen.trainer.runs.metrics_log import MetricsLog
from regimen.trainer.runs.results import best_record, failure, outcome
from regimen.trainer.runs.status import CHECKPOINTS, ENDED_WELL, LOG, check_run_dir
from regimen.trainer.strategies.strategy import Strategy, taking_part
from regimen.trainer.trainer import Trainer

logger = logging.getLogger("regimen")
_SWITCHES = ("channels_last", "compile", "detect_anomaly")


@dataclass(slots=True)
class BuiltRun:
    """A run that is built; what it records, it records on the main process."""

    request: RunRequest  # with the configuration of the resumed run
    experiment: Experiment
    resume: Resume
    directory: RunDirectory | None = None  # on the main process, while it is locked

    def acquire_directory(self) -> RunDirectory:
        """Create or reopen the run's directory and lock it; main process only."""
        experiment = self.experiment
        config = experiment.config
        trainer = experiment.trainer
        folder = self.resume.run_dir or new_folder(self.request.config)
        switches = {name: getattr(config.trainer, name) for name in _SWITCHES}
        facts = {
            "seed": config.seed,
            "tags": config.tags,
            "device": str(trainer.strategy.device),
            "strategy": trainer.strategy.name,
            "world_size": trainer.group.world_size,
            "switches": experiment.switches | switches,
            "precision": trainer.precision.name,
            "data": experiment.data.describe(),
            "threads": torch.get_num_threads(),
        }
        # Recorded at once: a run that SIGKILL ends cannot say how to resume it.
        command = self.request.resume_command(folder.absolute())
        if self.resume.run_dir is not None:
            self.directory = RunDirectory.resume(folder, facts=facts, command=command)
        else:
            self.directory = RunDirectory.create(
                folder,
                config_yaml=self.request.config_text(),
                overrides=self.request.overrides,
                facts=facts,
                command=command,
            )
        return self.directory

    def record_end(self, results: Results) -> None:
        """Record how the run ended. Raises StorageError."""
        if self.directory is None:
            return
        trainer = self.experiment.trainer
        resume_command = None
        if results.state not in ENDED_WELL:
            resume_command = self.request.resume_command(self.directory.path)
        self.directory.finish(
            results.state,
            code=results.code,
            reason=results.reason,
            resume=resume_command,
            results=None if results.code else results.metrics,
            best=best_record(trainer.callbacks),
            seconds=trainer.timer.seconds,
        )


def run(request: RunRequest, note: Path | None = None) -> int:
    """Train and return the exit code; failures are raised.

    The main process writes the path of the run directory to the file `note`, for the launcher.
    """
    config = parse(request.config)
    with _explaining_missing(request):
        check_targets(config)
    strategy = build_strategy(config)
    remark = strategy.explain()
    if remark:
        logger.info("%s", remark)
    with taking_part(strategy), buffered_log() as log:
        _log_device(strategy)
        _refuse_different_configs(request, strategy)
        request = _resume_after_restart(request, strategy)
        built = _build(request, strategy)
        if built is not None:
            trainer = built.experiment.trainer
            # Signals are handled outermost, around all that writes: a terminal that is closed
            # sends SIGHUP twice.
            with (
                stop_signals(trainer.state, trainer.group),
                recording(built, log),
                strategy.group.propagate_errors(),
            ):
                _train(built, note)
    return 0


@contextmanager
def _explaining_missing(request: RunRequest) -> Iterator[None]:
    """Let a resumed run say that what its checkpoint borrows is gone, if that is the mistake."""
    try:
        yield
    except ConfigError as error:
        resume = request.config["resume"]
        if resume is None or is_address(resume):
            raise
        payload = find_resume(request.config).payload
        with borrowed.explaining_missing(payload, request.config["model"], "resume: "):
            raise error


def _log_device(strategy: Strategy) -> None:
    device = str(strategy.device)
    product = product_name(strategy.device)
    name = device if product == device else f"{device}, {product}"
    number = f", the first of {strategy.devices}" if strategy.devices > 1 else ""
    logger.info("device: %s%s, threads: %d", name, number, torch.get_num_threads())


def _refuse_different_configs(request: RunRequest, strategy: Strategy) -> None:
    """Raise ConfigError if processes were started with different configurations (torchrun)."""
    # A collective: every process sees all differences and fails alike.
    configs = strategy.group.gather(request.config)
    problems = []
    for rank, config in enumerate(configs):
        keys = changes(configs[0], config)
        if keys:
            problems.append(Problem("", f"config differs on rank {rank}: {', '.join(keys)}"))
    raise_problems(problems)


def _resume_after_restart(request: RunRequest, strategy: Strategy) -> RunRequest:
    """Return the request, which resumes the run if a launcher has restarted the processes."""
    run_dir = strategy.group.recall_run()
    number = attempt()
    if number != "0" and strategy.group.is_main:
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        logger.warning("restart %s of %s", number, most)
    if run_dir is None:
        return request
    return replace(request, config={**request.config, "run_dir": run_dir, "resume": "auto"})


@contextmanager
def buffered_log() -> Iterator[MemoryHandler]:
    """Buffer log records until the handler gets a target, `train.log`; then pass them on."""
    handler = MemoryHandler(1)
    logging.getLogger().addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


@contextmanager
def recording(run: BuiltRun, log: MemoryHandler) -> Iterator[None]:
    """Lock the run directory, open its log, and record an exception that ends the run."""
    trainer = run.experiment.trainer
    directory = run.acquire_directory() if trainer.is_main else None
    # A collective: the other processes learn the path that the main process has chosen.
    trainer.use_run_dir(trainer.group.broadcast(directory and directory.path))
    file = logging.NullHandler() if directory is None else LogFileHandler(directory.path / LOG)
    log.setTarget(file)
    log.flush()
    try:
        yield
    except BaseException as error:
        results = failure(trainer.components, error)
        if directory is not None:
            _record_failure(run, directory, error, results)
        trainer.end(results)
        raise
    finally:
        if directory is not None:
            directory.release()
        log.setTarget(None)
        file.close()


def _record_failure(
    run: BuiltRun, directory: RunDirectory, error: BaseException, results: Results
) -> None:
    """Record the exception that ends the run; of a run that never started remove the directory."""
    has_begun = run.experiment.trainer.state.updates or run.resume.run_dir is not None
    if has_begun or results.code != ConfigError.exit_code:
        log_file.error("error: %s", results.reason, exc_info=error)
        try:
            run.record_end(results)
        except StorageError:
            logger.warning("status.json could not be written")
        return
    directory.discard()
    if run.experiment.config.run_dir is None:
        with suppress(OSError):  # other runs are in the folder
            for folder in (directory.path.parent, RUNS.absolute()):
                folder.rmdir()


def _build(request: RunRequest, strategy: Strategy) -> BuiltRun | None:
    """Build the run; None after a dry run, or if nothing is left to train."""
    group = strategy.group
    run_dir = request.config["run_dir"]
    if run_dir is not None:
        check_run_dir(Path(run_dir))
    # A collective: the main process reads the files, and all resume from the same checkpoint.
    resume = group.broadcast(find_resume(request.config) if group.is_main else None)
    if request.config["dry_run"]:
        _refuse_unusable_directory(run_dir, resume)
    if resume.finished:
        logger.info("%s", resume.finished)
        return None

    # From here on the configuration of the resumed run, which its checkpoints then save.
    request = replace(request, config=resume.config)
    config = parse(resume.config)
    if config.trainer.gradient_accumulation_steps == "auto":
        # The number is saved in place of the word: a resumed run has the same.
        steps = {"gradient_accumulation_steps": find_accumulation_steps(config, strategy)}
        values = {**request.config, "trainer": request.config["trainer"] | steps}
        request = replace(request, config=values)
        config = parse(values)

    experiment = _build_experiment(request, config, resume, strategy)
    if resume.payload:
        # Weights are compared before any file of the run is changed.
        snapshot.check_fit(experiment.trainer.components, resume.payload, resume.checkpoint)
    if not config.dry_run:
        return BuiltRun(request, experiment, resume)
    if group.is_main:
        for note in resume.notes:
            logger.info("it would go on: %s", note)
        make_plan(request, experiment, resume.run_dir or new_folder(request.config))
    return None


def _refuse_unusable_directory(run_dir: str | None, resume: Resume) -> None:
    """Raise RunDirectoryError for what would end the run before it begins."""
    if resume.run_dir is not None:
        refuse_held(resume.run_dir)
    elif run_dir is not None:
        refuse_held(Path(run_dir))
        refuse_existing(Path(run_dir))


def _build_experiment(
    request: RunRequest, config: Config, resume: Resume, strategy: Strategy
) -> Experiment:
    callbacks = dict[str, Callback]()  # in addition to those of the configuration
    if not config.dry_run:
        callbacks["metrics_log"] = MetricsLog()
        trial = config.sweep.trial if config.sweep else None
        if trial:
            callbacks["trial"] = Trial(trial.storage, trial.study, trial.number)
    payload = resume.payload
    saved_data = {} if payload is None else payload["state"].get("data", {})
    # Initial weights are not loaded if those of a checkpoint replace all of them.
    replaced = payload is not None and borrowed.KEY not in payload
    with (
        no_initial_weights() if replaced else nullcontext(),
        borrowed.explaining_missing(payload, config.model, "resume: "),
    ):
        config = with_statistics(config, payload)
        try:
            return build(
                config, strategy, callbacks, request.config_text(), saved_data.get("classes")
            )
        except ClassNamesError as error:
            raise CheckpointError(f"resume: {error}, or begin a new run") from error


def _train(run: BuiltRun, note: Path | None) -> None:
    """Go on from the checkpoint, train, test and report; raise Interrupted after a signal."""
    request = run.request
    experiment = run.experiment
    trainer = experiment.trainer
    directory = run.directory
    if directory is not None:
        trainer.group.remember_run(str(directory.path))
        if note is not None:
            note.write_text(str(directory.path))
        logger.info("run directory: %s", directory.path)
    run.resume.apply(trainer)
    # A collective. Only now that all checks have passed on every process do files change.
    trainer.group.run_on_main(run.resume.rewind_run)
    if directory is not None:
        # Also of a resumed run, whose configuration may have changed.
        directory.configure(request.config_text(), request.overrides)
        metadata = inference_metadata(experiment.config, experiment.data, trainer.task)
        metadata.write(directory.path)

    test_metrics = {}
    with suppress(EvaluationAbandoned):
        trainer.fit()
        seconds_by_kind = dict(trainer.timer.spent)
        has_ended = not trainer.state.stop_code and not trainer.state.pruned
        if has_ended and keeps_weights(trainer.callbacks):
            test_metrics = _test(experiment)
    skipped = getattr(trainer.train_loader, "skipped", [])
    if directory is not None and skipped:
        samples = [{"sample": s.index, "file": s.path, "reason": s.reason} for s in skipped]
        directory.update_manifest({"skipped_samples": samples})
    if trainer.state.stop_code:
        raise _interruption(request, trainer)

    results = outcome(trainer.components, test_metrics)
    run.record_end(results)
    trainer.end(results)
    if directory is not None:
        columns = terminal_width(sys.stdout)
        print(
            final_block(
                request, experiment, directory.path, results.metrics, seconds_by_kind, columns
            )
        )


def _interruption(request: RunRequest, trainer: Trainer) -> Interrupted:
    """Return the exception that tells what a signal left behind, and how to resume."""
    assert trainer.run_dir is not None
    state = trainer.state
    last = trainer.run_dir / CHECKPOINTS / "last.pt"
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


def _test(experiment: Experiment) -> dict[str, float]:
    """Test the best checkpoint, or the last if no metric was monitored."""
    trainer = experiment.trainer
    if not experiment.test_loaders or trainer.run_dir is None:
        return {}
    path = best_or_last(trainer.run_dir / CHECKPOINTS) if trainer.is_main else None
    # A collective: the main process reads the file, and all test the same weights.
    payload = trainer.group.broadcast(path and read_checkpoint(path))
    if payload is None:
        log_point = trainer.log_point
    else:
        snapshot.load_weights(trainer.components, payload)
        log_point = snapshot.log_point_of(payload)
    metrics = dict[str, float]()
    for stage, loader in experiment.test_loaders.items():
        metrics |= trainer.evaluate(loader, stage, step=log_point.step)
        loader.close()
    if metrics:
        trainer.log(metrics, log_point)
    return metrics
