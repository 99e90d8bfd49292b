"""One process of a run, told in order: build, hold the directory, resume, train, test, report."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from logging.handlers import MemoryHandler
from pathlib import Path

from callbacks.metrics_log import MetricsLog
from callbacks.trial import Trial
from conf.check import parse
from conf.errors import ConfigError, Problem
from conf.schema import Config
from models.pretrained import no_initial_weights
from scripts.cli.arguments import Request
from scripts.cli.console import asked_device, is_job, known_device
from scripts.cli.signals import stop_signals
from scripts.plan import make_plan
from scripts.runs.record import RUNS, BuiltRun, interrupted, new_folder, outcome, recorded
from scripts.runs.report import final_block, result_line
from scripts.runs.resume import changes, find_resume
from trainer import snapshot
from trainer.assembly.check import check_targets
from trainer.assembly.data import with_statistics
from trainer.assembly.experiment import Experiment, build
from trainer.assembly.parts import build_strategy
from trainer.callback import Callback
from trainer.checkpoints.reader import compare_names
from trainer.checkpoints.store import CheckpointStore
from trainer.distributed import attempt
from trainer.evaluation import EvaluationAbandoned
from trainer.files.layout import columns_of
from trainer.inference.run import best_or_last
from trainer.rng import tf32_remark
from trainer.runs.status import check_run_dir
from trainer.strategies.strategy import Strategy, describe_device
from trainer.targets.allow_list import allow

logger = logging.getLogger("regimen")


def run(request: Request, note: Path | None = None) -> int:
    """Train and return the exit code; failures are raised.

    The main process writes the path of the run directory to the file `note`, for the launcher.
    """
    allow(request.allowed)
    config = parse(request.config)
    check_targets(config)
    strategy = build_strategy(config)
    if (remark := strategy.explain()) is not None:
        logger.info("%s", remark)
    strategy.setup()
    try:
        with strategy.group.failing_together(), kept_log() as log:
            _tell_device(request, strategy)
            configs = strategy.group.gather(request.config)  # of processes that torchrun started
            problems = [
                Problem("", f"config differs on rank {rank}: {', '.join(keys)}")
                for rank, other in enumerate(configs)
                if (keys := changes(configs[0], other))
            ]
            if problems:
                raise ConfigError(problems)
            it = _prepared(_restarted(request, strategy), strategy)
            if it is not None:
                # Signals outermost, around all that writes: a closed terminal sends SIGHUP twice.
                together = strategy.group.failing_together()
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


def _tell_device(request: Request, strategy: Strategy) -> None:
    """Log what computes, where the first line of the command could not say it."""
    device = strategy.device
    if known_device(asked_device(request.overrides)) != device.type or device.type == "cuda":
        name = describe_device(device)
        number = f", the first of {strategy.devices}" if strategy.devices > 1 else ""
        logger.info("device: %s%s", f"{device} ({name})" if name != str(device) else name, number)


def _restarted(request: Request, strategy: Strategy) -> Request:
    """Continue in the same directory after a launcher has restarted the processes."""
    place = strategy.group.recall_run()
    count = attempt()
    if count != "0" and strategy.group.is_main:
        logger.warning("restart %s of %s", count, os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?"))
    if place is None:
        return request
    return replace(request, config={**request.config, "run_dir": place, "resume": "auto"})


def _prepared(request: Request, strategy: Strategy) -> BuiltRun | None:
    """Build the run; None after a dry run, or if nothing is left to train."""
    config, group = parse(request.config), strategy.group
    if config.run_dir is not None:
        check_run_dir(Path(config.run_dir))
    if config.dry_run:
        experiment = build(config, strategy, {}, request.config_text())
        if group.is_main:
            make_plan(request, experiment, new_folder(config))
        return None
    resume = group.broadcast(find_resume(config, RUNS, request.config) if group.is_main else None)
    payload = None
    if resume is not None:
        if resume.finished:
            logger.info("%s", resume.finished)
            return None
        request = replace(request, config=resume.config)  # which checkpoints then save
        config, payload = parse(resume.config), resume.payload
    remark = tf32_remark(config.trainer.precision, config.trainer.tf32, strategy.device)
    if remark is not None and group.is_main:
        logger.info("%s", remark)
    with nullcontext() if payload is None else no_initial_weights():
        built = with_statistics(config, payload)
        experiment = build(built, strategy, _own_callbacks(config), request.config_text())
    if payload is not None:  # before any file of the run is changed
        compare_names(payload, experiment.trainer.model.state_dict(), resume.checkpoint)
    return BuiltRun(request, experiment, resume)


def _own_callbacks(config: Config) -> dict[str, Callback]:
    """Return what every run has beside the configuration's callbacks."""
    own: dict[str, Callback] = {"metrics_log": MetricsLog()}
    trial = None if config.sweep is None else config.sweep.trial
    return own | ({"trial": Trial(trial.storage, trial.study, trial.number)} if trial else {})


def _train(it: BuiltRun, note: Path | None) -> None:
    """Go on from the checkpoint, train, test and report; raise Interrupted after a signal."""
    request, experiment, trainer = it.request, it.experiment, it.experiment.trainer
    if it.directory is not None:
        trainer.group.remember_run(str(it.directory.path))
        if note is not None:
            note.write_text(str(it.directory.path))
        logger.info("run directory: %s", it.directory.path)
    if it.resume is not None:
        if it.resume.payload is not None:
            it.resume.apply(trainer)
        trainer.group.on_main(it.resume.leave_behind)  # after all checks have passed
        it.record_config()
    tested: dict[str, float] = {}
    with suppress(EvaluationAbandoned):
        trainer.fit()
        spent = dict(trainer.timer.spent)
        if not trainer.state.stop_code and not trainer.state.pruned:
            tested = _test(experiment)
    it.record_skipped()
    if trainer.state.stop_code:
        raise interrupted(request, trainer)
    results = outcome(experiment, tested)
    it.record_end(results)
    trainer.end(results)
    if it.directory is not None:
        if is_job():
            print(result_line(experiment, results.metrics, spent))
        else:
            place, columns = it.directory.path, columns_of(sys.stdout)
            print(final_block(request, experiment, place, results.metrics, spent, columns))


def _test(experiment: Experiment) -> dict[str, float]:
    """Test the best checkpoint, or the last if no metric was monitored."""
    trainer = experiment.trainer
    if experiment.test_loader is None or trainer.run_dir is None:
        return {}
    store = CheckpointStore(trainer.run_dir / "checkpoints")
    path = best_or_last(store.folder) if trainer.is_main else None
    payload = trainer.group.broadcast(None if path is None else store.load(path))
    if payload is not None:
        snapshot.load_weights(trainer, payload)
    at = trainer.log_point if payload is None else snapshot.log_point_of(payload)
    metrics = trainer.evaluate(experiment.test_loader, "test", step=at.step)
    experiment.test_loader.close()
    trainer.log(metrics, at)
    return metrics
