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
from regimen.conf.yaml_file import format_scalar
from regimen.scripts.cli.arguments import RUNS, command_parser
from regimen.trainer.files.atomic import as_json
from regimen.trainer.files.layout import format_table, size, terminal_width
from regimen.trainer.runs.directory import CONFIG, OVERRIDES, link_out
from regimen.trainer.runs.status import (
    CHECKPOINTS,
    MANIFEST,
    TENSORBOARD,
    RunDirectoryError,
    holds_run,
    read_json,
    read_metrics,
    read_run_yaml,
    read_status,
    seconds_of,
)

_TAIL_BYTES = 1 << 16  # of metrics.jsonl; they hold its last line
_UNLIMITED = 1_000_000  # characters
_ABSENT = "-"
_TARGET = "_target_"
_COLUMNS = ("run", "status", "epoch", "best", "duration", "size", "tags", "differs in")


def runs(argv: Sequence[str]) -> int:
    """Run `regimen runs`, return its exit code. Raises ConfigError, RunDirectoryError."""
    if argv and argv[0] == "diff":
        return _diff(argv[1:])
    parser = command_parser("regimen runs", __doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=RUNS, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="for machines: a list of objects")
    arguments = parser.parse_intermixed_args(argv)
    found = _find_runs(arguments.folder)
    _add_differences(found)
    for run in found:
        del run["config"]
    if arguments.json:
        print(as_json(found, indent=2, default=str))
    elif not found:
        print(f"no runs in {one_line(arguments.folder)}")
    else:
        _print([_COLUMNS, *map(_row, found)])
    return 0


def _find_runs(folder: Path) -> list[dict[str, Any]]:
    """Read all runs below a folder, the oldest first."""
    found = []
    for place, folders, files in os.walk(folder):  # links are not followed
        if MANIFEST in files:
            found.append(read_run(Path(place)))
            folders[:] = [name for name in folders if name not in (CHECKPOINTS, TENSORBOARD)]
    return sorted(found, key=lambda run: (str(run["created"] or ""), run["run"]))


def _add_differences(found: Sequence[dict[str, Any]]) -> None:
    """Compare the configurations of runs that have the same name; fill in `differs`."""
    for name in {run["name"] for run in found}:
        comparable = [run for run in found if run["name"] == name and run["config"]]
        configs = [{**run["config"], "tags": None} for run in comparable]
        for key, values in varied(configs):
            for run, value in zip(comparable, values, strict=True):
                run["differs"][key] = value


def _row(run: dict[str, Any]) -> list[str]:
    """Return the cells of a run in the table."""
    epoch = "" if run["epoch"] is None else str(run["epoch"])
    if epoch and run["max_epochs"]:
        epoch = f"{epoch}/{run['max_epochs']}"
    best = "" if run["metric"] is None else f"{run['metric']} {_format_number(run['best'])}"
    differences = [f"{key}={_format(value)}" for key, value in run["differs"].items()]
    cells = [
        run["run"],
        run["status"],
        epoch,
        best,
        _format_duration(run["seconds"]),
        size(run["bytes"]),
        " ".join(run["tags"]),
        truncated_list(differences),
    ]
    return list(map(shortened, cells))


def _diff(argv: Sequence[str]) -> int:
    """Show two runs side by side: where their configurations differ, and their metrics."""
    parser = command_parser("regimen runs diff", _diff.__doc__)
    parser.add_argument("left", type=Path, metavar="A")
    parser.add_argument("right", type=Path, metavar="B")
    parser.add_argument("--json", action="store_true", help="for machines: pairs by name")
    arguments = parser.parse_intermixed_args(argv)
    paths = (arguments.left, arguments.right)
    both = [read_run(path) for path in paths]
    left_results, right_results = map(_results, paths)
    facts = {key: [run[key] for run in both] for key in ("status", "seconds")}
    config = dict(varied([run["config"] for run in both], deep=True))
    metrics = {
        name: [left_results.get(name), right_results.get(name)]
        for name in left_results | right_results
    }
    if arguments.json:
        pairs = {"run": facts, "config": config, "metrics": metrics}
        print(as_json(pairs, indent=2, default=str))
        return 0
    rows = [["", *map(str, paths)], ["status", *facts["status"]]]
    rows.append(["duration", *map(_format_duration, facts["seconds"])])
    rows += [[key, *map(_format, values)] for key, values in config.items()]
    rows += [[name, *map(_format_number, values)] for name, values in metrics.items()]
    _print(rows)
    return 0


def _results(path: Path) -> dict[str, Any]:
    """Return the results of a run; if it has not ended well, the metrics that it logged last."""
    logged = dict[str, Any]()
    for line in read_metrics(path):
        logged |= {name: value for name, value in line.items() if "/" in name}
    return _dict_or_empty(_read(read_status, path).get("results")) or logged


def read_run(path: Path) -> dict[str, Any]:
    """Read one run, as --json shows it, and its `config`; unreadable entries are None or empty.

    Raises RunDirectoryError if `path` holds no run.
    """
    if not holds_run(path):
        raise RunDirectoryError(f"{path} holds no run: it has no {MANIFEST}")
    status = dict[str, Any]()
    manifest = dict[str, Any]()
    config = dict[str, Any]()
    last = dict[str, Any]()
    overrides = list[Any]()
    if link_out(path) is None:  # a link could show files of somebody else
        status = _read(read_status, path)
        manifest = _read(read_json, path / MANIFEST)
        config = _read(read_run_yaml, path / CONFIG)
        for line in read_metrics(path, _TAIL_BYTES):
            last = line
        overrides = _read(read_run_yaml, path / OVERRIDES, list)
    best = _dict_or_empty(status.get("best"))
    tags = config.get("tags")
    return {
        "run": str(path),
        "name": str(config.get("name", path.parent.name)),
        "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        "status": str(status.get("state") or "damaged"),
        "created": manifest.get("created"),
        "epoch": last.get("epoch"),
        "step": last.get("step"),
        "max_epochs": _dict_or_empty(config.get("trainer")).get("max_epochs"),
        "metric": best.get("metric"),
        "best": best.get("value"),
        "seconds": seconds_of(status) if status else None,
        "bytes": _bytes_of(path),
        "sweep": str(path.parent) if (path.parent / "leaderboard.csv").exists() else None,
        "overrides": overrides,
        "differs": {},
        "config": config,
    }


def _bytes_of(path: Path) -> int:
    """Return the size of all files; one with several names (hard links) counts once."""
    sizes = {}
    for place, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):  # a running run replaced it meanwhile
                facts = os.lstat(Path(place, name))
                sizes[facts.st_dev, facts.st_ino] = facts.st_size
    return sum(sizes.values())


def _read(read: Callable[[Path], Any], path: Path, kind: type = dict) -> Any:
    """Return `read(path)`, or an empty `kind()` if the file is missing, damaged or another type."""
    with suppress(OSError, ValueError, ConfigError):
        value = read(path)
        if isinstance(value, kind):
            return value
    return kind()


def _dict_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def varied(
    values: Sequence[Any], key: str = "", deep: bool = False
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the keys at which nested dicts differ, with the value of each; "-" where it is absent.

    A node whose `_target_` differs is one difference, unless `deep`: its keys mean other things.
    """
    if len({repr(value) for value in values}) < 2:  # by its text: 1 is not true
        return
    nodes = [value for value in values if isinstance(value, dict)]
    same_target = len({repr(node.get(_TARGET)) for node in nodes}) == 1
    if len(nodes) < len(values) or not (deep or same_target):
        yield key, values
        return
    for name in dict.fromkeys(name for node in nodes for name in node):
        children = [node.get(name, _ABSENT) for node in nodes]
        yield from varied(children, join(key, name), deep)


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return shortened(str(value.get(_TARGET, value)))
    return shortened(format_scalar(value))


def _format_number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return _ABSENT if value is None else shortened(str(value))


def _format_duration(seconds: float | None) -> str:
    return "" if seconds is None else str(timedelta(seconds=round(seconds)))


def _print(rows: Sequence[Sequence[str]]) -> None:
    # Off a terminal a row is one line, however long.
    print("\n".join(format_table(rows, terminal_width(sys.stdout) or _UNLIMITED)))
