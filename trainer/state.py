"""How far a run has come: counters that are saved with every checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(slots=True)
class TrainState:
    """Count what has happened; a *step* is an optimizer update that was applied.

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
    # Values of `global_step` when the boundary's parts were last done: a boundary that was
    # interrupted is finished, and never repeated, by the run that resumes it.
    logged_at: int = 0
    validated_at: int = 0
    stop_reason: str | None = None
    stop_code: int = 0  # the exit code that goes with it: 0, or 128 + a signal's number
    # A signal that came at no particular moment: it counts from where all processes agree on it.
    signal: tuple[str, int] | None = None

    def request_stop(self, reason: str, code: int = 0) -> None:
        """End the run after this update; the first reason stays, a signal's goes before others."""
        if self.stop_reason is None or (code and not self.stop_code):
            self.stop_reason, self.stop_code = reason, code

    def settle(self) -> None:
        """Turn a signal into a wish to stop."""
        if self.signal is not None:
            self.request_stop(*self.signal)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain values; a stop is not carried into the next run."""
        return asdict(self) | {"stop_reason": None, "stop_code": 0, "signal": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the counters of `state`."""
        for field in fields(self):
            setattr(self, field.name, state[field.name])
