"""Put a sharded checkpoint together: `python -m scripts.convert CHECKPOINT TARGET`.

TARGET becomes a plain checkpoint: a single file, which needs no folder of shards beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    """Run the command line and leave with its exit code."""
    from scripts.cli.console import Command, log_to_stderr
    from scripts.cli.first_line import greet

    arguments = _parser().parse_args()
    greet("cpu")
    log_to_stderr(verbose=True)
    with Command() as command:
        command.code = convert(arguments.checkpoint, arguments.target)


def convert(source: Path, target: Path) -> int:
    """Write the checkpoint `source`, whole, to the new file `target`.

    Raises CheckpointError, StorageError.
    """
    from trainer.checkpoints.reader import read_whole
    from trainer.checkpoints.store import write_checkpoint
    from trainer.errors import CheckpointError
    from trainer.files.log_format import on_one_line

    if target.exists():  # in a run's folder it would be a file that the index does not know
        raise CheckpointError(f"{target} exists: choose another name")
    write_checkpoint(target, read_whole(source))
    print(f"written to {on_one_line(target)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="a file such as checkpoints/last.pt")
    parser.add_argument("target", type=Path, help="the file to write")
    return parser


if __name__ == "__main__":
    main()
