"""`predict run=RUN_DIR source=DIR`: a trained model's answers for files, as a table."""

import os
import sys
from collections.abc import Sequence

from scripts.cli.shadow import refuse_shadows


def main() -> None:
    """Run the command line and leave with its exit code."""
    refuse_shadows()  # before anything of ours could be imported from where another package stands
    from scripts.cli.console import Command

    with Command() as command:
        command.code = predict(sys.argv[1:])


def predict(argv: Sequence[str]) -> int:
    """Do what a command line asks for; torch is imported once its keys are sound."""
    from scripts.cli.arguments import parse_or_help
    from scripts.cli.console import importing, log_to_stderr
    from scripts.cli.first_line import asked_device, greet
    from scripts.cli.keys import of_run
    from scripts.prediction.command_line import HELP, take_apart

    if (arguments := parse_or_help(argv, HELP)) is None:
        return 0
    by_torch = not _names_a_file(arguments.overrides)
    if by_torch:
        greet(asked_device(arguments.overrides, "device"))
    from scripts.cli.request import Request  # after the first line: these import Hydra
    from scripts.composition.compose import compose

    log_to_stderr(os.environ.get("RANK", "0") == "0")
    if not by_torch:
        from scripts.prediction.onnx_model import answer_without_torch

        return answer_without_torch(arguments.overrides, _lines("source=-" in arguments.overrides))
    options, overrides = take_apart(arguments)
    composed = compose(of_run(arguments, options.run, overrides))
    strategy = {**composed.config["strategy"], **options.strategy()}
    request = Request(
        {**composed.config, "strategy": strategy},
        composed.overrides,
        {},
        list(argv),
        list(arguments.allow_targets),
        prediction=options.plain(),
        files=_lines(options.source == "-"),
    )
    with importing():
        if strategy["name"] == "ddp" and "RANK" not in os.environ:
            from scripts.launching.launch import launch as work
        else:
            from scripts.prediction.work import answer as work
    return work(request)


def _names_a_file(overrides: Sequence[str]) -> bool:
    """Tell `predict model=FILE.onnx` from an override of a run's network."""
    words = dict(word.partition("=")[::2] for word in overrides)
    return "run" not in words and words.get("model", "").endswith(".onnx")


def _lines(wanted: bool) -> list[str]:
    """Return the file names on standard input, if they are wanted."""
    return [line.rstrip("\n") for line in sys.stdin] if wanted else []


if __name__ == "__main__":
    main()
