"""The checkpoint of a finished run that is used, and the model with its weights."""

from __future__ import annotations

from pathlib import Path

from conf.schema import Config
from models.weights import no_initial_weights
from trainer import snapshot
from trainer.build.experiment import build_evaluator
from trainer.build.statistics import takes_statistics, with_statistics
from trainer.checkpoints.archive import DamagedCheckpointError
from trainer.checkpoints.schema import check_payload
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import CheckpointError
from trainer.strategies.strategy import Strategy
from trainer.trainer import Trainer


def load_trainer(
    run_dir: Path, config: Config, num_classes: int | None, strategy: Strategy, checkpoint: str
) -> Trainer:
    """Build a run's model with the weights of a checkpoint (best, last or a path).

    Raises CheckpointError, and what building a model raises.
    """
    path = find_checkpoint(run_dir, checkpoint)
    try:
        payload = CheckpointStore(path.parent).load(path)
    except DamagedCheckpointError as error:
        way_out = f"checkpoint=NAME takes another of {_names(path.parent)}"
        raise DamagedCheckpointError(f"{error}; {way_out}") from error
    check_payload(payload, path)
    with no_initial_weights():  # the checkpoint brings its own
        trainer = build_evaluator(config, num_classes, strategy)
    snapshot.load_weights(trainer, payload, path)
    trainer.state.global_step = snapshot.saved_step(payload)
    return trainer


def as_trained(config: Config, checkpoint: Path | None) -> Config:
    """Return a configuration whose tables are encoded as those that a checkpoint was trained on."""
    if checkpoint is None or not takes_statistics(config):
        return config
    return with_statistics(config, CheckpointStore(checkpoint.parent).load(checkpoint))


def find_checkpoint(run_dir: Path, name: str) -> Path:
    """Return a checkpoint's path: `best` (or else the last), `last`, or a path."""
    folder = run_dir / "checkpoints"
    known = best_or_last(folder) if name == "best" else folder / f"{name}.pt"
    path = known if known is not None and known.is_file() else Path(name)
    if not path.is_file():
        raise CheckpointError(
            f"checkpoint={name}: {folder} holds no such checkpoint; there are {_names(folder)}"
        )
    return path


def _names(folder: Path) -> str:
    """Return what `checkpoint=` can be in a folder."""
    return ", ".join(sorted(path.stem for path in folder.glob("*.pt"))[:20]) or "none"


def best_or_last(folder: Path) -> Path | None:
    """Return the checkpoint to test: the best, or else the last; None if there is none."""
    return next((p for n in ("best", "last") if (p := folder / f"{n}.pt").exists()), None)
