"""What a checkpoint holds of a loader: the samples left out, the versions of draws and order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import CheckpointError


def of(loader: Any) -> dict[str, Any]:
    """Return which samples this process left out, and the versions of its draws and its order.

    A plain loader has none of them.
    """
    if not hasattr(loader, "skipped_state"):
        return {}
    versions = {"draws": getattr(loader, "draws", None), "order": _order_version(loader)}
    return {"skipped": loader.skipped_state(), **versions}


def load(loader: Any, states: Sequence[Mapping[str, Any]], rank: int, count: int) -> None:
    """Give each of `count` processes what it had left out; all to the first if they were others.

    Raises CheckpointError for a run whose draws or order this version does not have.
    """
    if not hasattr(loader, "skipped_state"):
        return
    _check_draws(getattr(loader, "draws", None), states)
    _keep_order(loader, states)
    own = states[rank : rank + 1] if len(states) == count else states if rank == 0 else []
    loader.load_skipped_state([entry for state in own for entry in state.get("skipped", [])])


def _check_draws(now: int | None, states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a run whose random transforms drew in another way; None: nothing is drawn."""
    then = states[0].get("draws", 1) if states else 1  # version 1 did not write it down
    if None not in (now, then) and now != then:
        raise CheckpointError(
            f"resume: the random transforms of this run were drawn by version {then} of the draws, "
            f"and this Regimen has version {now}, which augments each sample in another way: go on "
            "with the Regimen that the run began with, or begin a new run"
        )


def _keep_order(loader: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Go on with the order that the run began with, where it is computed by position."""
    now = _order_version(loader)
    then = states[0].get("order", 1) if states else now  # version 1 did not write it down
    if now is None or then is None or now == then:
        return
    if then > now:
        raise CheckpointError(
            f"resume: the order of this run's samples has version {then}, and this Regimen knows "
            f"those up to {now}: go on with the Regimen that the run began with"
        )
    loader.sampler.updates.version = then


def _order_version(loader: Any) -> int | None:
    updates = getattr(getattr(loader, "sampler", None), "updates", None)
    return getattr(updates, "version", None)
