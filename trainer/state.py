"""Progress of a run: counters that are saved with every checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

MAX_TIME = "max_time"  # the reason of a run that stopped at its time limit
PRUNED = "pruning"  # the reason of a run that its search ended early
_STOP = ("stop_reason", "stop_code", "requested", "signal")


class LogPoint(NamedTuple):
    """Where logged values stand: the applied updates and completed epochs of their weights."""

    step: int
    epoch: int


@dataclass(slots=True)
class TrainState:
    """Count the progress of a run; a *step* is an optimizer update that was applied.

    `updates` counts the batches consumed, `skipped_updates` those of them whose gradient was not
    finite, so that `updates == global_step + skipped_updates`.
    """

    epoch: int = 0  # epochs completed
    position: int = 0  # updates consumed in the current epoch
    global_step: int = 0  # updates applied
    updates: int = 0  # updates consumed over all epochs
    skipped_updates: int = 0  # updates not applied: their gradient was not finite
    skipped_in_a_row: int = 0
    micro_batches: int = 0
    samples: int = 0  # samples consumed, over all devices
    # Values of `global_step` at which the parts of a boundary were last done. The run that resumes
    # an interrupted boundary finishes it and repeats no part of it.
    logged_at: int = 0
    validated_at: int = 0
    stop_reason: str | None = None  # why the run ends, once all processes have agreed on it
    stop_code: int = 0  # the exit code that goes with it: 0, or 128 + a signal's number
    # The stop that this process alone asks for: reason and code. A signal can arrive at any moment,
    # so its handler writes to a field of its own.
    requested: tuple[str, int] | None = None
    signal: tuple[str, int] | None = None

    def count(self, micro_batches: int, samples: int, applied: bool) -> None:
        """Count an update; `Updater.count_skipped` counts those that were not applied."""
        self.updates += 1
        self.position += 1
        self.micro_batches += micro_batches
        self.samples += samples
        if applied:
            self.global_step += 1
            self.skipped_in_a_row = 0

    @property
    def interrupted(self) -> bool:
        """Whether a signal or the time limit ended the run, so that another run continues it."""
        return bool(self.stop_code) or self.stop_reason == MAX_TIME

    @property
    def pruned(self) -> bool:
        """Whether the search that the run belongs to ended it early."""
        return self.stop_reason == PRUNED

    def request_stop(self, reason: str, code: int = 0) -> None:
        """Ask to end the run after this update; the first reason stays, unless a signal follows."""
        if self.requested is None or (code and not self.requested[1]):
            self.requested = (reason, code)

    @property
    def stop_request(self) -> tuple[str, int] | None:
        """The stop that this process asks for and that is not agreed on yet: reason and code."""
        request = self.signal or self.requested
        settled = self.stop_code or (self.stop_reason is not None and not (request and request[1]))
        return None if settled else request

    def settle(self) -> None:
        """Stop the run at this process's own request, where there is no other process."""
        if self.stop_request is not None:
            self.stop(*self.stop_request)

    def stop(self, reason: str, code: int = 0) -> None:
        """End the run: all processes have agreed."""
        self.stop_reason, self.stop_code = reason, code

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain values; a stop is not carried into the next run."""
        return {name: value for name, value in asdict(self).items() if name not in _STOP}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the counters of `state`."""
        for field in fields(self):
            if field.name not in _STOP:
                setattr(self, field.name, state[field.name])
