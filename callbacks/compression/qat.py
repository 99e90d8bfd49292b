"""Train with the rounding of 8-bit integers: quantization-aware training.

Layers are convolutions and linear layers of exactly torch's classes: a subclass may compute
anything.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regimen.callbacks.support import require, steps_of
from regimen.conf.errors import ConfigError, problems_at
from regimen.trainer.callback import Callback
from regimen.trainer.trainer import Trainer

_LEVELS = 255  # of activations, as unsigned integers of 8 bits
_LARGEST = 127  # of weights, as signed ones
_SMALLEST = 1e-12  # a scale: a channel may be all zeros


class _Rounding(torch.autograd.Function):
    """Put weights on the grid of each output channel; gradients pass.

    A fifth of the time of `torch.fake_quantize_per_channel_affine`.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        scale = (weight.flatten(1).abs().amax(1) / _LARGEST).float().clamp_min(_SMALLEST)
        scale = scale.view(-1, *[1] * (weight.ndim - 1))
        return (weight.float() / scale).round_().mul_(scale).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


rounded_weight: Callable[[Tensor], Tensor] = _Rounding.apply


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


class QuantizationAwareTraining(Callback):
    """Round the weights and inputs of layers to 8 bits in every forward pass; gradients pass.

    The weights themselves stay plain, and so do checkpoints. The ranges of the inputs follow
    the smallest and the largest value of each update's whole batch, on all processes, as running
    averages with `momentum`, and always include zero; `regimen quantize` writes an integer network
    with these ranges.

    Rounding begins at `start_step`, a number of updates or a share of the run (floats up to 1).
    Validations during training are of the rounded network.

    Jacob et al., Quantization and Training of Neural Networks, 2018.
    """

    supports_sharding = False

    def __init__(self, start_step: float = 0, momentum: float = 0.9) -> None:
        steps_of("start_step", start_step, 1)
        require(0 <= momentum < 1, f"momentum={momentum}: choose at least 0 and less than 1")
        self._start_step, self._momentum = start_step, momentum
        self._layers = list[str]()
        self._changed = list[tuple[nn.Module, Any]]()  # a layer, and the hook on its inputs
        self._known = False  # whether there are ranges
        self.rounds = True  # where they are known

    def check(self, model: nn.Module) -> None:
        """Find the layers that are rounded. Raises ConfigError for a model without any."""
        self._layers = [name for name, part in model.named_modules() if type(part) in _ROUNDED]
        if not self._layers:
            kinds = ", ".join(kind.__name__ for kind in _ROUNDED)
            raise ConfigError(f"the model has no layer to quantize: {kinds}")
        # The smallest value of each layer's inputs, negated, and the largest: running, and of
        # this update.
        self._range, self._seen = torch.zeros(2, 2, len(self._layers))

    def setup(self, trainer: Trainer) -> None:
        """Find the layers, and the first step."""
        with problems_at(f"callbacks.{self.name}"):
            self.check(trainer.model)
            self._start = steps_of("start_step", self._start_step, trainer.total_steps)
        strategy, device = trainer.strategy, trainer.strategy.device
        require(
            not (strategy.shards_parameters or strategy.copies_model),
            f"callbacks.{self.name} needs one whole model on each process, unlike "
            f"strategy={strategy.name}: use strategy=ddp",
        )
        self._range, self._seen = self._range.to(device), self._seen.to(device)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin to round."""
        self.attach(trainer.model)
        self.rounds = trainer.state.global_step >= self._start

    def attach(self, model: nn.Module) -> None:
        """Make a network round its layers' weights and inputs.

        Names and values of its parameters stay: only the classes of the layers change.
        """
        for number, name in enumerate(self._layers):
            layer = model.get_submodule(name)
            rounding = partial(self._rounded, number)
            self._changed.append((layer, layer.register_forward_pre_hook(rounding)))
            layer.__class__ = _ROUNDED[type(layer)]

    def _rounded(self, number: int, layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = given
        if torch.is_grad_enabled():
            with torch.no_grad():
                low, high = x.detach().aminmax()
                seen = self._seen[:, number]
                seen.copy_(seen.maximum(torch.stack([-low, high])))
        if not (self._known and self.rounds):
            return given
        low, high = -self._range[0, number], self._range[1, number]
        scale = ((high - low) / _LEVELS).clamp_min(_SMALLEST)
        zero = (-low / scale).round().clamp(0, _LEVELS).to(torch.int32)
        rounded = torch.fake_quantize_per_tensor_affine(x.float(), scale, zero, 0, _LEVELS)
        return rounded.to(x.dtype), *others

    def on_update_end(self, trainer: Trainer) -> None:
        """Let the ranges follow the batch of the update, over all processes."""
        group, seen = trainer.group, self._seen
        if not trainer.state.skipped_in_a_row:
            if group.world_size > 1:  # the group only sums: each process has its own row
                own = torch.zeros(group.world_size, *seen.shape, device=seen.device)
                own[group.rank] = seen
                seen = group.reduce(own).amax(0)
            self._range.lerp_(seen, 1 - self._momentum if self._known else 1.0)  # the first sets it
            self._known = True
            self.rounds = trainer.state.global_step >= self._start
        self._seen.zero_()

    def teardown(self, trainer: Trainer) -> None:
        """Remove the rounding from the model."""
        for layer, hook in self._changed:
            layer.__class__ = type(layer).__bases__[-1]  # torch's own
            hook.remove()
        self._changed = []

    def state_dict(self) -> dict[str, Any]:
        """Return the ranges by the names of layers; `regimen quantize` reads them by this key."""
        low, high = -self._range[0], self._range[1]
        ranges = {"layers": self._layers, "low": low, "high": high, "known": self._known}
        return {"fake_quantization": ranges}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the ranges."""
        ranges = state["fake_quantization"]
        self._range.copy_(torch.stack([-ranges["low"], ranges["high"]]))
        self._known = bool(ranges["known"])
