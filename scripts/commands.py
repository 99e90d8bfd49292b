"""`regimen COMMAND ...`: every command under one name."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

# Each command, its function (from its arguments to its exit code), and its purpose. A module is
# imported when its command is called.
_TABLE = """
train      train:train        train a model, sweep (-m), or show the plan (dry_run=true)
evaluate   evaluate:evaluate  test a run's checkpoint again
predict    predict:predict    a trained run's answers for files, as a table
export     export:export      a trained model as a file for other programs
quantize   export:quantize    a trained model with 8-bit integers: smaller, faster
demo       demo:demo          a page that shows what a trained model answers
ls         catalog:ls         the groups of configs, their choices, what each is for
cp         catalog:cp         copy a config, to change the copy
new        catalog:new        a small project of your own that trains at once
runs       list_runs:runs     a table of runs; also `runs diff A B`
doctor     doctor:doctor      whether this machine can train, and what would cure it
schema     schema:schema      the JSON schema by which editors complete and check a config
completion help:completion    what TAB completes, for bash, zsh and fish
convert    convert:convert    put a sharded checkpoint together into one file
"""
_ROWS = (line.split(maxsplit=2) for line in _TABLE.strip().splitlines())
COMMANDS = {name: (function, purpose) for name, function, purpose in _ROWS}


def main(*words: str) -> None:
    """Run the command line and exit with its code; `words` come before what was typed."""
    # Before all imports, which take a while.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_early)
    from regimen.scripts.cli.console import run_and_exit

    run_and_exit(regimen, [*words, *sys.argv[1:]])


def _leave_early(number: int, frame: FrameType | None) -> None:
    # Not by an exception, which would end in a traceback from within an import.
    name = signal.Signals(number).name
    os.write(2, f"error: stopped by {name}: there was nothing to save\n".encode())
    os._exit(128 + number)


def regimen(argv: Sequence[str]) -> int:
    """Run the command `argv[0]` and return its exit code; without one print the help."""
    word = argv[0] if argv else "--help"
    if word in ("--help", "-h", "help"):
        print("Train PyTorch models from YAML.\n")
        width = max(map(len, COMMANDS))
        for name, (_, purpose) in COMMANDS.items():
            print(f"  regimen {name:<{width}}  {purpose}")
        print("\nEach takes --help. `train`, `evaluate` and `predict` are commands of their own.")
        return 0
    if word not in COMMANDS:
        from regimen.conf.errors import ConfigError, did_you_mean

        hint = did_you_mean(word, COMMANDS) or f"commands: {', '.join(COMMANDS)}"
        raise ConfigError("", f"regimen has no command {word!r}", hint)
    module, _, function = COMMANDS[word][0].partition(":")
    run = getattr(importlib.import_module(f"regimen.scripts.{module}"), function)
    return int(run(argv[1:]))


if __name__ == "__main__":
    main()
