"""Put a checkpoint together: `python -m regimen.scripts.convert CHECKPOINT TARGET [--whole]`.

TARGET becomes a plain checkpoint: a single file, which needs no folder of shards beside it. With
--whole it also holds the frozen weights that CHECKPOINT borrows from other files, and needs none.
"""

from collections.abc import Sequence
from pathlib import Path

from regimen.scripts.commands import main


def convert(argv: Sequence[str]) -> int:
    """Run `regimen convert`, return its exit code. Raises CheckpointError, StorageError."""
    from regimen.conf.errors import ConfigError, one_line
    from regimen.scripts.cli.arguments import command_parser
    from regimen.scripts.cli.console import print_banner
    from regimen.scripts.cli.keys import moved_weights

    parser = command_parser("regimen convert", __doc__)
    parser.add_argument("checkpoint", type=Path, help="a file such as checkpoints/last.pt")
    parser.add_argument("target", type=Path, help="the file to write")
    parser.add_argument(
        "moved", nargs="*", help="model.name=DIR: where borrowed weights are now, for --whole"
    )
    parser.add_argument("--whole", action="store_true", help="with the weights that it borrows")
    arguments = parser.parse_intermixed_args(argv)
    print_banner()
    from regimen.trainer.checkpoints.archive import write_archive
    from regimen.trainer.checkpoints.borrowed import KEY
    from regimen.trainer.checkpoints.reader import read_whole
    from regimen.trainer.errors import CheckpointError

    target: Path = arguments.target
    if target.exists():  # in a run's folder the index of checkpoints would not know the new file
        raise CheckpointError(f"{target} exists: choose another name")
    if arguments.moved and not arguments.whole:
        raise ConfigError("", f"{arguments.moved[0]} has no effect without --whole")
    moved = moved_weights(arguments.moved)
    payload = read_whole(arguments.checkpoint)
    if arguments.whole and KEY in payload:
        from regimen.trainer.inference.run import whole

        payload = whole(arguments.checkpoint, payload, moved)
    write_archive(target, payload)
    print(f"written to {one_line(target)}")
    return 0


if __name__ == "__main__":
    main("convert")
