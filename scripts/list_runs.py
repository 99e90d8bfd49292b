"""`regimen runs [DIR]`: what was trained; also `runs diff A B`."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from regimen.conf.errors import ConfigError, one_line, shortened, truncated_list
from regimen.conf.interpolation import join
from regimen.conf.yaml_file import word
from regimen.scripts.cli.arguments import RUNS, command_parser
from regimen.trainer.files.atomic import as_json
from regimen.trainer.files.layout import aligned, columns_of, size
from regimen.trainer.runs.directory import CONFIG, OVERRIDES, link_out
from regimen.trainer.runs.status import (
    CHECKPOINTS,
    MANIFEST,
    RunDirectoryError,
    holds_run,
    read_json,
    read_metrics,
    read_own,
    read_status,
    seconds_of,
)

_TAIL = 1 << 16  # bytes of metrics.jsonl that hold its last line
_UNLIMITED = 1_000_000  # characters
_ABSENT = "-"
_TARGET = "_target_"


def runs(argv: Sequence[str]) -> int:
    """Do what a command line asks for. Raises ConfigError, RunDirectoryError."""
    if argv and argv[0] == "diff":
        return _diff(argv[1:])
    parser = command_parser("regimen runs", __doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=RUNS, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="for machines: a list of objects")
    arguments = parser.parse_intermixed_args(argv)
    found = []
    for place, folders, files in os.walk(arguments.folder):  # links are not followed
        if MANIFEST in files:
            found.append(read_run(Path(place)))
            folders[:] = [name for name in folders if name not in (CHECKPOINTS, "tensorboard")]
    found.sort(key=lambda run: (str(run["created"] or ""), run["run"]))
    for name in {run["name"] for run in found}:  # runs of a name are compared with each other
        known = [run for run in found if run["name"] == name and run["config"]]
        for key, values in varied([{**run["config"], "tags": None} for run in known]):
            for run, value in zip(known, values, strict=True):
                run["differs"][key] = value
    rows = [["run", "status", "epoch", "best", "duration", "size", "tags", "differs in"]]
    for run in found:
        del run["config"]
        words = [f"{key}={_shown(value)}" for key, value in run["differs"].items()]
        epochs = f"/{run['max_epochs']}" if run["max_epochs"] else ""
        epoch = "" if run["epoch"] is None else f"{run['epoch']}{epochs}"
        best = "" if run["metric"] is None else f"{run['metric']} {_number(run['best'])}"
        facts = [epoch, best, _duration(run["seconds"]), size(run["bytes"]), " ".join(run["tags"])]
        rows.append(
            list(map(shortened, [run["run"], run["status"], *facts, truncated_list(words)]))
        )
    if arguments.json:
        print(as_json(found, indent=2, default=str))
    elif not found:
        print(f"no runs in {one_line(arguments.folder)}")
    else:
        _print(rows)
    return 0


def _diff(argv: Sequence[str]) -> int:
    """Show two runs side by side: where their configurations differ, and their metrics."""
    parser = command_parser("regimen runs diff", _diff.__doc__)
    parser.add_argument("left", type=Path, metavar="A")
    parser.add_argument("right", type=Path, metavar="B")
    parser.add_argument("--json", action="store_true", help="for machines: pairs by name")
    arguments = parser.parse_intermixed_args(argv)
    paths, results = (arguments.left, arguments.right), []
    both = [read_run(path) for path in paths]
    for path in paths:  # of a run that has not ended well, what it has logged last
        logged = {k: v for line in read_metrics(path) for k, v in line.items() if "/" in k}
        results.append(_node(_read(read_status, path).get("results")) or logged)
    facts = {key: [run[key] for run in both] for key in ("status", "seconds")}
    config = dict(varied([run["config"] for run in both], deep=True))
    metrics = {n: [found.get(n) for found in results] for n in results[0] | results[1]}
    if arguments.json:
        pairs = {"run": facts, "config": config, "metrics": metrics}
        print(as_json(pairs, indent=2, default=str))
        return 0
    rows = [["", *map(str, paths)], ["status", *facts["status"]]]
    rows.append(["duration", *map(_duration, facts["seconds"])])
    rows += [[key, *map(_shown, pair)] for key, pair in config.items()]
    rows += [[name, *map(_number, pair)] for name, pair in metrics.items()]
    _print(rows)
    return 0


def read_run(path: Path) -> dict[str, Any]:
    """Read one run, as --json shows it, and its `config`; what cannot be read is None or empty.

    Raises RunDirectoryError where there is none.
    """
    if not holds_run(path):
        raise RunDirectoryError(f"{path} holds no run: it has no {MANIFEST}")
    status = dict[str, Any]()
    created = dict[str, Any]()
    config = dict[str, Any]()
    last = dict[str, Any]()
    overrides = list[Any]()
    if link_out(path) is None:  # or it could show what the link names
        status = _read(read_status, path)
        created = _read(read_json, path / MANIFEST)
        config = _read(read_own, path / CONFIG)
        last = next(iter([*read_metrics(path, _TAIL)][-1:]), {})
        overrides = _read(read_own, path / OVERRIDES, list)
    best = _node(status.get("best"))
    sizes = {}  # a file with several names counts once
    for place, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):  # a running run replaced it meanwhile
                facts = os.lstat(Path(place, name))
                sizes[facts.st_dev, facts.st_ino] = facts.st_size
    return {
        "run": str(path),
        "name": str(config.get("name", path.parent.name)),
        "tags": [str(tag) for tag in _list(config.get("tags"))],
        "status": str(status.get("state") or "damaged"),
        "created": created.get("created"),
        "epoch": last.get("epoch"),
        "step": last.get("step"),
        "max_epochs": _node(config.get("trainer")).get("max_epochs"),
        "metric": best.get("metric"),
        "best": best.get("value"),
        "seconds": seconds_of(status) if status else None,
        "bytes": sum(sizes.values()),
        "sweep": str(path.parent) if (path.parent / "leaderboard.csv").exists() else None,
        "overrides": overrides,
        "differs": {},
        "config": config,
    }


def _read(read: Callable[[Path], Any], path: Path, kind: type = dict) -> Any:
    """Return what is read if it is of a kind, else an empty one: damaged, or not there."""
    with suppress(OSError, ValueError, ConfigError):
        if isinstance(value := read(path), kind):
            return value
    return kind()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _node(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def varied(
    values: Sequence[Any], key: str = "", deep: bool = False
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the keys at which nested dicts differ, with the value of each; "-" where there is none.

    A node whose `_target_` differs is one difference, unless `deep`: its keys mean other things.
    """
    if len({repr(value) for value in values}) < 2:  # by its text: 1 is not true
        return
    nodes = [value for value in values if isinstance(value, dict)]
    alike = len({repr(node.get(_TARGET)) for node in nodes}) == 1
    if len(nodes) < len(values) or not (deep or alike):
        yield key, values
        return
    for name in dict.fromkeys(name for node in nodes for name in node):
        yield from varied([node.get(name, _ABSENT) for node in nodes], join(key, name), deep)


def _shown(value: Any) -> str:
    text = str(value.get(_TARGET, value)) if isinstance(value, dict) else word(value)
    return shortened(text)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else shortened(str(value))


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else str(timedelta(seconds=round(seconds)))


def _print(rows: Sequence[Sequence[str]]) -> None:
    # Off a terminal a row is one line, however long.
    print("\n".join(aligned(rows, columns_of(sys.stdout) or _UNLIMITED)))
