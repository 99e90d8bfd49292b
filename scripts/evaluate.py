"""`evaluate run=RUN_DIR [checkpoint=best]`: test a finished run again."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.cli.shadow import refuse_shadows

_HELP = """\
Test a run's checkpoint again, on one device, and write evaluation.json into its directory.

  evaluate run=RUN_DIR [checkpoint=best|last|PATH] [split=test|val] [key=value ...]
  evaluate run=RUN_DIR artefact=FILE [split=test|val] [allow_code=true]

  split        test (default), or val where the data have no test split
  artefact     a file that regimen export or quantize wrote, tested with the same metrics
  allow_code   true: load it even if its format runs code (torch_export, torchscript, aoti)

Further overrides change the run's configuration, e.g. loader.num_workers=2 or data.root=DIR.
"""


def main() -> None:
    """Run the command line and leave with its exit code."""
    refuse_shadows()  # before anything of ours could be imported from where another package stands
    from scripts.cli.console import Command

    with Command() as command:
        command.code = evaluate(sys.argv[1:])


def evaluate(argv: Sequence[str]) -> int:
    """Compute the metrics of one split with one checkpoint, print them and keep them."""
    from scripts.cli import arguments as cli
    from scripts.cli.console import asked_device, greet, importing, log_to_stderr

    if (arguments := cli.parse_or_help(argv, _HELP)) is None:
        return 0
    greet(asked_device(arguments.overrides))
    from conf.check import parse  # after the first line: these import Hydra
    from conf.errors import Problem, one_line, raise_problems
    from scripts.composition.compose import compose

    log_to_stderr(verbose=True)
    keys: dict[str, cli.Take] = dict.fromkeys(("run", "checkpoint", "artefact"), str)
    keys |= {"split": cli.one_of("test", "val"), "allow_code": cli.true_or_false}
    required = {"run": "evaluate run=RUN_DIR"}
    own, overrides, problems = cli.take_keys(arguments.overrides, keys, required)
    if "artefact" in own and "checkpoint" in own:
        message = "an exported file is tested, or a checkpoint: leave one of both out"
        problems.append(Problem("artefact", message))
    raise_problems(problems)
    own = {"checkpoint": "best", **own}
    run_dir, split = Path(own["run"]), own.get("split")
    composed = compose(cli.of_run(arguments, own["run"], overrides))
    with importing():
        from trainer.assembly.check import check_targets
        from trainer.files.atomic import write_text
        from trainer.targets.allow_list import allow

        if "artefact" in own:
            from trainer.export.artefact import evaluate_artefact
        else:
            from trainer.inference.run import evaluate_run

    with composed.locating():
        allow(arguments.allow_targets)
        config = parse(composed.config)
        check_targets(config)
        if "artefact" in own:
            file, trusted = Path(own["artefact"]), own.get("allow_code", False)
            split, metrics = evaluate_artefact(config, file, split, trusted)
        else:
            split, metrics = evaluate_run(config, run_dir, own["checkpoint"], split)
    for name, value in metrics.items():  # first: the directory may be another's, read-only
        print(f"{one_line(name):<20} {value:.4f}")
    tested = "artefact" if "artefact" in own else "checkpoint"
    result = {tested: own[tested], "split": split, **metrics}
    write_text(run_dir / "evaluation.json", json.dumps(result, indent=2) + "\n")
    print(f"written to {one_line(str(run_dir / 'evaluation.json'))}")
    return 0


if __name__ == "__main__":
    main()
