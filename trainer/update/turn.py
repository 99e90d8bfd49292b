"""Turns of an update: the optimizers that step together on one loss, and their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import ModelError
from trainer.optimizers.optimizers import Optimizers, needs_closure
from trainer.task import Task
from trainer.update.gradients import are_alike


class Turn:
    """Optimizers that step together on one loss; without a name if it has all of them."""

    def __init__(self, name: str, optimizers: Iterable[Optimizer]) -> None:
        self.name = name
        self.every = list(optimizers)
        # Those that only step, and those that evaluate the loss again within one, as LBFGS does.
        self.optimizers = [o for o in self.every if not needs_closure(o)]
        self.searching = [o for o in self.every if needs_closure(o)]
        self.alike = False  # whether the parameters are of one device and type
        self._sizes: list[int] = []
        self._parameters: list[Tensor] = []

    @property
    def parameters(self) -> list[Tensor]:
        """Return the parameters of all groups: a callback may add groups during the run."""
        sizes = [len(group["params"]) for o in self.every for group in o.param_groups]
        if sizes != self._sizes:
            self._sizes = sizes
            groups = [group for o in self.every for group in o.param_groups]
            self._parameters = [p for group in groups for p in group["params"]]
            self.alike = are_alike(self._parameters)
        return self._parameters


def turns_of(optimizers: Optimizers, task: Task) -> list[Turn]:
    """Return the turns of an update: the task's, or one of all optimizers.

    Turns without an optimizer are left out: an evaluation has none, and needs none.
    """
    known = optimizers.optimizers
    if not task.turns:
        return [Turn("", known.values())]
    return [Turn(name, [known[name]]) for name in task.turns if name in known]


def refuse_missing_turns(turns: Sequence[Turn], optimizers: Optimizers, task: Task) -> None:
    """Raise ModelError where a turn of the task has no optimizer."""
    if task.turns and [turn.name for turn in turns] != list(task.turns):
        raise ModelError(
            f"the optimizers are {', '.join(optimizers.optimizers)}, but those of task.turns "
            f"{', '.join(task.turns)}"
        )
