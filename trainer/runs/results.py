"""The outcome of a run for `status.json`: its last and best values, and how it ended."""

from collections.abc import Mapping

from regimen.trainer.callback import Callback, Results, keeps_weights, saver_of
from regimen.trainer.components.components import Components
from regimen.trainer.errors import EXIT_CODES, describe, exit_code
from regimen.trainer.options import is_reached
from regimen.trainer.runs.status import Record
from regimen.trainer.state import MAX_TIME, epoch_metric

_NOT_RESULTS = ("time/", "memory/", "lr/", "best/")


def results_of(components: Components, tested: Mapping[str, float]) -> dict[str, float]:
    """Return the last logged values, the best value of the monitored metric, and the test's.

    For training metrics this is the mean over the epoch: the value of the last log line would
    depend on the logging interval.
    """
    results = {}
    for name, value in components.metrics.items():
        epoch_name = epoch_metric(name)
        has_epoch_mean = epoch_name != name and epoch_name in components.metrics
        if not name.startswith(_NOT_RESULTS) and not has_epoch_mean:
            results[name] = value
    best = best_of(components.callbacks)
    if best is not None:
        metric, value, _ = best
        results[f"best/{metric}"] = value
    return {**results, **tested}


def best_of(callbacks: Mapping[str, Callback]) -> tuple[str, float, int] | None:
    """Return (metric, value, step) of the best checkpoint; None without one.

    Also None if the weights of the run are of no use, as with a range test.
    """
    if not keeps_weights(callbacks):
        return None
    saver = saver_of(callbacks)
    return saver.best_result() if saver else None


def best_record(callbacks: Mapping[str, Callback]) -> Record | None:
    """Return metric, value, step and mode of the best checkpoint, as `status.json` has them.

    The mode, "max" or "min", says which values of the metric are better.
    """
    best = best_of(callbacks)
    saver = saver_of(callbacks)
    if best is None or saver is None:
        return None
    metric, value, step = best
    mode = "min"
    if saver.improves(1.0, 0.0):
        mode = "max"
    return {"metric": metric, "value": value, "step": step, "mode": mode}


def outcome(components: Components, tested: Mapping[str, float]) -> Results:
    """Return how a run ended that no exception ended: `pruned` or `stopped` are not `finished`."""
    state = components.state
    metrics = results_of(components, tested)
    if state.pruned:
        return Results("pruned", metrics, reason=f"pruned at {state.where}")
    if is_reached(components.options, state) or not state.interrupted:
        return Results("finished", metrics)
    if state.stop_reason != MAX_TIME:  # a signal, for which the caller has a handler of his own
        return Results("stopped", metrics, reason=f"{state.stop_reason} at {state.where}")
    limit = f"trainer.max_time={components.options.max_time}"
    return Results("stopped", metrics, reason=f"its time limit ended it at {state.where} ({limit})")


def failure(components: Components, error: BaseException) -> Results:
    """Return how a run ended that an exception ended: `preempted` by a signal, or `failed`."""
    code = exit_code(error)
    state = "failed"
    if code in EXIT_CODES.values():
        state = "preempted"
    return Results(state, results_of(components, {}), code, describe(error))
