"""The closing words of a run: its place, how it spent its time, its results, what to type next."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from regimen.scripts.cli.arguments import Request
from regimen.trainer.assembly.experiment import Experiment
from regimen.trainer.callback import keeps_weights
from regimen.trainer.files.layout import WIDTH, packed
from regimen.trainer.inference.run import best_or_last
from regimen.trainer.runs import results as run_results
from regimen.trainer.runs.status import CHECKPOINTS, TENSORBOARD, command
from regimen.trainer.state import MAX_TIME, Kind

_SHOWN = 0.005  # of the run's time
_IN_WORDS = {
    "data": "waiting for data",
    "callbacks": "callbacks and logging",
    "start and end": "starting and ending",
}


def shares(spent: Mapping[Kind, float]) -> list[str]:
    """Return the fraction of a run's seconds that went to each kind of work, the largest first.

    By the host's clock: the time of a GPU is counted where the host waits for it, which is mostly
    at the log lines.
    """
    parts = {kind: seconds / (sum(spent.values()) or 1.0) for kind, seconds in spent.items()}
    largest = sorted(parts, key=parts.__getitem__, reverse=True)
    return [f"{parts[k]:.0%} {_IN_WORDS.get(k, k)}" for k in largest if parts[k] > _SHOWN]


def best_of(experiment: Experiment) -> tuple[str, float, int] | None:
    """Return (metric, value, step) of the best checkpoint; None if there is none, or of no use."""
    return run_results.best_of(experiment.trainer)


def final_block(
    request: Request,
    experiment: Experiment,
    run_dir: Path,
    results: Mapping[str, float],
    spent: Mapping[Kind, float],
    columns: int | None = None,
) -> str:
    """Return the final report of a run: its directory, its results and the next commands.

    `columns`: of the terminal; None for a file, where facts have up to 100 characters a line, and
    commands are whole.
    """
    trainer, best = experiment.trainer, best_of(experiment)
    state, average, sets = trainer.state, trainer.average, experiment.data.sets
    sizes = {split: f" {len(it):,}" for split, it in sets.items() if hasattr(it, "__len__")}
    kinds = {split: type(it).__name__ for split, it in sets.items() if it is not None}
    validated, tested = _values(results, "val"), _values(results, "test")
    if tested:
        tested.append(f"(checkpoint {'best' if best else 'last'})")
    elif state.pruned:
        tested = ["not tested: the run was pruned"]
    elif keeps_weights(trainer.callbacks):
        tested = ["no test split: see val"]
    else:
        tested = ["not tested: the run measured, and its weights are of no use"]
    facts = {
        "data": [f"{split} {kind}{sizes.get(split, '')}" for split, kind in kinds.items()],
        "trained": _trained(experiment, spent),
        "time": shares(spent),
        "train": _values(results, "train"),
        "val": validated and [*validated, f"(step {state.validated_at})"],
        "best": [f"{best[0]} {best[1]:.4f} at step {best[2]}"] if best else [],
        "test": tested,
    }
    if skipped := state.skipped_updates:
        facts["skipped"] = [f"{skipped} updates that were not finite"]
    if average and average.begun:
        facts["weights"] = [f"val and test use the average of callbacks.{average.name}"]
    width = (columns or WIDTH) - len("trained  ")
    rows = [("run", str(run_dir))]
    rows += [(name, line) for name, of in facts.items() for line in packed(of, width, ", ")]
    rows += _commands(request, experiment, run_dir)
    return "\n" + "\n".join(f"{name:<8} {line}" for name, line in rows)


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


def _commands(request: Request, experiment: Experiment, run_dir: Path) -> list[tuple[str, str]]:
    """Return what can be typed next, each by what it is for."""
    found, sets = [], experiment.data.sets
    if (run_dir / TENSORBOARD).is_dir():
        found.append(("look", command(run_dir)))
    of_use = keeps_weights(experiment.trainer.callbacks)
    splits = [split for split in sets if split != "train" and sets[split] is not None]
    if of_use and splits and best_or_last(run_dir / CHECKPOINTS) is not None:
        tested = splits[-1].partition("/")[0] == "test"  # the last of the data sets
        chosen = [] if tested else [f"split={splits[0]}"]
        found.append(("again", shlex.join(["evaluate", f"run={run_dir}", *chosen])))
    if experiment.trainer.state.interrupted and not experiment.trainer.done:
        found.append(("go on", request.resume_command(run_dir)))
    return found


def _values(results: Mapping[str, float], stage: str) -> list[str]:
    prefix = f"{stage}/"
    found = {k.removeprefix(prefix): v for k, v in results.items() if k.startswith(prefix)}
    return [f"{name} {value:.4f}" for name, value in found.items()]
