"""`predict run=RUN_DIR source=DIR`: a trained model's answers for files, as a table."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from scripts.cli.shadow import refuse_shadows


def main() -> None:
    """Run the command line and leave with its exit code."""
    refuse_shadows()  # before anything of ours could be imported from where another package stands
    from scripts.cli.console import Command

    with Command() as command:
        command.code = predict(sys.argv[1:])


def predict(argv: Sequence[str]) -> int:
    """Do what a command line asks for; torch is imported once its keys are sound."""
    from scripts.cli.arguments import Request, of_run, parse_or_help
    from scripts.cli.console import asked_device, greet, importing, log_to_stderr
    from scripts.prediction.options import HELP, place_of, take_apart

    if (arguments := parse_or_help(argv, HELP)) is None:
        return 0
    greet(asked_device(arguments.overrides, "device"))
    from scripts.composition.compose import compose  # after the first line: it imports Hydra

    log_to_stderr(os.environ.get("RANK", "0") == "0")
    options, overrides = take_apart(arguments.overrides)
    composed = compose(of_run(arguments, options.run, overrides))
    strategy = {**composed.config["strategy"], **place_of(options.device)}
    request = Request(
        {**composed.config, "strategy": strategy},
        composed.overrides,
        {},
        list(argv),
        list(arguments.allow_targets),
        prediction=asdict(options),
        files=[line.rstrip("\n") for line in sys.stdin] if options.source == "-" else [],
    )
    with importing():
        if strategy["name"] == "ddp" and "RANK" not in os.environ:
            from scripts.runs.launch import launch as work
        else:
            from scripts.prediction.work import answer as work
    return work(request)


if __name__ == "__main__":
    main()
