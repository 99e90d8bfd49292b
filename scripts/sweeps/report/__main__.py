"""`regimen report DIR`: what a sweep found, as a table, pictures and a page."""

import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size

from scripts.cli.arguments import command_parser, parse_command
from scripts.cli.console import Command
from scripts.sweeps.leaderboard import SHOWN
from scripts.sweeps.report.gather import gather
from scripts.sweeps.report.page import summary
from scripts.sweeps.report.tables import for_terminal
from scripts.sweeps.report.write import FOLDER, write
from trainer.files.layout import aligned
from trainer.files.log_format import on_one_line

_DESCRIPTION = """\
Show the jobs of a sweep, a grid or a search that has ended or not, and write into its folder:

  report.html             one page with all of it, which needs no server
  report/leaderboard.csv  all jobs, the best first; also as Markdown (.md)
  report/*.png            the objective against each value, learning curves, parallel coordinates

Pictures take matplotlib, and how much each key matters takes optuna; without them it says so.
"""


def main() -> None:
    """Run the command line and leave with its exit code."""
    with Command() as command:
        command.code = report(sys.argv[1:])


def report(argv: Sequence[str]) -> int:
    """Do what a command line asks for. Raises ConfigError, StorageError."""
    parser = command_parser("regimen report", _DESCRIPTION)
    parser.add_argument("folder", type=Path, metavar="DIR", help="of the sweep")
    parser.add_argument("--quiet", "-q", action="store_true", help="only say where the page is")
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    found = gather(arguments.folder)
    path, notes = write(found)
    if not arguments.quiet:
        print(on_one_line(summary(found)))
        rows = for_terminal(found, found.jobs[:SHOWN])
        for line in aligned(rows, get_terminal_size().columns, last=2):
            print(line)
        if len(found.jobs) > SHOWN:
            print(f"and {len(found.jobs) - SHOWN} more jobs in {FOLDER}/leaderboard.csv")
        for job in found.jobs:
            if job.outcome.failed:
                number, state = job.outcome.number, job.outcome.state
                print(on_one_line(f"job {number} {state}: {job.outcome.reason}"))
        for note in notes:
            print(on_one_line(note))
    print(on_one_line(f"report: {path}"))
    return 0


if __name__ == "__main__":
    main()
