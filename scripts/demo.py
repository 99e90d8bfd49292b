"""`regimen demo run=RUN_DIR`: a page on this machine that shows what a trained model answers."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from scripts.cli.shadow import refuse_shadows

if TYPE_CHECKING:
    from conf.errors import Problem

_HELP = """\
Show a trained model: a page where one drops a picture or draws a digit, and a JSON address.

  regimen demo run=RUN_DIR [key=value ...]

  port           8000; 0 takes one that is free
  host           127.0.0.1. Any other than this machine's own, such as 0.0.0.0, asks for the token
                 that is printed with the address
  checkpoint     best (default), last, or a path
  top_k          5; how many of the likeliest classes are shown
  device         auto (default), cpu, cuda, mps

  curl --data-binary @picture.png http://127.0.0.1:8000/predict
"""
_KEYS = ("run", "port", "host", "checkpoint", "top_k", "device")
_DEVICES = ("auto", "cpu", "cuda", "mps")


def main() -> None:
    """Run the command line and leave with its exit code."""
    refuse_shadows()  # before anything of ours could be imported from where another package stands
    from scripts.cli.console import Command

    with Command() as command:
        command.code = demo(sys.argv[1:])


def demo(argv: Sequence[str]) -> int:
    """Do what a command line asks for; torch is imported once its keys are sound."""
    from scripts.cli.arguments import only_keys, parse_arguments
    from scripts.cli.console import importing, log_to_stderr
    from scripts.cli.first_line import asked_device, greet

    arguments = parse_arguments(argv)
    if arguments.help:
        print(_HELP, end="")
        return 0
    greet(asked_device(arguments.overrides, "device"))
    log_to_stderr(verbose=True)
    usage = "regimen demo run=RUN_DIR"
    values, problems = only_keys("demo", arguments.overrides, _KEYS, usage)
    _check(values, problems)
    with importing():
        from scripts.serving.server import serve
        from trainer.inference.run import load_run

    run = load_run(values["run"], values.get("device", "auto"), arguments.allow_targets)
    return serve(
        run,
        values.get("checkpoint", "best"),
        int(values.get("top_k", 5)),
        values.get("host", "127.0.0.1"),
        int(values.get("port", 8000)),
    )


def _check(values: Mapping[str, str], known: "Sequence[Problem]") -> None:
    """Raise ConfigError with the `known` problems and those of the values."""
    from conf.errors import Problem, raise_problems

    problems = [*known]
    if not _number(values.get("port", "0"), 65535):
        problems.append(Problem("port", f"is {values['port']!r}, not a number from 0 to 65535"))
    if not _number(values.get("top_k", "1"), 999_999) or values.get("top_k") == "0":
        problems.append(Problem("top_k", f"is {values['top_k']!r}, not a number from 1 on"))
    if (device := values.get("device", "auto")) not in _DEVICES:
        problems.append(Problem("device", f"is {device!r}, not one of {', '.join(_DEVICES)}"))
    if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("starlette") is None:
        hint = "install the extra: pip install -e '.[demo]'"
        problems.append(Problem("", "demo needs starlette and uvicorn", hint))
    raise_problems(problems)


def _number(text: str, largest: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 7 and int(text) <= largest


if __name__ == "__main__":
    main()
