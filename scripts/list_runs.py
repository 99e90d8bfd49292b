"""`regimen runs [DIR]`: what was trained; also `runs diff A B`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.support.monitor import AUTO
from conf.errors import ConfigError
from conf.yaml_file import plain_values, word
from scripts.cli.arguments import command_parser, parse_command
from trainer.files.layout import aligned, columns_of, on_one_line
from trainer.metric_names import epoch_metric
from trainer.runs.directory import CONFIG
from trainer.runs.status import (
    CHECKPOINTS,
    MANIFEST,
    RunDirectoryError,
    holds_run,
    read_json,
    read_metrics,
    read_status,
)
from trainer.summary.text import natural_width, size

if TYPE_CHECKING:
    from rich.table import Table

_DIFF = "Show two runs side by side: where their configurations differ, and their metrics."
_TAIL = 1 << 16  # bytes of metrics.jsonl that hold its last line
_BEST = "best/"
# What decides where the configuration leaves it to the task.
_USUAL = ("val/accuracy", "val/f1", "val/miou", "val/loss")
_SHOWN = 8  # differences in a row of the table; --json has all
_UNLIMITED = 1_000_000  # characters
_ABSENT = "-"
_TARGET = "_target_"


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
    seconds: float | None  # of all its starts
    size: int  # bytes; a file with several names counts once
    config: Mapping[str, Any]


def runs(argv: Sequence[str]) -> int:
    """Do what a command line asks for. Raises ConfigError, RunDirectoryError."""
    if argv and argv[0] == "diff":
        return _diff(argv[1:])
    parser = command_parser("regimen runs", __doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), metavar="DIR")
    parser.add_argument("--json", action="store_true", help="for machines: a list of objects")
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    found = runs_in(arguments.folder)
    changes = differences(found)
    if arguments.json:
        pairs = zip(found, changes, strict=True)
        listed = [_as_json(run) | {"differs": changed} for run, changed in pairs]
        print(json.dumps(listed, indent=2, default=str))
    elif not found:
        print(f"no runs in {on_one_line(arguments.folder)}")
    else:
        _print(_rows(found, changes))
    return 0


def _as_json(run: RunEntry) -> dict[str, Any]:
    return {
        "run": str(run.path),
        "name": run.name,
        "status": run.state,
        "created": run.created or None,
        "epoch": run.epoch,
        "step": run.step,
        "max_epochs": run.max_epochs,
        "metric": run.best and run.best[0],
        "best": run.best and run.best[1],
        "seconds": run.seconds,
        "bytes": run.size,
    }


def _diff(argv: Sequence[str]) -> int:
    parser = command_parser("regimen runs diff", _DIFF)
    parser.add_argument("left", type=Path, metavar="A")
    parser.add_argument("right", type=Path, metavar="B")
    parser.add_argument("--json", action="store_true", help="for machines: pairs by name")
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    left, right = read_run(arguments.left), read_run(arguments.right)
    keys = varied([left.config, right.config], deep=True)
    config = {key: [at(left.config, key), at(right.config, key)] for key in keys}
    both = _results(left.path), _results(right.path)
    metrics = {name: [both[0].get(name), both[1].get(name)] for name in both[0] | both[1]}
    if arguments.json:
        facts = {"status": [left.state, right.state], "seconds": [left.seconds, right.seconds]}
        pairs = {"run": facts, "config": config, "metrics": metrics}
        print(json.dumps(pairs, indent=2, default=str))
        return 0
    names, columns = [str(left.path), str(right.path)], columns_of(sys.stdout)
    if columns is not None and sum(map(len, names)) > columns // 2:
        for letter, name in zip("AB", names, strict=True):
            print(f"{letter}  {on_one_line(name)}")
        names = ["A", "B"]
    rows = [["", *names], ["status", left.state, right.state]]
    rows.append(["duration", duration(left.seconds), duration(right.seconds)])
    rows += [[key, *map(_shown, pair)] for key, pair in config.items()]
    rows += [[name, *map(_number, pair)] for name, pair in metrics.items()]
    _print(rows)
    return 0


def runs_in(folder: Path) -> list[RunEntry]:
    """Return the runs in a folder and below it, the oldest first; links are not followed."""
    found = []
    for place, folders, files in os.walk(folder):
        if MANIFEST in files:
            found.append(read_run(Path(place)))
            folders[:] = [name for name in folders if name not in (CHECKPOINTS, "tensorboard")]
    return sorted(found, key=lambda run: (run.created, str(run.path)))


def read_run(path: Path) -> RunEntry:
    """Read one run. Raises RunDirectoryError where there is none."""
    if not holds_run(path):
        raise RunDirectoryError(f"{path} holds no run: it has no {MANIFEST}")
    status, config = _status(path), _config(path)
    last = next(iter([*read_metrics(path, _TAIL)][-1:]), {})
    callbacks = _node(config, "callbacks")
    saving = [n for name in callbacks if "save_top_k" in (n := _node(callbacks, name))]
    monitor = str(saving[0].get("monitor", AUTO)) if saving else AUTO
    state = str(status.get("state") or "damaged")
    try:
        created = str(read_json(path / MANIFEST).get("created", ""))
    except RunDirectoryError:
        created = ""
    return RunEntry(
        path=path,
        name=str(config.get("name", path.parent.name)),
        state=state,
        created=created,
        epoch=last.get("epoch"),
        step=last.get("step"),
        max_epochs=_node(config, "trainer").get("max_epochs"),
        best=_best(path, _node(status, "results"), monitor),
        seconds=_seconds(status, state),
        size=_size(path),
        config=config,
    )


def _status(path: Path) -> dict[str, Any]:
    try:
        return read_status(path)
    except RunDirectoryError:
        return {}


def _config(path: Path) -> dict[str, Any]:
    try:
        text = (path / CONFIG).read_text(encoding="utf-8")
        config = plain_values(text, str(path / CONFIG))
    except (OSError, UnicodeDecodeError, ConfigError):
        return {}
    return config if isinstance(config, dict) else {}


def _node(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    node = config.get(key)
    return node if isinstance(node, dict) else {}


def _results(path: Path) -> dict[str, Any]:
    # Of a run that has not ended well, what it has logged last.
    logged = {k: v for line in read_metrics(path) for k, v in line.items() if "/" in k}
    return dict(_node(_status(path), "results")) or logged


def _best(path: Path, found: Mapping[str, Any], monitor: str) -> tuple[str, float] | None:
    # What the run itself recorded as its best, or what its best checkpoint has.
    for key, value in found.items():
        if key.startswith(_BEST) and isinstance(value, int | float):
            return key.removeprefix(_BEST), value
    try:
        metrics = read_json(path / CHECKPOINTS / "index.json")["names"]["best"]["metrics"]
        candidates = _USUAL if monitor == AUTO else (epoch_metric(monitor),)
        return next((name, metrics[name]) for name in candidates if metrics.get(name) is not None)
    except (RunDirectoryError, LookupError, TypeError, AttributeError, StopIteration):
        return None


def _seconds(status: Mapping[str, Any], state: str) -> float | None:
    try:
        if state != "running":
            return float(status["seconds"])
        since = datetime.now(UTC) - datetime.fromisoformat(str(status["updated"]))
        return float(status.get("seconds") or 0.0) + max(0.0, since.total_seconds())
    except (KeyError, ValueError, TypeError):
        return None


def _size(path: Path) -> int:
    sizes = {}
    for place, _, files in os.walk(path):
        for name in files:
            try:
                facts = os.lstat(Path(place, name))
            except OSError:  # a running run replaced it meanwhile
                continue
            sizes[facts.st_dev, facts.st_ino] = facts.st_size
    return sum(sizes.values())


def differences(runs: Sequence[RunEntry]) -> list[dict[str, Any]]:
    """Return for each run its values of the keys that differ among the runs of its name."""
    keys = {}
    for name in {run.name for run in runs}:
        configs = [run.config for run in runs if run.name == name and run.config]
        keys[name] = list(varied(configs)) if configs else []
    return [{key: at(run.config, key) for key in keys[run.name]} for run in runs]


def varied(values: Sequence[Any], key: str = "", deep: bool = False) -> Iterator[str]:
    """Yield the keys at which nested dicts differ.

    A node whose `_target_` differs is one difference, unless `deep`: its keys mean other things.
    """
    if len({repr(value) for value in values}) == 1:  # by its text: 1 is not true
        return
    nodes = [value for value in values if isinstance(value, dict)]
    alike = len({repr(node.get(_TARGET)) for node in nodes}) == 1
    if len(nodes) < len(values) or not (deep or alike):
        yield key
        return
    for name in dict.fromkeys(name for node in nodes for name in node):
        inner = f"{key}.{name}" if key else str(name)
        yield from varied([node.get(name, _ABSENT) for node in nodes], inner, deep)


def at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; "-" where there is none."""
    node: Any = config
    for name in key.split("."):
        if not isinstance(node, dict):
            return _ABSENT
        node = next((node[k] for k in node if str(k) == name), _ABSENT)
    return node


def _rows(runs: Sequence[RunEntry], changes: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = [["run", "status", "epoch", "best", "duration", "size", "differs in"]]
    for run, changed in zip(runs, changes, strict=True):
        words = [f"{key}={_shown(value)}" for key, value in changed.items()]
        more = [f"and {len(words) - _SHOWN} more"] if len(words) > _SHOWN else []
        epoch = f"{run.epoch}/{run.max_epochs}" if run.max_epochs else str(run.epoch)
        rows.append(
            [
                str(run.path),
                run.state,
                "" if run.epoch is None else epoch,
                "" if run.best is None else f"{run.best[0]} {_number(run.best[1])}",
                duration(run.seconds),
                size(run.size),
                " ".join(words[:_SHOWN] + more),
            ]
        )
    return rows


def _shown(value: Any) -> str:
    return str(value.get(_TARGET, value)) if isinstance(value, dict) else word(value)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def duration(seconds: float | None) -> str:
    """Return seconds as `1h 02m`, `3m 20s` or `7.5s`."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"


def _print(rows: Sequence[Sequence[str]]) -> None:
    # Off a terminal a row is one line, however long; where one is too narrow, without a frame.
    from rich.console import Console

    table, columns = _table(rows), columns_of(sys.stdout)
    if columns is None:
        table.box, table.pad_edge = None, False
        whole = Console(width=_UNLIMITED)
        whole.print(table, width=whole.measure(table).maximum, crop=False)
    elif natural_width(table) <= columns:
        Console().print(table)
    else:
        print("\n".join(aligned([[on_one_line(cell) for cell in row] for row in rows], columns)))


def _table(rows: Sequence[Sequence[str]]) -> Table:
    # rich is slow to import, and --json and --help do not need it
    from rich.markup import escape
    from rich.table import Table

    table = Table(highlight=False)
    for number, name in enumerate(rows[0]):  # the first can be copied: a path, a key
        table.add_column(escape(on_one_line(name)), overflow="fold", no_wrap=number == 0)
    for row in rows[1:]:
        table.add_row(*(escape(on_one_line(cell)) for cell in row))
    return table
