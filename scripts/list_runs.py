"""`regimen runs [DIR]`: what was trained; also `runs diff A B` and `runs clean [DIR]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.cli.arguments import command_parser, parse_command
from scripts.history.entry import RunEntry, read_run, runs_in
from scripts.history.removal import removable, remove
from scripts.history.show import compared, comparison, differing, rows_of, table_of
from trainer.files.layout import aligned, columns_of
from trainer.files.log_format import on_one_line
from trainer.summary.text import natural_width, size

_UNLIMITED = 1_000_000  # characters
_DIFF = "Show two runs side by side: where their configurations differ, and their metrics."
_CLEAN = """\
Remove runs that did not end well: failed, killed, preempted, damaged. What would go is said first.

The best run of each name stays, and one that is running. With --keep N, finished runs go as well,
all but the N best of each name.
"""


def runs(argv: Sequence[str]) -> int:
    """Do what a command line asks for. Raises ConfigError, RunDirectoryError, StorageError."""
    commands = {"diff": _diff, "clean": _clean}
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])
    return _list(argv)


def _list(argv: Sequence[str]) -> int:
    parser = command_parser("regimen runs", __doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), metavar="DIR")
    parser.add_argument("--json", action="store_true", help="for machines: a list of objects")
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    found = runs_in(arguments.folder)
    if arguments.json:
        print(json.dumps(differing(found), indent=2, default=str))
    elif not found:
        print(f"no runs in {on_one_line(arguments.folder)}")
    else:
        _print(rows_of(found))
    return 0


def _diff(argv: Sequence[str]) -> int:
    parser = command_parser("regimen runs diff", _DIFF)
    parser.add_argument("left", type=Path, metavar="A")
    parser.add_argument("right", type=Path, metavar="B")
    parser.add_argument("--json", action="store_true", help="for machines: pairs by name")
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    left, right = read_run(arguments.left), read_run(arguments.right)
    if arguments.json:
        print(json.dumps(compared(left, right), indent=2, default=str))
    else:
        names = str(left.path), str(right.path)
        columns = columns_of(sys.stdout)
        if columns is not None and sum(map(len, names)) > columns // 2:
            for letter, name in zip("AB", names, strict=True):
                print(f"{letter}  {on_one_line(name)}")
            names = "A", "B"
        _print(comparison(left, right, names))
    return 0


def _clean(argv: Sequence[str]) -> int:
    parser = command_parser("regimen runs clean", _CLEAN)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), metavar="DIR")
    parser.add_argument("--keep", type=_positive, metavar="N", help="of each name, the N best")
    parser.add_argument("--yes", "-y", action="store_true", help="remove without asking")
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    chosen = removable(runs_in(arguments.folder), arguments.keep)
    if not chosen:
        print(f"nothing to remove in {on_one_line(arguments.folder)}")
        return 0
    for run in chosen:
        print(f"{run.state:<10} {size(run.size):>10}  {on_one_line(run.path)}")
    whole = size(sum(run.size for run in chosen))
    if not (arguments.yes or _confirmed(f"remove {_counted(chosen)} ({whole})? [y/N] ")):
        print("nothing was removed (--yes removes without asking)")
        return 0
    return _remove(chosen)


def _remove(chosen: Sequence[RunEntry]) -> int:
    left = [run for run in chosen if not remove(run)]
    for run in left:
        print(f"left alone, a process has begun to use it: {on_one_line(run.path)}")
    print(f"removed {_counted(chosen[len(left) :])}")
    return 0


def _counted(runs: Sequence[RunEntry]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def _confirmed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:  # nobody is there to answer
        print()
        return False


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs, 1 or more")
    return int(text)


def _print(rows: Sequence[Sequence[str]]) -> None:
    """Print a table: without its frame where a terminal is too narrow for it.

    Off a terminal a row is one line, however long, without a frame.
    """
    # rich is slow to import, and --json and --help do not need it
    from rich.console import Console

    table, columns = table_of(rows), columns_of(sys.stdout)
    if columns is None:
        table.box, table.pad_edge = None, False
        whole = Console(width=_UNLIMITED)
        whole.print(table, width=whole.measure(table).maximum, crop=False)
    elif natural_width(table) <= columns:
        Console().print(table)
    else:
        print("\n".join(aligned([[on_one_line(cell) for cell in row] for row in rows], columns)))
