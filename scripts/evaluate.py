"""`evaluate run=RUN_DIR [checkpoint=best]`: test a finished run again."""

import sys

from scripts.cli.shadow import refuse_shadows


def main() -> None:
    """Run the command line and leave with its exit code."""
    refuse_shadows()  # before anything of ours could be imported from where another package stands
    from scripts.cli.console import Command
    from scripts.evaluating import evaluate

    with Command() as command:
        command.code = evaluate(sys.argv[1:])


if __name__ == "__main__":
    main()
