"""One run, in one process of it: build, make or resume its directory, train, test, report."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from callbacks.metrics_log import MetricsLog
from conf.check import parse
from conf.errors import ConfigError, Problem
from conf.schema import Config
from models.weights import no_initial_weights
from scripts.cli.console import describe, exit_code, heard_early, log_file
from scripts.cli.request import Request
from scripts.plan.gather import make_plan
from scripts.runs.log import Backlog, backlog, logged_to
from scripts.runs.report import final_block, results_of
from scripts.runs.resume import Resume, differences, find_resume
from scripts.runs.signals import stop_signals
from trainer import snapshot
from trainer.build.check import check_targets
from trainer.build.experiment import Experiment, build
from trainer.build.strategy import build_strategy
from trainer.checkpoints.reader import compare_names
from trainer.checkpoints.store import CheckpointStore
from trainer.distributed.attempts import attempt
from trainer.errors import EXIT_CODES, Interrupted, StorageError
from trainer.evaluation import EvaluationAbandoned
from trainer.inference.facts import facts_of
from trainer.rng import tf32_remark
from trainer.runs.directory import RunDirectory, name_folder, reserve, timestamp
from trainer.runs.status import check_run_dir
from trainer.strategies.strategy import Strategy
from trainer.targets.allow_list import allow

logger = logging.getLogger("regimen")
RUNS = Path("runs")


def run(request: Request, note: Path | None = None) -> int:
    """Train as asked and return the exit code; failures are raised.

    The main process writes the run's directory into the file `note`, for a launcher.
    """
    allow(request.allowed)
    config = parse(request.config)
    check_targets(config)
    strategy = build_strategy(config)
    if (remark := strategy.explain()) is not None:
        logger.info("%s", remark)
    strategy.setup()
    try:
        with strategy.group.failing_together():
            _compare(strategy.group.gather(request.config))
            return _train(_restarted(request, strategy), strategy, note)
    finally:
        strategy.group.leave()


def _compare(configs: Sequence[dict[str, Any]]) -> None:
    """Refuse processes that torchrun started with different configurations."""
    problems = [
        Problem("", f"config differs on rank {rank}: {', '.join(keys)}")
        for rank, config in enumerate(configs)
        if (keys := differences(configs[0], config))
    ]
    if problems:
        raise ConfigError(problems)


def _restarted(request: Request, strategy: Strategy) -> Request:
    """Go on in the same directory once a launcher has started the processes again."""
    place = strategy.group.recall("run_dir")
    count = attempt()
    if count != "0" and strategy.group.is_main:
        logger.warning("restart %s of %s", count, os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?"))
    if place is None:
        return request
    return replace(request, config={**request.config, "run_dir": place, "resume": "auto"})


def _train(request: Request, strategy: Strategy, note: Path | None) -> int:
    config = parse(request.config)
    if config.run_dir is not None:
        check_run_dir(Path(config.run_dir))
    if config.dry_run:
        return _dry_run(request, config, strategy)
    resume = strategy.group.broadcast(
        find_resume(config, RUNS, request.config) if strategy.group.is_main else None
    )
    if resume is not None and resume.finished:
        logger.info("%s", resume.finished)
        return 0
    if resume is not None:  # what holds from here on is what checkpoints keep
        request = replace(request, config=resume.config)
        config = parse(resume.config)
    goes_on = resume is not None and resume.payload is not None
    with backlog() as earlier, no_initial_weights() if goes_on else nullcontext():
        _remark_on_format(config, strategy)
        experiment = build(config, strategy, {"metrics_log": MetricsLog()}, request.config_text())
    if resume is not None and resume.payload is not None:  # before anything of the run is touched
        trainer = experiment.trainer
        compare_names(resume.payload, trainer.model.state_dict(), resume.checkpoint)
    with (
        # Around all that is written: a closed terminal sends its signal twice.
        stop_signals(experiment.trainer, heard_early()),
        _directory(request, config, experiment, resume, earlier) as directory,
        strategy.group.failing_together(),
    ):
        if directory is not None:
            strategy.group.remember("run_dir", str(directory.path))
            if note is not None:
                note.write_text(str(directory.path))
        return _fit(request, experiment, directory, resume)


def _remark_on_format(config: Config, strategy: Strategy) -> None:
    options = config.trainer
    remark = tf32_remark(options.precision, options.tf32, strategy.device)
    if remark is not None and strategy.group.is_main:
        logger.info("%s", remark)


def _dry_run(request: Request, config: Config, strategy: Strategy) -> int:
    experiment = build(config, strategy, {}, request.config_text())
    if strategy.group.is_main:
        folder = _new_folder(config)
        make_plan(request, experiment, folder)
    return 0


def _new_folder(config: Config) -> Path:
    """Reserve where a run goes: `run_dir`, or a new folder of its name and the time."""
    if config.run_dir is None:
        return reserve(name_folder(RUNS, config.name), timestamp())
    return Path(config.run_dir)


@contextmanager
def _directory(
    request: Request,
    config: Config,
    experiment: Experiment,
    resume: Resume | None,
    earlier: Backlog,
) -> Iterator[RunDirectory | None]:
    """Hold the run's directory in the main process, and record there how the run ends."""
    trainer = experiment.trainer
    directory = None
    if trainer.is_main:
        facts = _facts(config, experiment)
        if resume is not None and resume.run_dir is not None:
            directory = RunDirectory.resume(resume.run_dir, facts=facts)
        else:
            directory = RunDirectory.create(
                _new_folder(config),
                config_yaml=request.config_text(),
                overrides=request.overrides,
                facts=facts,
            )
        if not directory.inference_path.exists():
            facts_of(config, experiment.data, trainer.task).write(directory.path)
        directory.running(resume=request.resume_command(directory.path))  # also after a kill -9
    trainer.run_dir = trainer.group.broadcast(directory and directory.path)
    with logged_to(directory.log_path if directory else None, earlier):
        try:
            yield directory
        except BaseException as error:
            if directory is not None:
                began = trainer.state.updates or (resume is not None and resume.run_dir is not None)
                if exit_code(error) == ConfigError.exit_code and not began:
                    _discard(directory, config)
                else:
                    _record_failure(request, directory, error)
            raise
        finally:
            if directory is not None:
                directory.release()


def _discard(directory: RunDirectory, config: Config) -> None:
    """Leave nothing of a run that a mistake kept from starting."""
    directory.discard()
    if config.run_dir is None:
        for folder in (directory.path.parent, RUNS.absolute()):
            with suppress(OSError):  # other runs are in it
                folder.rmdir()


def _record_failure(request: Request, directory: RunDirectory, error: BaseException) -> None:
    code = exit_code(error)
    log_file.error("error: %s", describe(error), exc_info=error)
    try:
        directory.finish(
            "preempted" if code in EXIT_CODES.values() else "failed",
            code=code,
            reason=describe(error),
            resume=request.resume_command(directory.path),
        )
    except StorageError:
        logger.warning("status.json could not be written")


def _fit(
    request: Request, experiment: Experiment, directory: RunDirectory | None, resume: Resume | None
) -> int:
    trainer = experiment.trainer
    if directory is not None:
        logger.info("run directory: %s", directory.path)
    if resume is not None:
        if resume.payload is not None:
            resume.apply(trainer)
        trainer.group.on_main(resume.leave_behind)  # not before nothing refuses to go on
    started = time.monotonic()
    tested = {}
    with suppress(EvaluationAbandoned):
        trainer.fit()
        seconds = time.monotonic() - started
        if not trainer.state.stop_code:
            tested = _test(experiment)
    skipped = getattr(trainer.train_loader, "skipped", [])
    if directory is not None and skipped:
        listed = [{"sample": s.index, "file": s.path, "reason": s.reason} for s in skipped]
        directory.update_manifest({"skipped_samples": listed})
    if trainer.state.stop_code:
        raise _interrupted(request, experiment)
    if directory is not None:
        results = results_of(experiment, tested)
        _record_end(request, experiment, directory, results)
        print(final_block(request, experiment, directory.path, results, seconds))
    return 0


def _record_end(
    request: Request, experiment: Experiment, directory: RunDirectory, results: dict[str, float]
) -> None:
    """Record a good end; a run that its time ended before its horizon is not finished."""
    trainer = experiment.trainer
    if trainer.done or not trainer.state.interrupted:
        directory.finish("finished", results=results)
        return
    state = trainer.state
    where = f"epoch {state.epoch}, step {state.global_step}"
    command = request.resume_command(directory.path)
    reason = f"trainer.{state.stop_reason} ended it at {where}"
    directory.finish("stopped", reason=reason, resume=command, results=results)


def _interrupted(request: Request, experiment: Experiment) -> Interrupted:
    trainer = experiment.trainer
    state = trainer.state
    assert trainer.run_dir is not None
    last = trainer.run_dir / "checkpoints" / "last.pt"
    if not state.updates:
        saved = "before the first update: there was nothing to save"
    elif not last.exists():
        saved = f"nothing was saved of step {state.global_step}: there is no callbacks.checkpoint"
    else:
        saved = f"saved {last} at step {state.global_step}"
    command = request.resume_command(trainer.run_dir)
    return Interrupted(
        f"stopped by {state.stop_reason}; {saved}; go on with: {command}", state.stop_code
    )


def _test(experiment: Experiment) -> dict[str, float]:
    """Test the best checkpoint, or the last where nothing was monitored."""
    trainer = experiment.trainer
    if experiment.test_loader is None or trainer.run_dir is None:
        return {}
    store = CheckpointStore(trainer.run_dir / "checkpoints")
    path = best_or_last(store.folder) if trainer.is_main else None
    payload = trainer.group.broadcast(None if path is None else store.load(path))
    if payload is not None:
        snapshot.load_weights(trainer, payload)
    step = None if payload is None else snapshot.step_of(payload)
    metrics = trainer.evaluate(experiment.test_loader, "test", step=step)
    experiment.test_loader.close()
    trainer.log(metrics)
    return metrics


def best_or_last(folder: Path) -> Path | None:
    """Return the checkpoint to judge a run by."""
    return next((p for n in ("best", "last") if (p := folder / f"{n}.pt").exists()), None)


def _facts(config: Config, experiment: Experiment) -> dict[str, Any]:
    trainer = experiment.trainer
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
