"""One process of a run, told in order: build, hold the directory, resume, train, test, report."""

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
from regimen.conf.check import parse
from regimen.conf.errors import ConfigError, Problem, raise_problems
from regimen.data.errors import ClassNamesError
from regimen.models.pretrained import no_initial_weights
from regimen.scripts.cli.arguments import RUNS, Request
from regimen.scripts.cli.console import log_file
from regimen.scripts.cli.signals import stop_signals
from regimen.scripts.runs.plan import make_plan
from regimen.scripts.runs.report import final_block
from regimen.scripts.runs.resume import Resume, changes, find_resume, new_folder
from regimen.trainer import snapshot
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.assembly.data import with_statistics
from regimen.trainer.assembly.experiment import Experiment, build, fitting_steps
from regimen.trainer.assembly.parts import build_strategy
from regimen.trainer.callback import Callback, Results, keeps_weights
from regimen.trainer.checkpoints.reader import compare_names, read_checkpoint
from regimen.trainer.device import product_name
from regimen.trainer.distributed import attempt
from regimen.trainer.errors import CheckpointError, Interrupted, StorageError
from regimen.trainer.evaluation import EvaluationAbandoned
from regimen.trainer.files.atomic import LogFileHandler
from regimen.trainer.files.layout import columns_of
from regimen.trainer.inference.predictor import inference_metadata
from regimen.trainer.inference.run import best_or_last
from regimen.trainer.runs.directory import RunDirectory, refuse_existing, refuse_held
from regimen.trainer.runs.metrics_log import MetricsLog
from regimen.trainer.runs.results import best_record, failure, outcome
from regimen.trainer.runs.status import CHECKPOINTS, ENDED_WELL, LOG, check_run_dir
from regimen.trainer.strategies.strategy import Strategy

logger = logging.getLogger("regimen")
_SWITCHES = ("channels_last", "compile", "detect_anomaly")


@dataclass(slots=True)
class BuiltRun:
    """A run that is built; what it records, it records on the main process."""

    request: Request  # with the configuration of the resumed run
    experiment: Experiment
    resume: Resume
    directory: RunDirectory | None = None  # on the main process, while it is held

    def hold(self) -> RunDirectory:
        """Make or take the run's directory and lock it, on the main process."""
        experiment, config = self.experiment, self.experiment.config
        trainer, earlier = experiment.trainer, self.resume.run_dir
        folder = earlier or new_folder(self.request.config)
        facts = {
            "seed": config.seed,
            "tags": config.tags,
            "device": str(trainer.strategy.device),
            "strategy": trainer.strategy.name,
            "world_size": trainer.group.world_size,
            "switches": experiment.switches | {n: getattr(config.trainer, n) for n in _SWITCHES},
            "precision": trainer.precision.name,
            "data": experiment.data.describe(),
            "threads": torch.get_num_threads(),
        }
        command = self.request.resume_command(folder.absolute())  # should SIGKILL end the run
        if earlier is not None:
            self.directory = RunDirectory.resume(folder, facts=facts, command=command)
        else:
            text, overrides = self.request.config_text(), self.request.overrides
            self.directory = RunDirectory.create(
                folder, config_yaml=text, overrides=overrides, facts=facts, command=command
            )
        return self.directory

    def record_end(self, results: Results) -> None:
        """Record how the run ended. Raises StorageError."""
        if self.directory is None:
            return
        ended = results.state in ENDED_WELL
        self.directory.finish(
            results.state,
            code=results.code,
            reason=results.reason,
            resume=None if ended else self.request.resume_command(self.directory.path),
            results=None if results.code else results.metrics,
            best=best_record(self.experiment.trainer),
            seconds=self.experiment.trainer.timer.seconds,
        )


def run(request: Request, note: Path | None = None) -> int:
    """Train and return the exit code; failures are raised.

    The main process writes the path of the run directory to the file `note`, for the launcher.
    """
    config = parse(request.config)
    check_targets(config)
    strategy = build_strategy(config)
    if remark := strategy.explain():
        logger.info("%s", remark)
    strategy.setup()
    try:
        with strategy.group.propagate_errors(), kept_log() as log:
            device, count, threads = strategy.device, strategy.devices, torch.get_num_threads()
            number = f", the first of {count}" if count > 1 else ""
            shown = ", ".join(dict.fromkeys((str(device), product_name(device))))
            logger.info("device: %s%s, threads: %d", shown, number, threads)
            configs = strategy.group.gather(request.config)  # of processes that torchrun started
            raise_problems(
                Problem("", f"config differs on rank {rank}: {', '.join(keys)}")
                for rank, other in enumerate(configs)
                if (keys := changes(configs[0], other))
            )
            place, start = strategy.group.recall_run(), attempt()
            if start != "0" and strategy.group.is_main:
                most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
                logger.warning("restart %s of %s", start, most)
            if place is not None:  # before a launcher has started the processes again
                again = {**request.config, "run_dir": place, "resume": "auto"}
                request = replace(request, config=again)
            it = _prepared(request, strategy)
            if it is not None:
                # Signals outermost, around all that writes: a closed terminal sends SIGHUP twice.
                together = strategy.group.propagate_errors()
                with stop_signals(it.experiment.trainer), recorded(it, log), together:
                    _train(it, note)
    finally:
        strategy.group.leave()
    return 0


@contextmanager
def kept_log() -> Iterator[MemoryHandler]:
    """Keep log records until the handler gets a target, `train.log`, and pass them on from then."""
    handler = MemoryHandler(1)
    logging.getLogger().addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


@contextmanager
def recorded(run: BuiltRun, log: MemoryHandler) -> Iterator[None]:
    """Hold the run directory and its log, and record there an exception that ends the run."""
    trainer = run.experiment.trainer
    trainer.history = None  # metrics.jsonl holds it
    directory = run.hold() if trainer.is_main else None
    trainer.run_dir = trainer.group.broadcast(directory and directory.path)
    file = logging.NullHandler() if directory is None else LogFileHandler(directory.path / LOG)
    log.setTarget(file)
    log.flush()
    try:
        yield
    except BaseException as error:
        results = failure(trainer, error)
        began = trainer.state.updates or run.resume.run_dir is not None
        if directory is not None and results.code == ConfigError.exit_code and not began:
            directory.discard()  # a mistake that kept a run from starting leaves nothing behind
            ours = run.experiment.config.run_dir is None
            with suppress(OSError):  # other runs are in it
                for folder in (directory.path.parent, RUNS.absolute()) if ours else ():
                    folder.rmdir()
        elif directory is not None:
            log_file.error("error: %s", results.reason, exc_info=error)
            try:
                run.record_end(results)
            except StorageError:
                logger.warning("status.json could not be written")
        trainer.end(results)
        raise
    finally:
        if directory is not None:
            directory.release()
        log.setTarget(None)
        file.close()


def _prepared(request: Request, strategy: Strategy) -> BuiltRun | None:
    """Build the run; None after a dry run, or if nothing is left to train."""
    group, place = strategy.group, request.config["run_dir"]
    if place is not None:
        check_run_dir(Path(place))
    resume = group.broadcast(find_resume(request.config) if group.is_main else None)
    if request.config["dry_run"]:  # what would end the run before it begins
        if resume.run_dir is not None:
            refuse_held(resume.run_dir)
        elif place is not None:
            refuse_held(Path(place))
            refuse_existing(Path(place))
    if resume.finished:
        logger.info("%s", resume.finished)
        return None
    request = replace(request, config=resume.config)  # which checkpoints then save
    config, payload = parse(resume.config), resume.payload
    if config.trainer.gradient_accumulation_steps == "auto":  # a number, in the run's files too
        fitting = {"gradient_accumulation_steps": fitting_steps(config, strategy)}
        values = {**request.config, "trainer": request.config["trainer"] | fitting}
        request, config = replace(request, config=values), parse(values)
    own = dict[str, Callback]()  # beside those of the configuration
    if not config.dry_run:
        own["metrics_log"] = MetricsLog()
    if not config.dry_run and config.sweep and (trial := config.sweep.trial):
        own["trial"] = Trial(trial.storage, trial.study, trial.number)
    with nullcontext() if payload is None else no_initial_weights():
        built = with_statistics(config, payload)
        kept = {} if payload is None else payload["state"].get("data", {})
        try:
            experiment = build(built, strategy, own, request.config_text(), kept.get("classes"))
        except ClassNamesError as error:
            raise CheckpointError(f"resume: {error}, or begin a new run") from error
    if payload:  # before any file of the run is changed
        compare_names(payload, experiment.trainer.model.state_dict(), resume.checkpoint)
    if config.dry_run:
        if group.is_main:
            for text in resume.notes:
                logger.info("it would go on: %s", text)
            make_plan(request, experiment, resume.run_dir or new_folder(request.config))
        return None
    return BuiltRun(request, experiment, resume)


def _train(it: BuiltRun, note: Path | None) -> None:
    """Go on from the checkpoint, train, test and report; raise Interrupted after a signal."""
    request, experiment, trainer = it.request, it.experiment, it.experiment.trainer
    if it.directory is not None:
        trainer.group.remember_run(str(it.directory.path))
        if note is not None:
            note.write_text(str(it.directory.path))
        logger.info("run directory: %s", it.directory.path)
    it.resume.apply(trainer)
    trainer.group.run_on_main(it.resume.leave_behind)  # after all checks have passed
    if it.directory is not None:  # of a run that is gone on with, too: it may have changed
        it.directory.configure(request.config_text(), request.overrides)
        inference_metadata(experiment.config, experiment.data, trainer.task).write(
            it.directory.path
        )
    tested = {}
    with suppress(EvaluationAbandoned):
        trainer.fit()
        spent = dict(trainer.timer.spent)
        weighs = not trainer.state.stop_code and not trainer.state.pruned
        if weighs and keeps_weights(trainer.callbacks):
            tested = _test(experiment)
    skipped = getattr(trainer.train_loader, "skipped", [])
    if it.directory is not None and skipped:  # samples that could not be loaded
        listed = [{"sample": s.index, "file": s.path, "reason": s.reason} for s in skipped]
        it.directory.update_manifest({"skipped_samples": listed})
    if (state := trainer.state).stop_code:
        assert trainer.run_dir is not None
        last = trainer.run_dir / CHECKPOINTS / "last.pt"
        saved = f"saved {last} at step {state.global_step}"
        if not state.updates:
            saved = "before the first update: there was nothing to save"
        elif not last.exists():
            saved = f"step {state.global_step} was not saved: there is no callbacks.checkpoint"
        go_on = f"go on with: {request.resume_command(trainer.run_dir)}"
        raise Interrupted(f"stopped by {state.stop_reason}; {saved}; {go_on}", state.stop_code)
    results = outcome(trainer, tested)
    it.record_end(results)
    trainer.end(results)
    if it.directory is not None:
        place, columns = it.directory.path, columns_of(sys.stdout)
        print(final_block(request, experiment, place, results.metrics, spent, columns))


def _test(experiment: Experiment) -> dict[str, float]:
    """Test the best checkpoint, or the last if no metric was monitored."""
    trainer = experiment.trainer
    if not experiment.test_loaders or trainer.run_dir is None:
        return {}
    path = best_or_last(trainer.run_dir / "checkpoints") if trainer.is_main else None
    payload = trainer.group.broadcast(path and read_checkpoint(path))
    if payload is not None:
        snapshot.load_weights(trainer, payload)
    at = trainer.log_point if payload is None else snapshot.log_point_of(payload)
    metrics = dict[str, float]()
    for stage, loader in experiment.test_loaders.items():
        metrics |= trainer.evaluate(loader, stage, step=at.step)
        loader.close()
    trainer.log(metrics, at)
    return metrics
