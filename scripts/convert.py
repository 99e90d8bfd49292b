"""Put a sharded checkpoint together: `python -m scripts.convert CHECKPOINT TARGET`.

TARGET becomes a plain checkpoint: a single file, which needs no folder of shards beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.cli.arguments import command_parser, parse_command
from scripts.cli.console import Command, greet, log_to_stderr


def main() -> None:
    """Run the command line and leave with its exit code."""
    with Command() as context:
        context.code = command(sys.argv[1:])


def command(argv: Sequence[str]) -> int:
    """Do what a command line asks for."""
    parser = command_parser("regimen convert", __doc__)
    parser.add_argument("checkpoint", type=Path, help="a file such as checkpoints/last.pt")
    parser.add_argument("target", type=Path, help="the file to write")
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    greet("cpu")
    log_to_stderr(verbose=True)
    return convert(arguments.checkpoint, arguments.target)


def convert(source: Path, target: Path) -> int:
    """Write the checkpoint `source`, whole, to the new file `target`.

    Raises CheckpointError, StorageError.
    """
    from trainer.checkpoints.archive import write_archive
    from trainer.checkpoints.reader import read_whole
    from trainer.errors import CheckpointError
    from trainer.files.layout import on_one_line

    if target.exists():  # in a run's folder it would be a file that the index does not know
        raise CheckpointError(f"{target} exists: choose another name")
    write_archive(target, read_whole(source))
    print(f"written to {on_one_line(target)}")
    return 0


if __name__ == "__main__":
    main()
