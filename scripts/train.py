"""`train experiment=resnet18 [key=value ...]`: train, or with -m sweep."""

import sys

from scripts.cli.shadow import refuse_shadows


def main() -> None:
    """Run the command line and leave with its exit code."""
    refuse_shadows()  # before anything of ours could be imported from where another package stands
    from scripts.cli.console import Command
    from scripts.training import train

    with Command() as command:
        command.code = train(sys.argv[1:])


if __name__ == "__main__":
    main()
