"""Compare two runs bit by bit: `python tests/tools/same_run.py RUN_DIR RUN_DIR`.

Compares the final state, the metrics and TensorBoard's series, without times and memory.
"""

import argparse
import fnmatch
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from regimen.trainer.checkpoints.reader import read_whole

# What I5 does not cover: clocks and memory, and the sizes of files whose lines hold such figures.
_WALL_CLOCK = ("*time/*", "*memory/*", "callbacks.tensorboard.*", "callbacks.metrics_log.*")
_SHOWN = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Print how two runs differ and return 1, or 0 where they do not."""
    parser = argparse.ArgumentParser(prog="python tests/tools/same_run.py", description=__doc__)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN_DIR")
    found = differences(*parser.parse_args(argv).runs)
    print("\n".join(found) or "the runs are the same")
    return int(bool(found))


def differences(first: Path, second: Path, but: Collection[str] = ()) -> list[str]:
    """Return in words how two run directories differ in what a resume must keep; empty if not.

    `but` names keys of the last checkpoint that may differ, such as `config`.
    """
    state = state_of(first)
    other = state_of(second)
    for key in but:
        state.pop(key, None)
        other.pop(key, None)
    return [
        *_differing("state", state, other),
        *_differing("metrics.jsonl", metrics_of(first), metrics_of(second)),
        *_differing("tensorboard", series_of(first), series_of(second)),
    ]


def digest_of(run: Path, checkpoint: str = "last") -> str:
    """Return one sha256 for the final state: over keys, dtypes, shapes and bytes, in order."""
    text = json.dumps(sorted(state_of(run, checkpoint).items()))
    return hashlib.sha256(text.encode()).hexdigest()


def state_of(run: Path, checkpoint: str = "last") -> dict[str, str]:
    """Return a fingerprint of each value in a checkpoint, by its dotted key."""
    found = _flat(read_whole(run / "checkpoints" / f"{checkpoint}.pt"), "")
    return {key: value for key, value in found if not _is_wall_clock(key)}


def metrics_of(run: Path) -> dict[str, str]:
    """Return the lines of `metrics.jsonl` by number, without wall-clock facts."""
    found = {}
    for number, line in enumerate(logged(run), 1):
        kept = {key: value for key, value in line.items() if not _is_wall_clock(key)}
        found[f"line {number}"] = json.dumps(kept)
    return found


def logged(run: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def series_of(run: Path) -> dict[str, str]:
    """Return each scalar series of TensorBoard as text: (step, value) in order."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    series = {}
    for tag in events.Tags()["scalars"]:
        if not _is_wall_clock(tag):
            points = [(event.step, event.value) for event in events.Scalars(tag)]
            series[tag] = str(points)
    return series


def repeated_steps(run: Path) -> list[str]:
    """Return the (step, key) pairs that `metrics.jsonl` holds more than once."""
    times: Counter[tuple[str, int]] = Counter()
    for line in logged(run):
        times.update((key, line["step"]) for key in line if key not in ("step", "epoch"))
    return [f"{key} at step {step}" for (key, step), count in times.items() if count > 1]


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{key}.{number}")
    elif isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(content.numpy().tobytes()).hexdigest()
        yield key, f"{value.dtype}{list(value.shape)} {digest[:16]}"
    else:
        yield key, repr(value)


def _is_wall_clock(key: str) -> bool:
    return any(fnmatch.fnmatch(key, pattern) for pattern in _WALL_CLOCK)


def _differing(where: str, first: dict[str, str], second: dict[str, str]) -> list[str]:
    texts = []
    for key in dict.fromkeys([*first, *second]):
        one = first.get(key)
        other = second.get(key)
        if one != other:
            texts.append(f"{where}: {key}: {one} -> {other}")
    if len(texts) > _SHOWN:
        more = len(texts) - _SHOWN
        return [*texts[:_SHOWN], f"{where}: (+{more} more)"]
    return texts


if __name__ == "__main__":
    sys.exit(main())
