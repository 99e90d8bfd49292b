"""Train with the rounding of 8-bit integers: quantization-aware training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from callbacks.compression.pruning import Schedule, check_step
from callbacks.support import CallbackError
from conf.errors import Problem, problems_at, raise_problems
from trainer.callback import Callback
from trainer.distributed.group import Group
from trainer.export.fake_quantization import LAYERS, LEARNT, Ranges, attach

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_log = logging.getLogger(__name__)
_KINDS = ", ".join(kind.__name__ for kind in LAYERS)


class QuantizationAwareTraining(Callback):
    """Round the weights and inputs of layers to 8 bits in every forward pass; gradients pass.

    The weights themselves stay plain, and so do checkpoints. The ranges of the inputs follow
    the smallest and the largest value of each update's whole batch, on all processes, as running
    averages with `momentum`; `regimen quantize` writes an integer network with these ranges.

    Rounding begins at `start_step`, a number of updates or a share of the run (floats up to 1).
    Validations during training are of the rounded network.

    Jacob et al., Quantization and Training of Neural Networks, 2018.
    """

    takes_shards = False

    def __init__(self, start_step: float = 0, momentum: float = 0.9) -> None:
        check_step("start_step", start_step)
        if not 0 <= momentum < 1:
            raise CallbackError(f"momentum={momentum}: choose at least 0 and less than 1")
        self._start_step = start_step
        self._momentum = momentum
        self._start = 0
        self._ranges: Ranges | None = None
        self._detach: Callable[[], None] = lambda: None

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError for a model without a layer that is quantized."""
        if not any(type(module) in LAYERS for module in model.modules()):
            raise_problems([Problem("", f"the model has no layer to quantize: {_KINDS}")])

    def setup(self, trainer: Trainer) -> None:
        """Find the layers that are rounded."""
        with problems_at(f"callbacks.{self.name}"):
            self.check(trainer.model)
            self._start = Schedule.between(self._start_step, None, 1, trainer.total_steps).start
        if trainer.strategy.name not in ("single", "ddp"):
            raise CallbackError(
                f"callbacks.{self.name} needs one whole model on each process, which "
                f"strategy={trainer.strategy.name} does not have: use strategy=ddp"
            )
        self._ranges = Ranges(trainer.model, trainer.strategy.device)

    @property
    def ranges(self) -> Ranges:
        """The ranges of the inputs. RuntimeError before `setup`."""
        if self._ranges is None:
            raise RuntimeError("the ranges are known after `setup`")
        return self._ranges

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin to round."""
        self._detach = attach(trainer.model, self.ranges)
        self.ranges.rounds = trainer.state.global_step >= self._start

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Drop the values that evaluations have shown."""
        self.ranges.forget()

    def on_update_end(self, trainer: Trainer) -> None:
        """Let the ranges follow the batch of the update."""
        if not trainer.state.skipped_in_a_row:
            seen = _over_processes(trainer.group, self.ranges.seen)
            self.ranges.follow(seen, self._momentum)
            self.ranges.rounds = trainer.state.global_step >= self._start
        self.ranges.forget()

    def on_fit_end(self, trainer: Trainer) -> None:
        """Log how many layers were trained, and the next command."""
        text = "callbacks.%s: %d layers were trained for 8 bits; regimen quantize writes them"
        _log.info(text, self.name, len(self.ranges.layers))

    def teardown(self, trainer: Trainer) -> None:
        """Remove the rounding from the model."""
        self._detach()
        self._detach = lambda: None

    def explain(self, trainer: Trainer) -> Iterator[str]:
        """Describe what will be rounded, and from which step."""
        start = Schedule.between(self._start_step, None, 1, trainer.total_steps).start
        count = sum(type(module) in LAYERS for module in trainer.model.modules())
        yield f"callbacks.{self.name} rounds {count} layers to 8 bits from step {start} on"

    def state_dict(self) -> dict[str, Any]:
        """Return the ranges, which `regimen quantize` reads, too."""
        return {LEARNT: self.ranges.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the ranges."""
        self.ranges.load_state_dict(state[LEARNT])


def _over_processes(group: Group, seen: Tensor) -> Tensor:
    """Return the smallest and the largest values of all processes, [2, places]."""
    if group.world_size == 1:
        return seen
    # The group only sums: each process has its own row.
    own = torch.zeros(group.world_size, *seen.shape, device=seen.device)
    own[group.rank] = seen
    every = group.reduce(own)
    return torch.stack([every[:, 0].amin(0), every[:, 1].amax(0)])
