"""`evaluate run=RUN_DIR [checkpoint=best]`: test a finished run again."""

import re
from collections.abc import Sequence
from pathlib import Path

from regimen.scripts import commands


def main() -> None:
    """Run the command line and leave with its exit code."""
    commands.main("evaluate")


def evaluate(argv: Sequence[str]) -> int:
    """Compute the metrics of one split with one checkpoint, print them and keep them."""
    from regimen.scripts.cli.keys import Evaluation, read_keys

    keys, arguments = read_keys(Evaluation, argv)
    from regimen.conf.check import parse
    from regimen.conf.errors import one_line
    from regimen.scripts.cli.console import importing
    from regimen.scripts.composition.compose import compose  # it imports Hydra

    _refuse_processes(arguments.overrides)
    composed = compose(arguments, trains=False)
    with importing():
        from regimen.trainer.assembly.check import check_targets
        from regimen.trainer.files.atomic import write_json

        if keys.artefact is not None:
            from regimen.trainer.export.artefact import evaluate_artefact
            from regimen.trainer.inference.predictor import classes_of
        else:
            from regimen.trainer.inference.run import evaluate_run

    with composed.locating():
        config, run_dir = parse(composed.config), Path(keys.run)
        check_targets(config)
        if keys.artefact is not None:
            tested, file = {"artefact": keys.artefact}, Path(keys.artefact)
            classes = classes_of(run_dir)
            split, metrics = evaluate_artefact(config, file, keys.split, keys.allow_code, classes)
        else:
            tested = {"checkpoint": keys.checkpoint}
            split, metrics = evaluate_run(config, run_dir, keys.checkpoint, keys.split)
    for name, value in metrics.items():  # first: the directory may be another's, read-only
        print(f"{one_line(name):<20} {value:.4f}")
    result = {**tested, "split": split, **metrics}
    write_json(run_dir / "evaluation.json", result)
    print(f"written to {one_line(run_dir / 'evaluation.json')}")
    return 0


def _refuse_processes(overrides: Sequence[str]) -> None:
    """Raise ConfigError for overrides that ask for several processes: a test has one."""
    from regimen.conf.errors import ConfigError
    from regimen.conf.fields import declared
    from regimen.conf.schema_trainer import StrategyConfig
    from regimen.scripts.cli.arguments import key_of

    several = {*declared(StrategyConfig)["backend"].strategies}  # that start processes
    asking = []
    for text in overrides:
        key, value = key_of(text), text.partition("=")[2]
        named = key in ("strategy", "strategy.name") and several & {*re.findall(r"\w+", value)}
        counted = key == "strategy.devices" and re.fullmatch(r"(?!1$)\d+|\[.*,.*\]", value)
        # With dp one process has several devices.
        if named or (counted and "strategy.name=dp" not in overrides):
            asking.append(text)
    if asking:
        message = f"{' '.join(asking)}: evaluate works in one process, however a run was trained"
        hint = "leave it out; strategy.name=dp uses several GPUs"
        raise ConfigError("strategy", message, hint)


if __name__ == "__main__":
    main()
