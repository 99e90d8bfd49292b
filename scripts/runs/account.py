"""How a run spent its time, and which settings would reduce it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.timer import Kind

_WORTH_A_HINT = 0.2  # of the run's time
_LONG = 10.0  # seconds: what a shorter run spends says little of a longer one
_SHOWN = 0.005


@dataclass(frozen=True, slots=True)
class Account:
    """The seconds of a run by kind of work, by the host's clock.

    The time of a GPU is counted where the host waits for it, which is mostly at the log lines.
    """

    spent: Mapping[Kind, float]

    @property
    def seconds(self) -> float:
        """The sum over all kinds."""
        return sum(self.spent.values())

    def text(self) -> str:
        """Return the fraction of each kind, the largest first."""
        shares = sorted(self._shares().items(), key=lambda pair: -pair[1])
        return ", ".join(f"{share:.0%} {_NAMES[kind]}" for kind, share in shares if share >= _SHOWN)

    def hint(self, config: Mapping[str, Any]) -> str:
        """Return the settings that reduce the largest avoidable part; empty if it is small."""
        shares = self._shares()
        avoidable: list[Kind] = ["data", "evaluation", "checkpoints", "callbacks"]
        kind = max(avoidable, key=lambda k: shares.get(k, 0.0))
        advice = _advice(kind, config)
        if self.seconds < _LONG or shares.get(kind, 0.0) < _WORTH_A_HINT or not advice:
            return ""
        return f"{shares[kind]:.0%} {_NAMES[kind]}: {' or '.join(advice)}"

    def _shares(self) -> dict[Kind, float]:
        whole = self.seconds
        return {kind: s / whole for kind, s in self.spent.items()} if whole > 0 else {}


_NAMES: Mapping[Kind, str] = {
    "data": "waiting for data",
    "forward + backward": "forward + backward",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "callbacks": "callbacks and logging",
    "start and end": "starting and ending",
}


def _advice(kind: Kind, config: Mapping[str, Any]) -> list[str]:
    options, loader = config["trainer"], config["loader"]
    if kind == "data":
        workers = 2 * loader["num_workers"] or 4
        return [f"loader.num_workers={workers}"]
    if kind == "evaluation":
        every = options["validate_every_n_epochs"]
        return [f"trainer.validate_every_n_epochs={2 * every}"] if every else []
    if kind == "checkpoints":
        every = ((config["callbacks"] or {}).get("checkpoint") or {}).get("every_n_epochs")
        return [f"callbacks.checkpoint.every_n_epochs={2 * every}"] if every else []
    return [f"trainer.log_every_n_steps={2 * options['log_every_n_steps']}"]
