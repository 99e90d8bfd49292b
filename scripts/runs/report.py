"""The final report of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.runs.account import Account
from trainer.callback import saver_of
from trainer.files.layout import WIDTH, folded_command, packed, path_lines
from trainer.metric_names import epoch_metric
from trainer.runs.dashboard import FOLDER, command
from trainer.state import MAX_TIME, TrainState

if TYPE_CHECKING:
    from scripts.cli.request import Request
    from trainer.build.experiment import Experiment

_Row = tuple[str, list[str]]
_GAP = "  "
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
    columns: int | None = None,
) -> str:
    """Return the final report of a run: its directory, its results and the next commands.

    `columns`: of the terminal, whose lines are broken between words; None for a file, where facts
    have at most 100 characters a line, and paths and commands are whole.
    """
    state, best = experiment.trainer.state, best_of(experiment)
    width = (columns or WIDTH) - len("trained  ")
    trained = [_trained(state, account), *_ended(experiment)]
    rows: list[_Row] = [
        ("run", path_lines(str(run_dir), width) if columns else [str(run_dir)]),
        ("trained", packed("; ".join(trained).split(" "), width, " ")),
        ("time", packed(account.text().split(", "), width, ", ")),
        ("hint", packed(account.hint(request.config).split(" "), width, " ")),
    ]
    if state.skipped_updates:
        rows.append(("skipped", [f"{state.skipped_updates} updates that were not finite"]))
    rows.append(("train", packed(_values(results, "train"), width, _GAP)))
    if validated := _values(results, "val"):
        rows.append(("val", packed([*validated, f"(step {state.validated_at})"], width, _GAP)))
    if best:
        rows.append(("best", [f"{best[0]} {best[1]:.4f} at step {best[2]}"]))
    average = experiment.trainer.average
    if average is not None and average.begun:
        rows.append(("weights", [f"val and test use the average of callbacks.{average.name}"]))
    rows.append(("test", packed(_tested(experiment, results), width, _GAP)))
    for name, typed in _commands(request, experiment, run_dir):
        rows.append((name, [folded_command(typed, columns and width)]))
    # Off a terminal each line can be found by its name; on one, the name stands once.
    again = [(n if columns is None or not i else "", line) for n, i, line in _numbered(rows)]
    return "\n" + "\n".join(f"{name:<8} {line}" for name, line in again)


def _numbered(rows: list[_Row]) -> list[tuple[str, int, str]]:
    return [(name, i, line) for name, lines in rows for i, line in enumerate(lines) if line]


def result_line(experiment: Experiment, results: Mapping[str, float], account: Account) -> str:
    """Return what a job of a sweep prints in the end."""
    state, best = experiment.trainer.state, best_of(experiment)
    facts = [f"best {best[0]} {best[1]:.4f} at step {best[2]}"] if best else []
    facts += [f"test/{value}" for value in _values(results, "test")]
    facts += [_trained(state, account), *_ended(experiment)]
    return "\n".join(packed(facts, WIDTH, ", "))


def _held_out(experiment: Experiment) -> list[str] | None:
    """Return the overrides that select a split to evaluate; None if there is no such split."""
    sets = experiment.data.sets
    words: dict[str, list[str]] = {"test": [], "val": ["split=val"]}
    return next((words[split] for split in words if sets.get(split) is not None), None)


def _trained(state: TrainState, account: Account) -> str:
    epochs = f"{state.epoch} epoch{'s' * (state.epoch != 1)}"
    return f"{epochs}, {state.global_step} updates, {account.seconds:.1f} s"


def _ended(experiment: Experiment) -> list[str]:
    """Return why the run ended before its horizon, if it did."""
    state = experiment.trainer.state
    if state.pruned:
        return ["pruned: its search ended it early"]
    if state.stop_reason == MAX_TIME:
        limit = experiment.config.trainer.max_time
        return [f"ended by its time limit (trainer.max_time={limit})"]
    return [f"ended early: {state.stop_reason}"] if state.stop_reason else []


def _tested(experiment: Experiment, results: Mapping[str, float]) -> list[str]:
    if tested := _values(results, "test"):
        return [*tested, f"(checkpoint {'best' if best_of(experiment) else 'last'})"]
    pruned = experiment.trainer.state.pruned
    return ["not tested: the run was pruned" if pruned else "no test split: see val"]


def _commands(request: Request, experiment: Experiment, run_dir: Path) -> list[tuple[str, str]]:
    """Return what can be typed next, each by what it is for."""
    found = []
    if (run_dir / FOLDER).is_dir():
        found.append(("look", command(run_dir)))
    if (split := _held_out(experiment)) is not None:
        found.append(("again", shlex.join(["evaluate", f"run={run_dir}", *split])))
    if experiment.trainer.state.interrupted and not experiment.trainer.done:
        found.append(("go on", request.resume_command(run_dir)))
    return found


def _values(results: Mapping[str, float], stage: str) -> list[str]:
    prefix = f"{stage}/"
    found = {k.removeprefix(prefix): v for k, v in results.items() if k.startswith(prefix)}
    return [f"{name} {value:.4f}" for name, value in found.items()]
