"""One process of a run: build, create or resume the run directory, train, test, report."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from callbacks.metrics_log import MetricsLog
from callbacks.trial import Trial
from conf.check import parse
from conf.errors import ConfigError, Problem
from conf.schema import Config
from models.weights import no_initial_weights
from scripts.cli.console import heard_early
from scripts.cli.first_line import asked_device, known_device
from scripts.cli.job import is_job
from scripts.cli.request import Request
from scripts.plan.gather import make_plan
from scripts.runs.account import Account
from scripts.runs.changes import changed_leaves
from scripts.runs.log import Backlog, backlog
from scripts.runs.record import (
    RUNS,
    held_directory,
    interrupted,
    new_folder,
    outcome,
    record_config,
    record_end,
    record_skipped,
)
from scripts.runs.report import final_block, result_line
from scripts.runs.resume import Resume, find_resume
from scripts.runs.signals import stop_signals
from trainer import snapshot
from trainer.build.check import check_targets
from trainer.build.experiment import Experiment, build
from trainer.build.statistics import with_statistics
from trainer.build.strategy import build_strategy
from trainer.callback import Callback
from trainer.checkpoints.reader import compare_names
from trainer.checkpoints.store import CheckpointStore
from trainer.distributed.attempts import attempt
from trainer.evaluation import EvaluationAbandoned
from trainer.files.layout import columns_of
from trainer.inference.checkpoint import best_or_last
from trainer.rng import tf32_remark
from trainer.runs.status import check_run_dir
from trainer.strategies.strategy import Strategy, describe_device
from trainer.targets.allow_list import allow
from trainer.update.precision import emulation_remark

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
    _tell_device(request, strategy)
    try:
        with strategy.group.failing_together():
            _compare(strategy.group.gather(request.config))
            return _train(_restarted(request, strategy), strategy, note)
    finally:
        strategy.group.leave()


def _tell_device(request: Request, strategy: Strategy) -> None:
    """Log what computes, where the first line of the command could not say it."""
    device = strategy.device
    if known_device(asked_device(request.overrides)) != device.type or device.type == "cuda":
        name = describe_device(device)
        number = f", the first of {strategy.devices}" if strategy.devices > 1 else ""
        logger.info("device: %s%s", f"{device} ({name})" if name != str(device) else name, number)


def _compare(configs: Sequence[dict[str, Any]]) -> None:
    """Raise ConfigError if torchrun started the processes with different configurations."""
    problems = [
        Problem("", f"config differs on rank {rank}: {', '.join(keys)}")
        for rank, config in enumerate(configs)
        if (keys := changed_leaves(configs[0], config))
    ]
    if problems:
        raise ConfigError(problems)


def _restarted(request: Request, strategy: Strategy) -> Request:
    """Continue in the same directory after a launcher has restarted the processes."""
    place = strategy.group.recall("run_dir")
    count = attempt()
    if count != "0" and strategy.group.is_main:
        logger.warning("restart %s of %s", count, os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?"))
    if place is None:
        return request
    return replace(request, config={**request.config, "run_dir": place, "resume": "auto"})


def _train(request: Request, strategy: Strategy, note: Path | None) -> int:
    prepared = _prepared(request, strategy)
    if prepared is None:
        return 0
    request, experiment, resume, earlier = prepared
    trainer = experiment.trainer
    tested: dict[str, float] = {}
    with (
        # Outermost, around everything that writes: a closed terminal sends SIGHUP twice.
        stop_signals(trainer, heard_early()),
        held_directory(request, experiment, resume, earlier) as directory,
        strategy.group.failing_together(),
    ):
        if directory is not None:
            strategy.group.remember("run_dir", str(directory.path))
            if note is not None:
                note.write_text(str(directory.path))
            logger.info("run directory: %s", directory.path)
        if resume is not None:
            if resume.payload is not None:
                resume.apply(trainer)
            trainer.group.on_main(resume.leave_behind)  # after all checks have passed
            if directory is not None and resume.run_dir is not None:
                record_config(request, experiment, directory)
        with suppress(EvaluationAbandoned):
            trainer.fit()
            account = Account(dict(trainer.timer.spent))
            if not trainer.state.stop_code and not trainer.state.pruned:
                tested = _test(experiment)
        if directory is not None:
            record_skipped(directory, trainer)
        if trainer.state.stop_code:
            raise interrupted(request, trainer)
        results = outcome(experiment, tested)
        if directory is not None:
            record_end(request, experiment, directory, results)
        trainer.end(results)
        if directory is not None:
            print(_report(request, experiment, directory.path, results.metrics, account))
    return 0


def _report(
    request: Request,
    experiment: Experiment,
    run_dir: Path,
    results: Mapping[str, float],
    account: Account,
) -> str:
    if is_job():
        return result_line(experiment, results, account)
    columns = columns_of(sys.stdout)
    return final_block(request, experiment, run_dir, results, account, columns)


class _Prepared(NamedTuple):
    request: Request  # with the configuration of the resumed run
    experiment: Experiment
    resume: Resume | None
    earlier: Backlog  # log records from before the run had a file for them


def _prepared(request: Request, strategy: Strategy) -> _Prepared | None:
    """Build the experiment; None after a dry run, or if nothing is left to train."""
    config = parse(request.config)
    if config.run_dir is not None:
        check_run_dir(Path(config.run_dir))
    if config.dry_run:
        _dry_run(request, config, strategy)
        return None
    resume = strategy.group.broadcast(
        find_resume(config, RUNS, request.config) if strategy.group.is_main else None
    )
    if resume is not None and resume.finished:
        logger.info("%s", resume.finished)
        return None
    if resume is not None:  # checkpoints then save this configuration
        request = replace(request, config=resume.config)
        config = parse(resume.config)
    payload = None if resume is None else resume.payload
    with backlog() as earlier, nullcontext() if payload is None else no_initial_weights():
        _remark_on_format(config, strategy)
        built = with_statistics(config, payload)
        experiment = build(built, strategy, _own_callbacks(config), request.config_text())
    if resume is not None and payload is not None:  # before any file of the run is changed
        compare_names(payload, experiment.trainer.model.state_dict(), resume.checkpoint)
    return _Prepared(request, experiment, resume, earlier)


def _own_callbacks(config: Config) -> dict[str, Callback]:
    """Return what every run has beside the configuration's callbacks."""
    own: dict[str, Callback] = {"metrics_log": MetricsLog()}
    trial = None if config.sweep is None else config.sweep.trial
    return own | ({"trial": Trial(trial.storage, trial.study, trial.number)} if trial else {})


def _remark_on_format(config: Config, strategy: Strategy) -> None:
    options = config.trainer
    remarks = (
        tf32_remark(options.precision, options.tf32, strategy.device),
        emulation_remark(options.precision, strategy.device),
    )
    for remark in remarks:
        if remark is not None and strategy.group.is_main:
            logger.info("%s", remark)


def _dry_run(request: Request, config: Config, strategy: Strategy) -> None:
    experiment = build(config, strategy, {}, request.config_text())
    if strategy.group.is_main:
        make_plan(request, experiment, new_folder(config))


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
