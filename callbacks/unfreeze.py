"""Fine-tuning in stages: unfreeze parameters after a number of epochs or steps."""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from regimen.callbacks.support import CallbackError, logger, require
from regimen.trainer.callback import Callback
from regimen.trainer.state import TrainState
from regimen.trainer.trainer import Trainer


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
            require(
                _is_stage(stage),
                f"stages.{name}={stage}: give pattern, and at most one of epoch and step, which "
                "are 0 or more: such as {pattern: 'layer4.*', epoch: 2}",
            )
        self._members = dict[str, list[nn.Parameter]]()
        self._frozen = set[str]()  # names of stages

    def setup(self, trainer: Trainer) -> None:
        """Find the parameters of each stage, and freeze them."""
        if self._members:
            return  # a further `fit` goes on with what the first has unfrozen
        remaining = dict(trainer.model.named_parameters())
        for name, stage in self._stages.items():
            key = f"callbacks.{self.name}.stages.{name}"
            matching = [n for n in remaining if fnmatchcase(n, stage["pattern"])]
            members = [remaining.pop(parameter_name) for parameter_name in matching]
            if not members:
                raise CallbackError(
                    f"{key}.pattern={stage['pattern']}: matches no parameter, or only those of "
                    "earlier stages"
                )
            if not all(member.requires_grad for member in members):
                raise CallbackError(
                    f"{key}: the model was built with some of these frozen, so that no optimizer "
                    "has them"
                )
            self._members[name] = members
            set_trainable(trainer.model, members, trains=False)
        self._frozen = set(self._stages)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Unfreeze the stages that have begun in a resumed run."""
        self._set_norm_modes(trainer.model)
        self.on_update_end(trainer)

    def on_update_end(self, trainer: Trainer) -> None:
        """Unfreeze the stages that begin at this step or epoch."""
        state = trainer.state
        for name in sorted(self._frozen):
            if _has_begun(self._stages[name], state):
                self._frozen.remove(name)
                set_trainable(trainer.model, self._members[name], trains=True)
                self._set_norm_modes(trainer.model)
                logger.info(
                    "epoch %d, step %d: %s trains from here on",
                    state.epoch,
                    state.global_step,
                    name,
                )

    on_epoch_start = on_update_end

    def _set_norm_modes(self, model: nn.Module) -> None:
        """Put BatchNorm into evaluation mode where a stage has frozen it, else into training."""
        members = {id(p) for parameters in self._members.values() for p in parameters}
        for module in model.modules():
            if not hasattr(module, "track_running_stats"):
                continue
            parameters = list(module.parameters(recurse=False))
            if any(id(p) in members for p in parameters):
                module.train(any(p.requires_grad for p in parameters))


def _is_stage(stage: Any) -> bool:
    """Whether it has a glob, and one time or none: from when on its parameters train."""
    if not isinstance(stage, Mapping) or not isinstance(stage.get("pattern"), str):
        return False
    begin = [value for key, value in stage.items() if key in ("epoch", "step")]
    is_time = all(_is_time(value) for value in begin)
    return is_time and len(begin) <= 1 and len(stage) == 1 + len(begin)


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (is_number and 0 <= value < math.inf)


def _has_begun(stage: Mapping[str, Any], state: TrainState) -> bool:
    step: float | None = stage.get("step")
    epoch: float | None = stage.get("epoch")
    if step is not None:
        return state.global_step >= step
    return epoch is not None and state.epoch >= epoch


def set_trainable(model: nn.Module, parameters: Iterable[Tensor], trains: bool) -> None:
    """Let parameters of a model train or not, and drop their gradients.

    They are entered into their modules again: torch 2.11's compiler checks `requires_grad` only
    where a module's parameters were replaced, and would go on without a parameter's gradient.
    """
    chosen = {id(parameter) for parameter in parameters}
    for module in model.modules():
        named = list(module.named_parameters("", recurse=False, remove_duplicate=False))
        for name, parameter in named:
            if id(parameter) not in chosen:
                continue
            parameter.requires_grad_(trains)
            parameter.grad = None
            setattr(module, name, None)
            setattr(module, name, parameter)
