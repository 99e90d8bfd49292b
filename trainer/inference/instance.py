"""Load a checkpoint into a model that the user has built, for `load_run(path, model=net)`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from regimen.conf.errors import ConfigError
from regimen.conf.schema import Config
from regimen.trainer import snapshot
from regimen.trainer.checkpoints.reader import check_payload, read_checkpoint
from regimen.trainer.components.components import Components, build_components
from regimen.trainer.components.precision import Precision
from regimen.trainer.device import module_to_device
from regimen.trainer.options import TrainerOptions
from regimen.trainer.runs.from_python import OWN_TASKS
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.targets.allow_list import TargetError, locate
from regimen.trainer.task import Task

_log = logging.getLogger(__name__)


def load_instance(
    path: Path, config: Config, strategy: Strategy, model: nn.Module, task: Task
) -> Components:
    """Return what evaluates and predicts, whose model is `model` with new weights.

    The weights are those that the run was evaluated with: an average's, if it computed one. Raises
    CheckpointError for a checkpoint of another model.
    """
    payload = read_checkpoint(path)
    check_payload(payload, path)
    precision = Precision(config.trainer.precision, strategy.device.type)
    components = build_components(
        module_to_device(precision.convert(model), strategy.device),
        task,
        strategy=strategy,
        precision=precision,
        options=TrainerOptions(
            max_epochs=1, seed=config.seed, channels_last=config.trainer.channels_last
        ),
    )
    snapshot.load_weights(components, _evaluated(payload), path)
    components.state.global_step = snapshot.log_point_of(payload).step
    return components


def task_of(outputs: Mapping[str, Any], given: Task | None) -> Task:
    """Return the task of a run from Python: the given one, or one of ours that the run names.

    Raises ConfigError if there is neither.
    """
    if given is not None:
        return given
    named = outputs.get("task")
    if isinstance(named, Mapping) and str(named.get("name")).startswith(OWN_TASKS):
        try:
            kind = locate(str(named["name"]))
            if isinstance(kind, type) and issubclass(kind, Task):
                return kind(**named.get("arguments", {}))
        except (TargetError, TypeError, ValueError) as error:
            raise ConfigError("task", f"the run's task cannot be made: {error}", _GIVE) from error
    raise ConfigError("task", "the run's task is a class of its own", _GIVE)


_GIVE = "load_run(path, model=net, task=...) takes it"


def _evaluated(payload: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint whose model has the weights of the average that was evaluated."""
    average = snapshot.name_of("average", payload)
    if average is None:
        return payload
    state = payload["ema"]
    weights = {}  # before the first update is averaged, the model's own weights are evaluated
    if state.get("averaged", 1):
        weights = state.get("model")
    if weights is None:
        _log.warning("the average of callbacks.%s is not used: its weights are unknown", average)
        weights = {}
    return {**payload, "model": {**payload["model"], **weights}}
