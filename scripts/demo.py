"""`regimen demo run=RUN_DIR`: a page on this machine that shows what a trained model answers."""

import importlib.util
from collections.abc import Iterator, Sequence

from conf.errors import Problem, raise_problems
from scripts.cli.arguments import parse_or_help
from scripts.cli.console import importing, log_to_stderr
from scripts.cli.first_line import asked_device, greet
from scripts.cli.keys import Take, one_of, only_keys, whole

_HELP = """\
Show a trained model: a page where one drops a picture, draws a digit, or types a row of a table or
a prompt, and a JSON address.

  regimen demo run=RUN_DIR [key=value ...]

  port           8000; 0 takes one that is free
  host           127.0.0.1. Any other than this machine's own, such as 0.0.0.0, asks for the token
                 that is printed with the address
  checkpoint     best (default), last, or a path
  top_k          5; how many of the likeliest classes are shown
  device         auto (default), cpu, cuda, mps

  curl --data-binary @picture.png http://127.0.0.1:8000/predict
  curl --data-binary '{"prompt": "The "}' http://127.0.0.1:8000/predict
"""


def demo(argv: Sequence[str]) -> int:
    """Do what a command line asks for; torch is imported once its keys are sound."""
    if (arguments := parse_or_help(argv, _HELP)) is None:
        return 0
    greet(asked_device(arguments.overrides, "device"))
    log_to_stderr(verbose=True)
    keys: dict[str, Take] = {
        "run": str,
        "port": whole(0, 65535),
        "host": str,
        "checkpoint": str,
        "top_k": whole(),
        "device": one_of("auto", "cpu", "cuda", "mps"),
    }
    required = {"run": "regimen demo run=RUN_DIR"}
    values, problems = only_keys("demo", arguments.overrides, keys, required)
    raise_problems([*problems, *_missing_packages()])
    with importing():
        from scripts.serving.server import serve
        from trainer.inference.run import load_run

    run = load_run(values["run"], values.get("device", "auto"), arguments.allow_targets)
    return serve(
        run,
        values.get("checkpoint", "best"),
        values.get("top_k", 5),
        values.get("host", "127.0.0.1"),
        values.get("port", 8000),
    )


def _missing_packages() -> Iterator[Problem]:
    if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("starlette") is None:
        hint = "install the extra: pip install -e '.[demo]'"
        yield Problem("", "demo needs starlette and uvicorn", hint)
