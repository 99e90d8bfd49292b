"""Fine-tuning in stages: unfreeze parameters after a number of epochs or steps."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from regimen.callbacks.support import logger, require
from regimen.trainer.callback import Callback
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
            sound = {"pattern"} in (stage.keys() - {"epoch"}, stage.keys() - {"step"})
            hint = "give pattern, and at most one of epoch and step"
            require(sound, f"stages.{name}={dict(stage)}: {hint}")
        self._members = dict[str, list[nn.Parameter]]()
        self._frozen = set[str]()  # names of stages

    def setup(self, trainer: Trainer) -> None:
        """Find the parameters of each stage, and freeze them."""
        left = dict(trainer.model.named_parameters())
        for name, stage in self._stages.items():
            matched = [found for found in left if fnmatchcase(found, stage["pattern"])]
            self._members[name] = members = [left.pop(found) for found in matched]
            key = f"callbacks.{self.name}.stages.{name}"
            unmatched = "matches no parameter, or only those of earlier stages"
            require(members, f"{key}.pattern={stage['pattern']}: {unmatched}")
            frozen = "the model was built with some of these frozen, so that no optimizer has them"
            require(all(member.requires_grad for member in members), f"{key}: {frozen}")
            set_trainable(trainer.model, members, trains=False)
        self._frozen = set(self._stages)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Unfreeze the stages that have begun in a resumed run."""
        self._settle_norms(trainer.model)
        self.on_update_end(trainer)

    def on_update_end(self, trainer: Trainer) -> None:
        """Unfreeze the stages that begin at this step or epoch."""
        state = trainer.state
        for name in sorted(self._frozen):
            stage = self._stages[name]
            now = state.global_step if "step" in stage else state.epoch
            begins = stage.get("step", stage.get("epoch"))
            if begins is not None and now >= begins:
                self._frozen.remove(name)
                set_trainable(trainer.model, self._members[name], trains=True)
                self._settle_norms(trainer.model)
                message = "epoch %d, step %d: %s trains from here on"
                logger.info(message, state.epoch, state.global_step, name)

    on_epoch_start = on_update_end

    def _settle_norms(self, model: nn.Module) -> None:
        members = {id(p) for parameters in self._members.values() for p in parameters}
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if hasattr(module, "track_running_stats") and any(id(p) in members for p in own):
                module.train(any(p.requires_grad for p in own))


def set_trainable(model: nn.Module, parameters: Iterable[Tensor], trains: bool) -> None:
    """Let parameters of a model train or not, and drop their gradients.

    They are entered into their modules again: torch 2.11's compiler checks `requires_grad` only
    where a module's parameters were replaced, and would go on without a parameter's gradient.
    """
    chosen = {id(parameter) for parameter in parameters}
    for module in model.modules():
        own = module.named_parameters("", recurse=False, remove_duplicate=False)
        for name, parameter in [pair for pair in own if id(pair[1]) in chosen]:
            parameter.requires_grad_(trains)
            parameter.grad = None
            setattr(module, name, None)
            setattr(module, name, parameter)
