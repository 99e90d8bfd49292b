"""Training on a GPU, against the same written by hand: `python -m scripts.benchmark gpu`.

- `airbench94` (with `data.root=DIR` of CIFAR-10 as image files): seconds of all its epochs and the
  test, and accuracy, against a loop with its data on the device; `resnet18_cifar10`, whole, once;
- `resnet18` and `resnet50` at 224, bf16, channels_last, compiled, on one batch that stays on the
  device: images a second against a bare loop; `kernels` that an update launches, and how often the
  host waits for the device between log lines;
- `jpeg`: the ResNet-50 from JPEG files of `$DATA_ROOT/imagenet` (or made-up ones), against
  torchvision's `ImageFolder` and a bare loop; `jpeg_share_of_time` is the share of its time that
  the device does not wait for data: images a second by those of the batch that stays.

`parts=resnet50,jpeg` measures these alone. Each part is written as soon as it is known, beside
those that the file holds of the same machine; one that fails does not end the others.
A first, uncounted turn compiles; `compile=reduce-overhead` compiles both sides in that mode of
torch's, with CUDA graphs, `compile=false` neither. `device=cpu limit=2 widths=small` tries all of
it without a GPU.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from conf.errors import ConfigError, did_you_mean
from scripts.benchmarks.gpu_loops import (
    batch_size,
    contenders,
    from_files,
    host_waits,
    kernels,
    speeds,
)
from scripts.benchmarks.gpu_runs import BY_HAND, OURS, Rig, airbench, trained_whole
from scripts.benchmarks.report import Report, Row, machine

_NETWORKS = {"resnet18": ("resnet18_cifar10", 32, 10), "resnet50": ("resnet50", 224, 1000)}
_JPEG = "resnet50 from JPEG files, images/s"
Found = tuple[list[Row], dict[str, float]]
Part = Callable[[Rig, int], Found]


def measure(rounds: int, overrides: Sequence[str] = (), folder: Path | None = None) -> Report:
    """Run the comparisons, `rounds` turns each; write a report to `folder` after each."""
    rig, names = _asked(overrides)
    found = _earlier(folder)
    for name in names:
        since = time.perf_counter()
        try:
            rows, headlines = PARTS[name](rig, rounds)
            found[name] = {"rows": rows, "headlines": headlines}
        except Exception as error:  # such as too little memory: the others go on
            traceback.print_exc()
            reason = " ".join(str(error).split())[:300]
            found[name] = {"failed": f"{type(error).__name__}: {reason}"}
        found[name] |= {"seconds": time.perf_counter() - since, "rounds": rounds}
        found[name] |= {"overrides": list(overrides), "updates": rig.updates}
        _free()
        print(f"gpu: {name} took {found[name]['seconds']:.0f} s", flush=True)
        report = _report(rig, found)
        if folder is not None:
            report.write(folder)
    return report


def _asked(overrides: Sequence[str]) -> tuple[Rig, list[str]]:
    given = dict(word.partition("=")[::2] for word in overrides)
    known = {"data.root", "device", "limit", "widths", "compile", "parts"}
    if unknown := given.keys() - known:
        raise ConfigError(f"gpu does not know {', '.join(sorted(unknown))}: give data.root=DIR")
    device = torch.device(given.get("device", "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("the benchmark gpu needs a GPU, and torch finds none here")
    root = Path(given["data.root"]).absolute() if "data.root" in given else None
    names = given["parts"].split(",") if "parts" in given else list(PARTS)
    for name in names:
        if name not in PARTS:
            hint = did_you_mean(name, PARTS) or f"there are {', '.join(PARTS)}"
            raise ConfigError(f"gpu has no part {name!r}: {hint}")
        if "parts" in given and name in _OF_FILES and root is None:
            raise ConfigError(f"parts={name} needs CIFAR-10 as image files: give data.root=DIR")
    small, mode = given.get("widths") == "small", given.get("compile", "default")
    rig = Rig(
        device,
        root,
        int(given.get("limit", 50)),
        small,
        None if small or mode == "false" else mode,
    )
    return rig, [name for name in names if root is not None or name not in _OF_FILES]


def _airbench94(rig: Rig, rounds: int) -> Found:
    seconds, accuracies = airbench(rig, rounds)
    rows = _rows("airbench94, seconds", seconds)
    rows += _rows("airbench94, % of the test images", accuracies)
    return rows, {"airbench94_ratio_to_handwritten": _ratio(seconds)}


def _resnet18_whole(rig: Rig, rounds: int) -> Found:
    took, share = trained_whole(rig)
    return [], {"resnet18_cifar10_seconds": took, "resnet18_cifar10_accuracy": share}


def _speed(part: str) -> Part:
    name, side, classes = _NETWORKS[part]

    def measured(rig: Rig, rounds: int) -> Found:
        both = contenders(rig, name, side, classes)
        values = speeds(rig, both, batch_size(rig, name), rounds)
        rows = _rows(_speed_of(name), values)
        headlines = {f"{name}_ratio_to_reference": _ratio(values)}
        if rig.device.type == "cuda":
            headlines[f"{name}_host_waits"] = host_waits(both[OURS])
        return rows, headlines

    return measured


def _kernels(rig: Rig, rounds: int) -> Found:
    """Count separately: a profiler that may not be used here costs no other figure."""
    rows: list[Row] = []
    headlines: dict[str, float] = {}
    for name, side, classes in _NETWORKS.values():
        both = contenders(rig, name, side, classes)
        for run in both.values():
            run(2)  # compiles
        counts = {who: [kernels(rig, run)] for who, run in both.items()}
        rows += _rows(f"{name}, kernels an update", counts)
        headlines[f"{name}_kernels_ratio_to_handwritten"] = _ratio(counts)
    return rows, headlines


def _jpeg(rig: Rig, rounds: int) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        both = from_files(rig, Path(folder))
        values = speeds(rig, both, batch_size(rig, "resnet50"), rounds)
    return _rows(_JPEG, values), {"resnet50_jpeg_ratio_to_reference": _ratio(values)}


PARTS: dict[str, Part] = {
    "resnet50": _speed("resnet50"),
    "resnet18": _speed("resnet18"),
    "kernels": _kernels,
    "airbench94": _airbench94,
    "resnet18_cifar10": _resnet18_whole,
    "jpeg": _jpeg,
}
_OF_FILES = ("airbench94", "resnet18_cifar10")


def _earlier(folder: Path | None) -> dict[str, dict[str, Any]]:
    """Return what the file of an earlier call holds, if it was on this machine with this torch."""
    path = None if folder is None else folder / "gpu.json"
    if path is None or not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["machine"] != machine():
        return {}
    rows = {row["name"]: Row(**row) for row in content["rows"]}
    parts: dict[str, dict[str, Any]] = content["settings"]["parts"]
    return {
        name: part | ({"rows": [rows[row] for row in part["rows"]]} if "rows" in part else {})
        for name, part in parts.items()
    }


def _report(rig: Rig, found: dict[str, dict[str, Any]]) -> Report:
    ordered = {name: found[name] for name in PARTS if name in found}
    rows = [row for part in ordered.values() for row in part.get("rows", [])]
    headlines = {k: v for part in ordered.values() for k, v in part.get("headlines", {}).items()}
    values = {row.name: row.value for row in rows}
    alone, fed = (f"{title}: {OURS}" for title in (_speed_of("resnet50"), _JPEG))
    if alone in values and fed in values:
        headlines["resnet50_jpeg_share_of_time"] = values[fed] / values[alone]
    failed = [f"{name} failed: {p['failed']}" for name, p in ordered.items() if "failed" in p]
    parts = {
        name: part | ({"rows": [row.name for row in part["rows"]]} if "rows" in part else {})
        for name, part in ordered.items()
    }
    return Report(
        name="gpu",
        title=f"Training on {rig.device}, against the same by hand",
        unit="value",
        rows=rows,
        headlines=headlines,
        settings={"parts": parts},
        plot=failed,
    )


def _free() -> None:
    """Give back what a part compiled and allocated: the next one starts afresh."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _speed_of(name: str) -> str:
    return f"{name}, images/s"


def _rows(title: str, values: dict[str, list[float]]) -> list[Row]:
    reference = f"{title}: {BY_HAND}"
    return [
        Row(
            f"{title}: {name}",
            statistics.median(own),
            min(own),
            max(own),
            None if name == BY_HAND else _ratio(values),
            "" if name == BY_HAND else reference,
        )
        for name, own in values.items()
    ]


def _ratio(values: dict[str, list[float]]) -> float:
    return statistics.median(a / b for a, b in zip(values[OURS], values[BY_HAND], strict=True))
