"""Train PyTorch models from YAML."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout the packages lie at its top: a traceback, a debugger and a coverage report then name
# `trainer/trainer.py`, not the link. An installed copy holds the packages here, and no README.md.
_HERE = Path(__file__).resolve().parent
if (_HERE / "README.md").exists():
    __path__ = [str(_HERE.parents[1]), *__path__]

if TYPE_CHECKING:
    from regimen.callbacks.checkpoint import Checkpoint as Checkpoint
    from regimen.data.loading.loader import loader as loader
    from regimen.scripts.composition.compose import compose as compose
    from regimen.trainer.assembly.experiment import build as build
    from regimen.trainer.callback import Callback as Callback
    from regimen.trainer.inference.run import load_run as load_run
    from regimen.trainer.options import TrainerOptions as TrainerOptions
    from regimen.trainer.task import StepOutput as StepOutput
    from regimen.trainer.task import Task as Task
    from regimen.trainer.tasks.classification import Classification as Classification
    from regimen.trainer.tasks.regression import Regression as Regression
    from regimen.trainer.trainer import Trainer as Trainer

# Imported when they are asked for: `import regimen` alone imports no torch.
_MODULES = {
    "Callback": "regimen.trainer.callback",
    "Checkpoint": "regimen.callbacks.checkpoint",
    "Classification": "regimen.trainer.tasks.classification",
    "Regression": "regimen.trainer.tasks.regression",
    "StepOutput": "regimen.trainer.task",
    "Task": "regimen.trainer.task",
    "Trainer": "regimen.trainer.trainer",
    "TrainerOptions": "regimen.trainer.options",
    "build": "regimen.trainer.assembly.experiment",
    "compose": "regimen.scripts.composition.compose",
    "load_run": "regimen.trainer.inference.run",
    "loader": "regimen.data.loading.loader",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Return one of the public names."""
    if name not in _MODULES:
        raise AttributeError(f"module 'regimen' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    return sorted({*globals(), *_MODULES})
