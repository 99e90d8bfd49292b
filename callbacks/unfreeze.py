"""Fine-tuning in stages: unfreeze parameters after a number of epochs or steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from callbacks.support.errors import CallbackError
from callbacks.support.freezing import set_trainable
from trainer.callback import Callback
from trainer.state import TrainState

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_log = logging.getLogger(__name__)
_KEYS = {"pattern", "epoch", "step"}


class Unfreeze(Callback):
    """Freeze parameters at the start and let them train from an epoch or a step on.

    `stages`: by name, `{pattern: "layer4.*", epoch: 2}` or `{pattern: .., step: 500}`. Without
    epoch and step the parameters stay frozen; None drops a stage. `pattern` is a glob over full
    parameter names; the first stage that matches a parameter decides, and parameters that no stage
    matches train from the start. BatchNorm with frozen parameters stays in evaluation mode, so that
    it keeps its pretrained statistics.

    The frozen parameters follow from epoch and step, so a resumed run needs no state. Parameters
    stay in their optimizer's group, which skips them, weight decay included, without a gradient.
    """

    freezes = True

    def __init__(self, stages: Mapping[str, Mapping[str, Any] | None]) -> None:
        self._stages = {name: stage for name, stage in stages.items() if stage is not None}
        for name, stage in self._stages.items():
            unknown = stage.keys() - _KEYS
            if unknown or "pattern" not in stage or {"epoch", "step"} <= stage.keys():
                raise CallbackError(
                    f"stages.{name}={dict(stage)}: give pattern, and at most one of epoch and step"
                )
        self._members: dict[str, list[nn.Parameter]] = {}
        self._frozen: set[str] = set()  # names of stages

    def setup(self, trainer: Trainer) -> None:
        """Find the parameters of each stage, and freeze them."""
        self._members = {name: [] for name in self._stages}
        for parameter_name, parameter in trainer.model.named_parameters():
            for name, stage in self._stages.items():
                if fnmatchcase(parameter_name, stage["pattern"]):
                    self._members[name].append(parameter)
                    break
        for name, members in self._members.items():
            if not members:
                raise CallbackError(
                    f"callbacks.{self.name}.stages.{name}.pattern={self._stages[name]['pattern']}: "
                    "matches no parameter, or only those of earlier stages"
                )
            if not all(member.requires_grad for member in members):
                raise CallbackError(
                    f"callbacks.{self.name}.stages.{name}: the model was built with some of these "
                    "parameters frozen, so that no optimizer has them"
                )
        self._frozen = set(self._stages)
        self._set(trainer.model, self._frozen, trains=False)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Unfreeze the stages that have begun in a resumed run."""
        self._follow(trainer)
        self._settle_norms(trainer.model)

    def on_update_end(self, trainer: Trainer) -> None:
        """Unfreeze the stages that begin at this step."""
        if self._frozen:
            self._follow(trainer)

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Unfreeze the stages that begin with this epoch."""
        self._follow(trainer)

    def _follow(self, trainer: Trainer) -> None:
        begun = {name for name in self._frozen if started(self._stages[name], trainer.state)}
        if not begun:
            return
        self._frozen -= begun
        self._set(trainer.model, begun, trains=True)
        self._settle_norms(trainer.model)
        _log.info(
            "epoch %d, step %d: %s trains from here on",
            trainer.state.epoch,
            trainer.state.global_step,
            ", ".join(sorted(begun)),
        )

    def _set(self, model: nn.Module, stages: set[str], trains: bool) -> None:
        set_trainable(model, [p for name in stages for p in self._members[name]], trains)

    def _settle_norms(self, model: nn.Module) -> None:
        members = {id(p) for ps in self._members.values() for p in ps}
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if isinstance(module, _NormBase) and any(id(p) in members for p in own):
                module.train(any(p.requires_grad for p in own))


def started(stage: Mapping[str, Any], state: TrainState) -> bool:
    """Return whether a stage has begun."""
    if "step" in stage:
        return bool(state.global_step >= stage["step"])
    return "epoch" in stage and bool(state.epoch >= stage["epoch"])
