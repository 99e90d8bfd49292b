"""`regimen COMMAND ...`: every command under one name."""

import importlib
import sys

from scripts.cli.shadow import refuse_shadows

# The function of each command, from its arguments to its exit code, and what the command is for.
# No module is imported before its command is called.
COMMANDS = {
    "train": ("scripts.train:train", "train a model, sweep (-m), or show the plan (dry_run=true)"),
    "evaluate": ("scripts.evaluate:evaluate", "test a run's checkpoint again"),
    "predict": ("scripts.predict:predict", "a trained run's answers for files, as a table"),
    "export": ("scripts.export:export", "a trained model as a file for other programs"),
    "quantize": (
        "scripts.quantize:quantize",
        "a trained model with 8-bit integers: smaller, faster",
    ),
    "demo": ("scripts.demo:demo", "a page that shows what a trained model answers"),
    "ls": ("scripts.ls:ls", "the groups of configs, their choices, what each is for"),
    "cp": ("scripts.new:cp", "copy a config, to change the copy"),
    "new": ("scripts.new:new", "a small project of your own that trains at once"),
    "runs": ("scripts.list_runs:runs", "a table of runs; also `runs diff A B`"),
    "doctor": ("scripts.doctor:doctor", "whether this machine can train, and what would cure it"),
    "schema": (
        "scripts.schema:schema",
        "the JSON schema by which editors complete and check a config",
    ),
    "completion": ("scripts.completion:completion", "what TAB completes, for bash, zsh and fish"),
    "convert": ("scripts.convert:command", "put a sharded checkpoint together into one file"),
}


def main() -> None:
    """Run the command that the first word names and leave with its exit code."""
    refuse_shadows()  # before anything of ours could be imported from where another package stands
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if word in ("--help", "-h", "help"):
        from scripts.cli.output import outlive_readers

        outlive_readers()
        print(_help(), flush=True)
        sys.exit(0)
    if word not in COMMANDS:
        print(f"error: regimen has no command {word!r}: {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    from scripts.cli.console import Command

    with Command() as command:
        module, _, function = COMMANDS[word][0].partition(":")
        command.code = getattr(importlib.import_module(module), function)(sys.argv[2:])


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  regimen {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "Train PyTorch models from YAML.",
            "",
            *lines,
            "",
            "Each takes --help. `train`, `evaluate` and `predict` are commands of their own, too.",
        ]
    )


if __name__ == "__main__":
    main()
