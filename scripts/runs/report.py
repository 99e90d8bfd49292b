"""The final report of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.runs.account import Account
from trainer.callback import saver_of
from trainer.metric_names import epoch_metric
from trainer.runs.dashboard import FOLDER, command

if TYPE_CHECKING:
    from scripts.cli.request import Request
    from trainer.build.experiment import Experiment

_NOT_RESULTS = ("time/", "memory/", "lr/", "best/")


def results_of(experiment: Experiment, tested: dict[str, float]) -> dict[str, float]:
    """Return the last logged values, the best value of the monitored metric, and the test's.

    For training metrics this is the mean over the epoch: the value of the last log line would
    depend on the logging interval.
    """
    logged = experiment.trainer.metrics
    last = {
        k: v
        for k, v in logged.items()
        if not k.startswith(_NOT_RESULTS)
        and (epoch_metric(k) == k or epoch_metric(k) not in logged)
    }
    best = best_of(experiment)
    return last | ({f"best/{best[0]}": best[1]} if best else {}) | tested


def best_of(experiment: Experiment) -> tuple[str, float, int] | None:
    """Return (metric, value, step) of the best checkpoint, or None."""
    saver = saver_of(experiment.trainer.callbacks)
    return None if saver is None else saver.best_result()


def final_block(
    request: Request,
    experiment: Experiment,
    run_dir: Path,
    results: Mapping[str, float],
    account: Account,
) -> str:
    """Return the final report of a run: its directory, its results and the next commands."""
    state, best = experiment.trainer.state, best_of(experiment)
    ended = f", ended by {state.stop_reason}" if state.stop_reason else ""
    lines = [
        ("run", str(run_dir)),
        (
            "trained",
            f"{state.epoch} epochs, {state.global_step} updates, {account.seconds:.1f} s{ended}",
        ),
        ("time", account.text()),
        ("hint", account.hint(request.config)),
    ]
    if state.skipped_updates:
        lines.append(("skipped", f"{state.skipped_updates} updates that were not finite"))
    lines.append(("train", _values(results, "train")))
    if validated := _values(results, "val"):
        lines.append(("val", f"{validated}  (step {state.validated_at})"))
    if best:
        lines.append(("best", f"{best[0]} {best[1]:.4f} at step {best[2]}"))
    average = experiment.trainer.average
    if average is not None and average.begun:
        lines.append(("weights", f"val and test use the average of callbacks.{average.name}"))
    which = "best" if best else "last"
    untested = "not tested: the run was pruned" if state.pruned else "no test split: see val"
    tested = _values(results, "test")
    lines.append(("test", f"{tested}  (checkpoint {which})" if tested else untested))
    if (run_dir / FOLDER).is_dir():
        lines.append(("look", command(run_dir)))
    if (split := _held_out(experiment)) is not None:
        lines.append(("again", f"evaluate run={run_dir}{split}"))
    if state.interrupted and not experiment.trainer.done:
        lines.append(("go on", request.resume_command(run_dir)))
    return "\n" + "\n".join(f"{name:<8} {text}" for name, text in lines if text)


def _held_out(experiment: Experiment) -> str | None:
    """Return the override that selects a split to evaluate; None if there is no such split."""
    sets = experiment.data.sets
    words = {"test": "", "val": " split=val"}
    return next((words[split] for split in words if sets.get(split) is not None), None)


def _values(results: Mapping[str, float], stage: str) -> str:
    prefix = f"{stage}/"
    found = {k.removeprefix(prefix): v for k, v in results.items() if k.startswith(prefix)}
    return "  ".join(f"{name} {value:.4f}" for name, value in found.items())
