"""What a run's directory tells of the run, without holding it and without torch."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from callbacks.support.monitor import AUTO
from conf.errors import ConfigError
from conf.yaml_file import plain_values
from trainer.checkpoints.journal import read_content
from trainer.metric_names import epoch_metric
from trainer.runs.directory import CONFIG
from trainer.runs.metrics import read_metrics
from trainer.runs.status import (
    CHECKPOINTS,
    MANIFEST,
    RunDirectoryError,
    holds_run,
    read_json,
    read_status,
)

_TAIL = 1 << 16  # bytes of metrics.jsonl that hold its last line
_BEST = "best/"
# What decides where the configuration leaves it to the task.
_USUAL = ("val/accuracy", "val/f1", "val/miou", "val/loss")


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run; what cannot be read of it is None or empty."""

    path: Path
    name: str
    state: str  # that of status.json, killed, or damaged
    created: str
    epoch: int | None
    step: int | None
    max_epochs: int | None
    best: tuple[str, float] | None  # the metric that its checkpoints are chosen by, and its value
    mode: str  # min, max or auto: which values of that metric are better
    seconds: float | None  # of all its starts
    size: int  # bytes; a file with several names counts once
    config: Mapping[str, Any]

    @property
    def running(self) -> bool:
        """Return whether a living process holds it."""
        return self.state == "running"

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints of it, but for the differences to others."""
        return {
            "run": str(self.path),
            "name": self.name,
            "status": self.state,
            "created": self.created or None,
            "epoch": self.epoch,
            "step": self.step,
            "max_epochs": self.max_epochs,
            "metric": self.best and self.best[0],
            "best": self.best and self.best[1],
            "seconds": self.seconds,
            "bytes": self.size,
        }


def runs_in(folder: Path) -> list[RunEntry]:
    """Return the runs in a folder and below it, the oldest first; links are not followed."""
    found = [read_run(path) for path in _paths(folder)]
    return sorted(found, key=lambda run: (run.created, str(run.path)))


def read_run(path: Path) -> RunEntry:
    """Read one run. Raises RunDirectoryError where there is none."""
    if not holds_run(path):
        raise RunDirectoryError(f"{path} holds no run: it has no {MANIFEST}")
    status, damaged = _status(path)
    config = _config(path)
    last = next(iter([*read_metrics(path, _TAIL)][-1:]), {})
    checkpoint = _checkpoint_node(config)
    state = "damaged" if damaged or not status.get("state") else str(status["state"])
    return RunEntry(
        path=path,
        name=str(config.get("name", path.parent.name)),
        state=state,
        created=_created(path),
        epoch=last.get("epoch"),
        step=last.get("step"),
        max_epochs=_node(config, "trainer").get("max_epochs"),
        best=_best(path, _node(status, "results"), str(checkpoint.get("monitor", AUTO))),
        mode=str(checkpoint.get("mode", AUTO)),
        seconds=_seconds(path, status, state),
        size=sum(_sizes(path).values()),
        config=config,
    )


def last_values(path: Path) -> dict[str, Any]:
    """Return the last value of each key in a run's metrics."""
    return {key: value for line in read_metrics(path) for key, value in line.items()}


def results(path: Path) -> dict[str, Any]:
    """Return a run's results, or what it has logged last if it has not ended well."""
    status, _ = _status(path)
    logged = {k: v for k, v in last_values(path).items() if "/" in k}
    return dict(_node(status, "results")) or logged


def _paths(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        if MANIFEST in files:
            yield Path(place)
            folders[:] = [name for name in folders if name not in (CHECKPOINTS, "tensorboard")]


def _status(path: Path) -> tuple[dict[str, Any], bool]:
    try:
        return read_status(path), False
    except RunDirectoryError:
        return {}, True


def _config(path: Path) -> dict[str, Any]:
    try:
        text = (path / CONFIG).read_text(encoding="utf-8")
        config = plain_values(text, str(path / CONFIG))
    except (OSError, UnicodeDecodeError, ConfigError):
        return {}
    return config if isinstance(config, dict) else {}


def _created(path: Path) -> str:
    try:
        return str(read_json(path / MANIFEST).get("created", ""))
    except RunDirectoryError:
        return ""


def _node(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    node = config.get(key)
    return node if isinstance(node, dict) else {}


def _checkpoint_node(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the node of the callback that chooses the best checkpoint."""
    callbacks = _node(config, "callbacks")
    nodes = [_node(callbacks, name) for name in callbacks]
    saving = [node for node in nodes if "save_top_k" in node]
    return saving[0] if saving else {}


def _best(path: Path, found: Mapping[str, Any], monitor: str) -> tuple[str, float] | None:
    """Return what the run itself recorded as its best, or what its best checkpoint has."""
    for key, value in found.items():
        if key.startswith(_BEST) and isinstance(value, int | float):
            return key.removeprefix(_BEST), value
    try:
        metrics = read_content(path / CHECKPOINTS)["names"]["best"]["metrics"]
        candidates = _USUAL if monitor == AUTO else (epoch_metric(monitor),)
        return next((name, metrics[name]) for name in candidates if metrics.get(name) is not None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
        return None


def _seconds(path: Path, status: dict[str, Any], state: str) -> float | None:
    """Return a run's seconds over all its starts; None if its status tells nothing."""
    if not status:
        return None
    try:
        if state != "running":
            return float(status["seconds"])
        since = datetime.now(UTC) - datetime.fromisoformat(str(status["updated"]))
        return float(status.get("seconds") or 0.0) + max(0.0, since.total_seconds())
    except (KeyError, ValueError, TypeError):
        return None


def _sizes(path: Path) -> dict[tuple[int, int], int]:
    sizes = {}
    for place, _, files in os.walk(path):
        for name in files:
            try:
                facts = os.lstat(Path(place, name))
            except OSError:  # a running run replaced it meanwhile
                continue
            sizes[facts.st_dev, facts.st_ino] = facts.st_size
    return sizes
