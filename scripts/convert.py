"""Put a sharded checkpoint together: `python -m regimen.scripts.convert CHECKPOINT TARGET`.

TARGET becomes a plain checkpoint: a single file, which needs no folder of shards beside it.
"""

from collections.abc import Sequence
from pathlib import Path

from regimen.scripts.commands import main


def convert(argv: Sequence[str]) -> int:
    """Run `regimen convert`, return its exit code. Raises CheckpointError, StorageError."""
    from regimen.conf.errors import one_line
    from regimen.scripts.cli.arguments import command_parser
    from regimen.scripts.cli.console import print_banner

    parser = command_parser("regimen convert", __doc__)
    parser.add_argument("checkpoint", type=Path, help="a file such as checkpoints/last.pt")
    parser.add_argument("target", type=Path, help="the file to write")
    arguments = parser.parse_intermixed_args(argv)
    print_banner()
    from regimen.trainer.checkpoints.archive import write_archive
    from regimen.trainer.checkpoints.reader import read_whole
    from regimen.trainer.errors import CheckpointError

    target: Path = arguments.target
    if target.exists():  # in a run's folder the index of checkpoints would not know the new file
        raise CheckpointError(f"{target} exists: choose another name")
    write_archive(target, read_whole(arguments.checkpoint))
    print(f"written to {one_line(target)}")
    return 0


if __name__ == "__main__":
    main("convert")
