"""How far jobs are, read from the files that they write."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.runs.metrics import read_metrics

_TAIL = 1 << 14  # bytes


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Where a job stands."""

    share: float = 0.0  # of the updates or epochs that it may make
    epoch: int | None = None  # complete ones
    value: float | None = None  # of the metric, the newest


def progress_of(run_dir: Path, config: Mapping[str, Any], metric: str) -> JobProgress:
    """Read the end of a job's metrics; nothing where there are none yet."""
    lines = list(read_metrics(run_dir, _TAIL))
    if not lines:
        return JobProgress()
    values = (line[metric] for line in reversed(lines) if isinstance(line.get(metric), float))
    last = lines[-1]
    return JobProgress(
        _share(last, config.get("trainer") or {}), last.get("epoch"), next(values, None)
    )


def _share(line: Mapping[str, Any], limits: Mapping[str, Any]) -> float:
    pairs = (("epoch", "max_epochs"), ("step", "max_steps"))
    shares = [line.get(k, 0) / limits[limit] for k, limit in pairs if limits.get(limit)]
    return min(1.0, max(shares, default=0.0))


def seconds_left(elapsed: float, done: float, jobs: int) -> float | None:
    """Return what is left of `jobs` that got as far as `done` in so many seconds, if known."""
    return elapsed * (jobs - done) / done if 0 < done < jobs else None


def in_words(seconds: float | None) -> str:
    """Write a duration as `about 40 s left`."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"about {seconds:.0f} s left"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min left"
    return f"about {seconds / 3600:.1f} h left"
