"""Train with the rounding of 8-bit integers: quantization-aware training.

Layers are convolutions and linear layers of exactly torch's classes: a subclass may compute
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from callbacks.compression.pruning import step_of
from callbacks.support import CallbackError
from conf.errors import Problem, problems_at, raise_problems
from trainer.callback import Callback

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_LEVELS = 255  # of activations, as unsigned integers of 8 bits
_LARGEST = 127  # of weights, as signed ones
_SMALLEST = 1e-12  # a scale: a channel may be all zeros


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        scale = (weight.flatten(1).abs().amax(1) / _LARGEST).float().clamp_min(_SMALLEST)
        scale = scale.view(-1, *[1] * (weight.ndim - 1))
        return (weight.float() / scale).round_().mul_(scale).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def rounded_weight(weight: Tensor) -> Tensor:
    """Return weights on the grid of each output channel; gradients pass."""
    rounded: Tensor = _Rounding.apply(weight)
    return rounded


class _Conv:
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        plain: Any = super()
        return plain._conv_forward(x, rounded_weight(weight), bias)  # type: ignore[no-any-return]


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, rounded_weight(self.weight), self.bias)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ROUNDED: Mapping[type[nn.Module], type[nn.Module]] = {
    **{kind: type(f"Rounded{kind.__name__}", (_Conv, kind), {}) for kind in _CONVOLUTIONS},
    nn.Linear: _Linear,
}


class Ranges:
    """The range of the inputs of each layer, to which they are rounded.

    Values are `low` to `high`, [layers], and always include zero.
    """

    def __init__(self, model: nn.Module, device: torch.device | str) -> None:
        self.layers = [name for name, part in model.named_modules() if type(part) in _ROUNDED]
        count = len(self.layers)
        self.low, self.high = (torch.zeros(count, device=device) for _ in range(2))
        self.seen = torch.zeros(2, count, device=device)  # smallest and largest of this update
        self.known = False
        self.rounds = True  # where the ranges are known

    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Make a network round its layers' weights and inputs; return the undo function.

        Names and values of its parameters stay: only the classes of the layers change.
        """
        changed = []
        for number, name in enumerate(self.layers):
            layer = model.get_submodule(name)
            hook = layer.register_forward_pre_hook(self._rounds_input(number))
            changed.append((layer, type(layer), hook))
            layer.__class__ = _ROUNDED[type(layer)]

        def detach() -> None:
            for layer, kind, hook in changed:
                layer.__class__ = kind
                hook.remove()

        return detach

    def _rounds_input(self, number: int) -> Callable[[nn.Module, Any], Any]:
        return lambda _, given: (self._rounded(given[0], number), *given[1:])

    def _rounded(self, x: Tensor, number: int) -> Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad():
                low, high = x.detach().aminmax()
                self.seen[0, number] = torch.minimum(self.seen[0, number], low)
                self.seen[1, number] = torch.maximum(self.seen[1, number], high)
        if not (self.known and self.rounds):
            return x
        scale = ((self.high[number] - self.low[number]) / _LEVELS).clamp_min(_SMALLEST)
        zero = (-self.low[number] / scale).round().clamp(0, _LEVELS).to(torch.int32)
        rounded = torch.fake_quantize_per_tensor_affine(x.float(), scale, zero, 0, _LEVELS)
        return rounded.to(x.dtype)

    def follow(self, seen: Tensor, momentum: float) -> None:
        """Move the ranges towards `seen` by `1 - momentum`; the first call sets them."""
        weight = 1 - momentum if self.known else 1.0
        self.low.lerp_(seen[0], weight)
        self.high.lerp_(seen[1], weight)
        self.known = True

    def state_dict(self) -> dict[str, Any]:
        """Return the ranges by the names of their layers."""
        return {"layers": self.layers, "low": self.low, "high": self.high, "known": self.known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ranges. Raises ValueError for those of another network."""
        if list(state["layers"]) != self.layers:
            raise ValueError("the ranges are of a network with other layers")
        self.low.copy_(state["low"])
        self.high.copy_(state["high"])
        self.known = bool(state["known"])


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
        step_of("start_step", start_step, 1)
        if not 0 <= momentum < 1:
            raise CallbackError(f"momentum={momentum}: choose at least 0 and less than 1")
        self._start_step = start_step
        self._momentum = momentum
        self._detach: Callable[[], None] = lambda: None

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError for a model without a layer that is quantized."""
        if not any(type(module) in _ROUNDED for module in model.modules()):
            kinds = ", ".join(kind.__name__ for kind in _ROUNDED)
            raise_problems([Problem("", f"the model has no layer to quantize: {kinds}")])

    def setup(self, trainer: Trainer) -> None:
        """Find the layers that are rounded."""
        with problems_at(f"callbacks.{self.name}"):
            self.check(trainer.model)
            self._start = step_of("start_step", self._start_step, trainer.total_steps)
        if trainer.strategy.name not in ("single", "ddp"):
            raise CallbackError(
                f"callbacks.{self.name} needs one whole model on each process, which "
                f"strategy={trainer.strategy.name} does not have: use strategy=ddp"
            )
        self._ranges = Ranges(trainer.model, trainer.strategy.device)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin to round."""
        self._detach = self._ranges.attach(trainer.model)
        self._ranges.rounds = trainer.state.global_step >= self._start

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Drop the values that evaluations have shown."""
        self._ranges.seen.zero_()

    def on_update_end(self, trainer: Trainer) -> None:
        """Let the ranges follow the batch of the update, over all processes."""
        ranges, group = self._ranges, trainer.group
        if not trainer.state.skipped_in_a_row:
            seen = ranges.seen
            if group.world_size > 1:  # the group only sums: each process has its own row
                own = torch.zeros(group.world_size, *seen.shape, device=seen.device)
                own[group.rank] = seen
                every = group.reduce(own)
                seen = torch.stack([every[:, 0].amin(0), every[:, 1].amax(0)])
            ranges.follow(seen, self._momentum)
            ranges.rounds = trainer.state.global_step >= self._start
        ranges.seen.zero_()

    def teardown(self, trainer: Trainer) -> None:
        """Remove the rounding from the model."""
        self._detach()
        self._detach = lambda: None

    def explain(self, trainer: Trainer) -> Iterator[str]:
        """Describe what will be rounded, and from which step."""
        start = step_of("start_step", self._start_step, trainer.total_steps)
        count = len(Ranges(trainer.model, "meta").layers)
        yield f"callbacks.{self.name} rounds {count} layers to 8 bits from step {start} on"

    def state_dict(self) -> dict[str, Any]:
        """Return the ranges, which `regimen quantize` reads by this key, too."""
        return {"fake_quantization": self._ranges.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the ranges."""
        self._ranges.load_state_dict(state["fake_quantization"])
