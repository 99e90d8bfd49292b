"""`train experiment=resnet18 [key=value ...]`: train, or with -m sweep."""

from collections.abc import Sequence

from regimen.scripts import commands


def main() -> None:
    """Run the command line and leave with its exit code."""
    commands.main("train")


def train(argv: Sequence[str]) -> int:
    """Run `train`, return its exit code; torch is imported once keys and types are checked."""
    from regimen.scripts.cli.arguments import parse_arguments
    from regimen.scripts.cli.console import print_banner

    arguments = parse_arguments(argv)
    if arguments.asks_for_text:
        from regimen.scripts.help import answer

        answer(arguments)
        return 0
    print_banner()
    from regimen.scripts.composition.compose import compose  # it imports Hydra
    from regimen.scripts.composition.overrides import refuse_untyped

    if arguments.multirun:
        from regimen.scripts.sweeps.grid import searches, sweep

        if searches(arguments):
            from regimen.scripts.sweeps.search import search

            return search(arguments)
        return sweep(arguments)
    composed = compose(arguments)
    trial = (composed.config.get("sweep") or {}).get("trial")
    if trial:
        refuse_untyped("sweep", {"trial": trial}, composed.overrides)
    from regimen.scripts.runs.launch import runner_for

    with composed.locating():
        request = composed.request(argv)
        return runner_for(request)(request)


if __name__ == "__main__":
    main()
