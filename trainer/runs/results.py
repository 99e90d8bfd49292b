"""What came out of a run: its last and best values, and how it ended, for `status.json`."""

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
    logged = trainer.metrics
    last = {
        k: v
        for k, v in logged.items()
        if not k.startswith(_NOT_RESULTS)
        and (epoch_metric(k) == k or epoch_metric(k) not in logged)
    }
    best = best_of(trainer)
    return last | ({f"best/{best[0]}": best[1]} if best else {}) | dict(tested)


def best_of(trainer: Trainer) -> tuple[str, float, int] | None:
    """Return (metric, value, step) of the best checkpoint; None if there is none, or of no use."""
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
