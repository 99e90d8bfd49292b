"""The outcome of a run for `status.json`: its last and best values, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from regimen.trainer.callback import Results, keeps_weights, saver_of
from regimen.trainer.errors import EXIT_CODES, describe, exit_code
from regimen.trainer.runs.status import Record
from regimen.trainer.state import epoch_metric

if TYPE_CHECKING:
    from regimen.trainer.trainer import Trainer

_NOT_RESULTS = ("time/", "memory/", "lr/", "best/")


def results_of(trainer: Trainer, tested: Mapping[str, float]) -> dict[str, float]:
    """Return the last logged values, the best value of the monitored metric, and the test's.

    For training metrics this is the mean over the epoch: the value of the last log line would
    depend on the logging interval.
    """
    results = {}
    for name, value in trainer.metrics.items():
        epoch_name = epoch_metric(name)
        has_epoch_mean = epoch_name != name and epoch_name in trainer.metrics
        if not name.startswith(_NOT_RESULTS) and not has_epoch_mean:
            results[name] = value
    best = best_of(trainer)
    if best is not None:
        metric, value, _ = best
        results[f"best/{metric}"] = value
    return {**results, **tested}


def best_of(trainer: Trainer) -> tuple[str, float, int] | None:
    """Return (metric, value, step) of the best checkpoint; None without one.

    Also None if the weights of the run are of no use, as with a range test.
    """
    if not keeps_weights(trainer.callbacks):
        return None
    saver = saver_of(trainer.callbacks)
    return saver.best_result() if saver else None


def best_record(trainer: Trainer) -> Record | None:
    """Return metric, value, step and mode of the best checkpoint, as `status.json` has them.

    The mode, "max" or "min", says which values of the metric are better.
    """
    best = best_of(trainer)
    saver = saver_of(trainer.callbacks)
    if best is None or saver is None:
        return None
    metric, value, step = best
    mode = "min"
    if saver.improves(1.0, 0.0):
        mode = "max"
    return {"metric": metric, "value": value, "step": step, "mode": mode}


def outcome(trainer: Trainer, tested: Mapping[str, float]) -> Results:
    """Return how a run ended that no exception ended: `pruned` or `stopped` are not `finished`."""
    state = trainer.state
    metrics = results_of(trainer, tested)
    where = f"epoch {state.epoch}, step {state.global_step}"
    if state.pruned:
        return Results("pruned", metrics, reason=f"pruned at {where}")
    if trainer.done or not state.interrupted:
        return Results("finished", metrics)
    limit = f"trainer.max_time={trainer.options.max_time}"
    return Results("stopped", metrics, reason=f"its time limit ended it at {where} ({limit})")


def failure(trainer: Trainer, error: BaseException) -> Results:
    """Return how a run ended that an exception ended: `preempted` by a signal, or `failed`."""
    code = exit_code(error)
    state = "failed"
    if code in EXIT_CODES.values():
        state = "preempted"
    return Results(state, results_of(trainer, {}), code, describe(error))
