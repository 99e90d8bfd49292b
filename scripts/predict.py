"""`predict run=RUN_DIR source=DIR`: a trained model's answers for files, as a table."""

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from regimen.scripts import commands


def main() -> None:
    """Run the command line and leave with its exit code."""
    commands.main("predict")


def predict(argv: Sequence[str]) -> int:
    """Run `predict`, return its exit code; torch is imported once the keys are checked."""
    from regimen.conf.errors import Problem, raise_problems
    from regimen.conf.schema_trainer import StrategyConfig
    from regimen.conf.yaml_file import format_scalar
    from regimen.scripts.cli.arguments import key_of
    from regimen.scripts.cli.keys import Prediction, read_keys

    # The error of a broken file names the key of the configuration, data.on_error.
    words = [re.sub("^data.on_error=", "on_error=", word) for word in argv]
    keys, arguments = read_keys(Prediction, words)
    problems = []
    for text in arguments.overrides:
        key, _, value = text.lstrip("+").partition("=")
        if key == "strategy.name" and value not in ("single", "ddp"):
            problems.append(
                Problem(
                    key,
                    f"{value!r}: predict needs the whole model on each device (single, ddp); the "
                    "checkpoint of a run of any strategy, sharded ones too, is put together for it",
                    "leave it out, or strategy.name=ddp",
                )
            )
    raise_problems(problems)
    from regimen.scripts.composition.compose import compose  # it imports Hydra
    from regimen.scripts.runs.launch import runner_for

    # However the run was trained (in shards, on many devices), one device predicts, unless an
    # override says otherwise. Only the kind of the device stays.
    defaults = asdict(StrategyConfig())
    del defaults["accelerator"], defaults["extra"]
    if any(key_of(text) == "strategy._target_" for text in arguments.overrides):
        defaults = {}  # a class of the user's has other keys
    overrides = [f"strategy.{key}={format_scalar(value)}" for key, value in defaults.items()]
    overrides += arguments.overrides
    if keys.device is not None:
        accelerator, _, number = keys.device.partition(":")
        devices = f"[{number}]" if number else "auto"
        overrides += [f"strategy.accelerator={accelerator}", f"strategy.devices={devices}"]
    composed = compose(replace(arguments, overrides=tuple(overrides)), trains=False)
    files = [line.rstrip("\n") for line in sys.stdin] if keys.source == "-" else []
    request = composed.request(argv, prediction=asdict(keys), files=files)
    return runner_for(request)(request)


if __name__ == "__main__":
    main()
