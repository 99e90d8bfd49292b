"""The closing words of a run: its place, how it spent its time, its results, what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.callback import saver_of
from trainer.files.layout import WIDTH, folded_command, packed
from trainer.runs.status import TENSORBOARD, command
from trainer.state import MAX_TIME, Kind, epoch_metric

if TYPE_CHECKING:
    from scripts.cli.arguments import Request
    from trainer.assembly.experiment import Experiment

_GAP = "  "
_NOT_RESULTS = ("time/", "memory/", "lr/", "best/")
_WORTH_A_HINT = 0.2  # of the run's time
_LONG = 10.0  # seconds: what a shorter run spends says little of a longer one
_SHOWN = 0.005
_IN_WORDS: Mapping[str, str] = {
    "data": "waiting for data",
    "callbacks": "callbacks and logging",
    "start and end": "starting and ending",
}


def time_text(spent: Mapping[Kind, float]) -> str:
    """Return the fraction of a run's seconds that went to each kind of work, the largest first.

    By the host's clock: the time of a GPU is counted where the host waits for it, which is mostly
    at the log lines.
    """
    kinds = sorted(spent, key=lambda kind: -spent[kind])
    return ", ".join(_share(spent, k) for k in kinds if spent[k] > _SHOWN * sum(spent.values()))


def time_hint(spent: Mapping[Kind, float], config: Mapping[str, Any]) -> str:
    """Return the setting that reduces the largest avoidable part; empty if it is small."""
    options, loader = config["trainer"], config["loader"]
    saver = (config["callbacks"] or {}).get("checkpoint") or {}
    rarer: dict[Kind, tuple[str, int | None]] = {
        "evaluation": ("trainer.validate_every_n_epochs", options["validate_every_n_epochs"]),
        "checkpoints": ("callbacks.checkpoint.every_n_epochs", saver.get("every_n_epochs")),
        "callbacks": ("trainer.log_every_n_steps", options["log_every_n_steps"]),
    }
    avoidable = {kind: f"{key}={2 * value}" for kind, (key, value) in rarer.items() if value}
    if loader["num_workers"] == 0:
        avoidable["data"] = "loader.num_workers=auto"
    kind: Kind = max((*rarer, "data"), key=lambda kind: spent.get(kind, 0.0))
    seconds = sum(spent.values())
    if kind not in avoidable or seconds < _LONG or spent.get(kind, 0.0) < _WORTH_A_HINT * seconds:
        return ""
    return f"{_share(spent, kind)}: {avoidable[kind]}"


def _share(spent: Mapping[Kind, float], kind: Kind) -> str:
    return f"{spent[kind] / sum(spent.values()):.0%} {_IN_WORDS.get(kind, kind)}"


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
    spent: Mapping[Kind, float],
    columns: int | None = None,
) -> str:
    """Return the final report of a run: its directory, its results and the next commands.

    `columns`: of the terminal, whose lines are broken between words; None for a file, where facts
    have at most 100 characters a line, and paths and commands are whole.
    """
    trainer, best = experiment.trainer, best_of(experiment)
    state, average, number = trainer.state, trainer.average, trainer.state.skipped_updates
    averaged = []
    if average is not None and average.begun:
        averaged = [f"val and test use the average of callbacks.{average.name}"]
    data = [
        f"{split} {type(it).__name__}{f' {len(it):,}' if hasattr(it, '__len__') else ''}"
        for split, it in experiment.data.sets.items()
        if it is not None
    ]
    validated, tested = _values(results, "val"), _values(results, "test")
    if tested:
        tested.append(f"(checkpoint {'best' if best else 'last'})")
    else:
        tested = ["not tested: the run was pruned" if state.pruned else "no test split: see val"]
    facts: list[tuple[str, list[str], str]] = [
        ("data", data, ", "),
        ("trained", "; ".join(_trained(experiment, spent)).split(" "), " "),
        ("time", time_text(spent).split(", "), ", "),
        ("hint", time_hint(spent, request.config).split(" "), " "),
        ("skipped", [f"{number} updates that were not finite"] if number else [], _GAP),
        ("train", _values(results, "train"), _GAP),
        ("val", validated and [*validated, f"(step {state.validated_at})"], _GAP),
        ("best", _best(best), _GAP),
        ("weights", averaged, _GAP),
        ("test", tested, _GAP),
    ]
    width = (columns or WIDTH) - len("trained  ")
    rows = [("run", [str(run_dir)])]
    rows += [(name, packed(items, width, gap)) for name, items, gap in facts]
    for name, typed in _commands(request, experiment, run_dir):
        rows.append((name, [folded_command(typed, columns and width)]))
    # Off a terminal each line can be found by its name; on one, the name stands once.
    numbered = [(name, *pair) for name, lines in rows for pair in enumerate(filter(None, lines))]
    again = [(name if columns is None or not i else "", line) for name, i, line in numbered]
    return "\n" + "\n".join(f"{name:<8} {line}" for name, line in again)


def result_line(
    experiment: Experiment, results: Mapping[str, float], spent: Mapping[Kind, float]
) -> str:
    """Return what a job of a sweep prints in the end."""
    tested = [f"test/{value}" for value in _values(results, "test")]
    best = [f"best {text}" for text in _best(best_of(experiment))]
    facts = [*best, *tested, *_trained(experiment, spent)]
    return "\n".join(packed(facts, WIDTH, ", "))


def _trained(experiment: Experiment, spent: Mapping[Kind, float]) -> list[str]:
    """Return how far a run came, and why it ended before its horizon, if it did."""
    state = experiment.trainer.state
    epochs = f"{state.epoch} epoch{'s' * (state.epoch != 1)}"
    told = [f"{epochs}, {state.global_step} updates, {sum(spent.values()):.1f} s"]
    if state.pruned:
        told.append("pruned: its search ended it early")
    elif state.stop_reason == MAX_TIME:
        limit = experiment.config.trainer.max_time
        told.append(f"ended by its time limit (trainer.max_time={limit})")
    elif state.stop_reason:
        told.append(f"ended early: {state.stop_reason}")
    return told


def _best(best: tuple[str, float, int] | None) -> list[str]:
    return [f"{best[0]} {best[1]:.4f} at step {best[2]}"] if best else []


def _commands(request: Request, experiment: Experiment, run_dir: Path) -> list[tuple[str, str]]:
    """Return what can be typed next, each by what it is for."""
    found, sets = [], experiment.data.sets
    if (run_dir / TENSORBOARD).is_dir():
        found.append(("look", command(run_dir)))
    splits = [split for split in ("test", "val") if sets.get(split) is not None]
    if splits:
        chosen = [] if splits[0] == "test" else ["split=val"]
        found.append(("again", shlex.join(["evaluate", f"run={run_dir}", *chosen])))
    if experiment.trainer.state.interrupted and not experiment.trainer.done:
        found.append(("go on", request.resume_command(run_dir)))
    return found


def _values(results: Mapping[str, float], stage: str) -> list[str]:
    prefix = f"{stage}/"
    found = {k.removeprefix(prefix): v for k, v in results.items() if k.startswith(prefix)}
    return [f"{name} {value:.4f}" for name, value in found.items()]
