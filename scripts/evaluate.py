"""`evaluate run=RUN_DIR [checkpoint=best]`: test a finished run again."""

import re
from collections.abc import Sequence
from pathlib import Path

from regimen.scripts import commands


def main() -> None:
    """Run the command line and leave with its exit code."""
    commands.main("evaluate")


def evaluate(argv: Sequence[str]) -> int:
    """Run `evaluate`, return its exit code: print the metrics of one split and write them."""
    from regimen.scripts.cli.keys import Evaluation, read_keys

    keys, arguments = read_keys(Evaluation, argv)
    from regimen.conf.check import parse
    from regimen.conf.errors import one_line
    from regimen.scripts.cli.console import importing
    from regimen.scripts.composition.compose import compose  # it imports Hydra

    _refuse_processes(arguments.overrides)
    composed = compose(arguments, trains=False)
    with importing():
        from regimen.trainer.files.atomic import write_json
        from regimen.trainer.inference.predictor import classes_of, with_attributes_of
        from regimen.trainer.inference.run import check_run, evaluate_run

        if keys.artefact is not None:
            from regimen.trainer.export.artefact import evaluate_artefact

    with composed.locating():
        config = parse(composed.config)
        run_dir = Path(keys.run)
        config = with_attributes_of(run_dir, config)
        check_run(config, run_dir, keys.checkpoint)
        if keys.artefact is not None:
            tested = {"artefact": keys.artefact}
            split, metrics = evaluate_artefact(
                config, Path(keys.artefact), keys.split, keys.allow_code, classes_of(run_dir)
            )
        else:
            tested = {"checkpoint": keys.checkpoint}
            split, metrics = evaluate_run(config, run_dir, keys.checkpoint, keys.split)
    # Printed before they are written: the directory may be somebody else's, and read-only.
    for name, value in metrics.items():
        print(f"{one_line(name):<20} {value:.4f}")
    result = {**tested, "split": split, **metrics}
    write_json(run_dir / "evaluation.json", result)
    print(f"written to {one_line(run_dir / 'evaluation.json')}")
    return 0


def _refuse_processes(overrides: Sequence[str]) -> None:
    """Raise ConfigError for overrides that request several processes: `evaluate` has one."""
    from regimen.conf.errors import ConfigError

    uses_dp = "strategy.name=dp" in overrides
    refused = [text for text in overrides if _requests_processes(text, uses_dp)]
    if refused:
        raise ConfigError(
            "strategy",
            f"{' '.join(refused)}: evaluate works in one process, however a run was trained",
            "leave it out; strategy.name=dp uses several GPUs",
        )


def _requests_processes(override: str, uses_dp: bool) -> bool:
    from regimen.conf.fields import declared
    from regimen.conf.schema_trainer import STRATEGIES, StrategyConfig
    from regimen.scripts.cli.arguments import key_of

    key = key_of(override)
    value = override.partition("=")[2]
    # Those that have processes have a backend for them.
    names = declared(StrategyConfig)["backend"].strategies
    if key == "strategy._target_":
        return value in [STRATEGIES[name] for name in names]
    if key in ("strategy", "strategy.name"):
        return not {*names}.isdisjoint(re.findall(r"\w+", value))
    # With dp one process has several devices.
    if key == "strategy.devices" and not uses_dp:
        # A number other than 1, or a list of several.
        return re.fullmatch(r"(?!1$)\d+|\[.*,.*\]", value) is not None
    return False


if __name__ == "__main__":
    main()
