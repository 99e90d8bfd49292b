"""One process's part of `evaluate`: the metrics, and the file of the main process."""

from pathlib import Path

from regimen.conf.check import parse
from regimen.conf.errors import one_line
from regimen.scripts.cli.arguments import RunRequest
from regimen.scripts.cli.keys import Evaluation
from regimen.trainer.assembly.parts import build_strategy
from regimen.trainer.export.artefact import evaluate_artefact
from regimen.trainer.files.atomic import write_json
from regimen.trainer.inference.predictor import classes_of
from regimen.trainer.inference.run import checked_config, evaluate_run
from regimen.trainer.strategies.strategy import taking_part


def measure(request: RunRequest) -> int:
    """Evaluate a run, print its metrics and write them into its directory."""
    keys = Evaluation(**(request.evaluation or {}))
    run_dir = Path(keys.run)
    config = checked_config(parse(request.config), run_dir, keys.checkpoint)
    if keys.artefact is not None:
        split, metrics = evaluate_artefact(
            config, Path(keys.artefact), keys.split, keys.allow_code, classes_of(run_dir)
        )
        _write(run_dir, {"artefact": keys.artefact}, split, metrics)
        return 0
    strategy = build_strategy(config)
    with taking_part(strategy):
        split, metrics = evaluate_run(config, run_dir, keys.checkpoint, keys.split, strategy)
        if strategy.group.is_main:
            _write(run_dir, {"checkpoint": keys.checkpoint}, split, metrics)
    return 0


def _write(run_dir: Path, tested: dict[str, str], split: str, metrics: dict[str, float]) -> None:
    # Printed before they are written: the directory may be somebody else's, and read-only.
    if not metrics:
        print(f"{one_line(split)}: no label counts, so that there are no figures")
    for name, value in metrics.items():
        print(f"{one_line(name):<20} {value:.4f}")
    write_json(run_dir / "evaluation.json", {**tested, "split": split, **metrics})
    print(f"written to {one_line(run_dir / 'evaluation.json')}")
