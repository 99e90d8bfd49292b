"""What the fork server does once for all jobs: imports, and a first composition."""

import importlib
from contextlib import suppress

# What every job imports, and the modules of common targets. A job imports other targets, such as
# the user's, itself.
MODULES = (
    "scripts.train",
    "scripts.help",
    "scripts.runs.run",
    "torch._dynamo",
    "torch.utils.serialization.config",
    "torchvision.transforms.v2",
    "callbacks.checkpoint",
    "callbacks.early_stopping",
    "callbacks.lr_monitor",
    "callbacks.memory",
    "callbacks.model_summary",
    "callbacks.progress",
    "callbacks.tensorboard",
    "callbacks.throughput",
    "data.sources",
    "models.mlp",
    "models.resnet",
    "models.small_cnn",
    "rich.console",
    "rich.table",
    "rich._emoji_codes",
    "trainer.tasks.classification",
)


def warm_up() -> None:
    """Import the modules, and compose what is chosen by default: Hydra's parser and plugins load.

    Neither starts a thread. A job reports an import that fails.
    """
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(Exception):
        importlib.import_module("scripts.composition.compose").compose([])
