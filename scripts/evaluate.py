"""`evaluate run=RUN_DIR [checkpoint=best]`: test a finished run again."""

from collections.abc import Sequence
from dataclasses import asdict

from regimen.scripts import commands

# What chooses a number of processes.
_CHOICES = ("strategy", "strategy.name", "strategy._target_", "strategy.devices")


def main() -> None:
    """Run the command line and leave with its exit code."""
    commands.main("evaluate")


def evaluate(argv: Sequence[str]) -> int:
    """Run `evaluate`, return its exit code: print the metrics of one split and write them."""
    from regimen.scripts.cli.keys import Evaluation, read_keys

    keys, arguments = read_keys(Evaluation, argv)
    from regimen.conf.errors import ConfigError
    from regimen.scripts.cli.arguments import key_of
    from regimen.scripts.cli.console import importing
    from regimen.scripts.composition.compose import compose  # it imports Hydra

    # However a run was trained, one process tests it, unless an override asks for several.
    chosen = [text for text in arguments.overrides if key_of(text) in _CHOICES]
    if chosen and keys.artefact is not None:
        raise ConfigError(
            "artefact",
            f"a file is tested in one process, on the CPU: {' '.join(chosen)} has no effect",
            "leave it out",
        )
    composed = compose(arguments, trains=False)
    request = composed.request(argv, evaluation=asdict(keys))
    if chosen:
        from regimen.scripts.runs.launch import runner_for

        run = runner_for(request)
    else:
        with importing():
            from regimen.scripts.runs.measure import measure as run
    with composed.locating():
        return run(request)


if __name__ == "__main__":
    main()
