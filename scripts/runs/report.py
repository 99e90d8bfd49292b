"""The final block of a run: its directory, its time, its results and the next commands."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from regimen.scripts.cli.arguments import RunRequest
from regimen.trainer.assembly.experiment import Experiment
from regimen.trainer.callback import keeps_weights
from regimen.trainer.checkpoints.reader import best_or_last
from regimen.trainer.files.layout import WIDTH, wrap_items
from regimen.trainer.runs.results import best_of
from regimen.trainer.runs.status import CHECKPOINTS, TENSORBOARD, command
from regimen.trainer.state import MAX_TIME, Kind

_SMALLEST_FRACTION = 0.005  # of the run's time; less is not shown
_NAME_WIDTH = 8
_IN_WORDS = {
    "data": "waiting for data",
    "callbacks": "callbacks and logging",
    "start and end": "starting and ending",
}


def time_fractions(seconds: Mapping[Kind, float]) -> list[str]:
    """Return the fraction of a run's time that each kind of work took, the largest first.

    `seconds`: by the host's clock. The time of a GPU is counted where the host waits for it, which
    is mostly at the log lines.
    """
    total = sum(seconds.values()) or 1.0
    fractions = {kind: value / total for kind, value in seconds.items()}
    return [
        f"{fractions[kind]:.0%} {_IN_WORDS.get(kind, kind)}"
        for kind in sorted(fractions, key=fractions.__getitem__, reverse=True)
        if fractions[kind] > _SMALLEST_FRACTION
    ]


def final_block(
    request: RunRequest,
    experiment: Experiment,
    run_dir: Path,
    results: Mapping[str, float],
    seconds: Mapping[Kind, float],
    columns: int | None = None,
) -> str:
    """Return the final report of a run: its directory, its results and the next commands.

    `seconds`: how long each kind of work took. `columns`: width of the terminal; None for a file,
    where facts have up to 100 characters a line, and commands are whole.
    """
    trainer = experiment.trainer
    state = trainer.state
    best = best_of(trainer.callbacks)
    validation = _values(results, "val")
    if validation:
        validation.append(f"(step {state.validated_at})")
    facts = {
        "data": _data_sets(experiment),
        "trained": _progress(experiment, seconds),
        "time": time_fractions(seconds),
        "train": _values(results, "train"),
        "val": validation,
        "best": [f"{best[0]} {best[1]:.4f} at step {best[2]}"] if best else [],
        "test": _test_results(experiment, results, is_best=best is not None),
    }
    if state.skipped_updates:
        facts["skipped"] = [f"{state.skipped_updates} updates that were not finite"]
    average = trainer.average
    if average and average.begun:
        facts["weights"] = [f"val and test use the average of callbacks.{average.name}"]

    width = (columns or WIDTH) - _NAME_WIDTH - 1
    lines = ["", _row("run", str(run_dir))]
    for name, texts in facts.items():
        lines += [_row(name, text) for text in wrap_items(texts, width, ", ")]
    return "\n".join(lines + _commands(request, experiment, run_dir))


def _row(name: str, text: str) -> str:
    return f"{name:<{_NAME_WIDTH}} {text}"


def _data_sets(experiment: Experiment) -> list[str]:
    texts = []
    for split, dataset in experiment.data.sets.items():
        if dataset is None:
            continue
        size = f" {len(dataset):,}" if hasattr(dataset, "__len__") else ""
        texts.append(f"{split} {type(dataset).__name__}{size}")
    return texts


def _progress(experiment: Experiment, seconds: Mapping[Kind, float]) -> list[str]:
    """Return how far a run came, and why it ended before its horizon, if it did."""
    state = experiment.trainer.state
    epochs = "1 epoch" if state.epoch == 1 else f"{state.epoch} epochs"
    texts = [f"{epochs}, {state.global_step} updates, {sum(seconds.values()):.1f} s"]
    if state.pruned:
        texts.append("pruned: its search ended it early")
    elif state.stop_reason == MAX_TIME:
        limit = experiment.config.trainer.max_time
        texts.append(f"ended by its time limit (trainer.max_time={limit})")
    elif state.stop_reason:
        texts.append(f"ended early: {state.stop_reason}")
    return texts


def _test_results(experiment: Experiment, results: Mapping[str, float], is_best: bool) -> list[str]:
    """Return the test metrics, or why there are none."""
    values = _values(results, "test")
    if values:
        return [*values, "(checkpoint best)" if is_best else "(checkpoint last)"]
    if experiment.trainer.state.pruned:
        return ["not tested: the run was pruned"]
    if not keeps_weights(experiment.trainer.callbacks):
        return ["not tested: the run measured, and its weights are of no use"]
    if experiment.test_loaders:
        return ["no label of the test split counts: there are no figures"]
    return ["no test split: see val"]


def _values(results: Mapping[str, float], stage: str) -> list[str]:
    prefix = f"{stage}/"
    return [
        f"{name.removeprefix(prefix)} {value:.4f}"
        for name, value in results.items()
        if name.startswith(prefix)
    ]


def _commands(request: RunRequest, experiment: Experiment, run_dir: Path) -> list[str]:
    """Return the lines of commands that can be typed next."""
    trainer = experiment.trainer
    commands = []
    if (run_dir / TENSORBOARD).is_dir():
        commands.append(command(run_dir))
    sets = experiment.data.sets
    splits = [split for split in sets if split != "train" and sets[split] is not None]
    has_checkpoint = best_or_last(run_dir / CHECKPOINTS) is not None
    if splits and has_checkpoint and keeps_weights(trainer.callbacks):
        words = ["evaluate", f"run={run_dir}"]
        # Test splits come last. Without one, `evaluate` has to be told another split.
        if splits[-1].partition("/")[0] != "test":
            words.append(f"split={splits[0]}")
        commands.append(shlex.join(words))
    if trainer.state.interrupted and not trainer.done:
        commands.append(_row("go on", request.resume_command(run_dir)))
    return commands
