"""`predict run=RUN_DIR source=DIR`: a trained model's answers for files, as a table."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from regimen.scripts import commands


def main() -> None:
    """Run the command line and leave with its exit code."""
    commands.main("predict")


def predict(argv: Sequence[str]) -> int:
    """Do what a command line asks for; torch is imported once its keys are sound."""
    from regimen.conf.errors import Problem, raise_problems
    from regimen.conf.schema_trainer import StrategyConfig
    from regimen.conf.yaml_file import word
    from regimen.scripts.cli.keys import Prediction, read_keys

    # data.on_error: as the error of a broken file calls it
    words = [word.replace("data.on_error=", "on_error=") for word in argv]
    keys, arguments = read_keys(Prediction, words)
    problem = (
        "predict needs the whole model on each device (single, ddp); the checkpoint of a run of "
        "any strategy, sharded ones too, is put together for it"
    )
    given = [text.lstrip("+").partition("=") for text in arguments.overrides]
    raise_problems(
        Problem(key, f"{value!r}: {problem}", "leave it out, or strategy.name=ddp")
        for key, _, value in given
        if key == "strategy.name" and value not in ("single", "ddp")
    )
    from regimen.scripts.composition.compose import compose  # it imports Hydra
    from regimen.scripts.runs.launch import runner_for

    # However a run was trained (in shards, on many devices), it is asked on one; who wants more
    # says so. The kind of its device stays.
    plain = asdict(StrategyConfig())
    del plain["accelerator"], plain["extra"]
    overrides = [f"strategy.{key}={word(value)}" for key, value in plain.items()]
    overrides += arguments.overrides
    if keys.device is not None:
        kind, _, place = keys.device.partition(":")
        devices = f"[{place}]" if place else "auto"
        overrides += [f"strategy.accelerator={kind}", f"strategy.devices={devices}"]
    composed = compose(replace(arguments, overrides=tuple(overrides)), trains=False)
    files = [line.rstrip("\n") for line in sys.stdin] if keys.source == "-" else []
    request = composed.request(argv, prediction=asdict(keys), files=files)
    return runner_for(request)(request)


if __name__ == "__main__":
    main()
