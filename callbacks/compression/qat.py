"""Train with the rounding of 8-bit integers: quantization-aware training.

Layers are convolutions and linear layers of exactly torch's classes: a subclass may compute
anything.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from regimen.callbacks.support import require, steps_of
from regimen.conf.errors import ConfigError, problems_at
from regimen.trainer.callback import Callback
from regimen.trainer.distributed import Group
from regimen.trainer.trainer import Trainer

_ACTIVATION_MAX = 255  # unsigned integers of 8 bits
_WEIGHT_MAX = 127  # signed integers of 8 bits
_MIN_SCALE = 1e-12  # a channel may be all zeros


class _Rounding(torch.autograd.Function):
    """Put weights on the grid of each output channel; gradients pass.

    A fifth of the time of `torch.fake_quantize_per_channel_affine`.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        dims = tuple(range(1, weight.ndim))
        largest = weight.abs().amax(dims, keepdim=True)  # of each output channel
        scale = (largest / _WEIGHT_MAX).float().clamp_min(_MIN_SCALE)
        steps = (weight.float() / scale).round_()
        return steps.mul_(scale).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


rounded_weight: Callable[[Tensor], Tensor] = _Rounding.apply


class _RoundedConv:
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        plain: Any = super()
        return plain._conv_forward(x, rounded_weight(weight), bias)  # type: ignore[no-any-return]


class RoundedConv1d(_RoundedConv, nn.Conv1d):
    """A convolution with rounded weights."""


class RoundedConv2d(_RoundedConv, nn.Conv2d):
    """A convolution with rounded weights."""


class RoundedConv3d(_RoundedConv, nn.Conv3d):
    """A convolution with rounded weights."""


class RoundedLinear(nn.Linear):
    """A linear layer with rounded weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of `x`."""
        return linear(x, rounded_weight(self.weight), self.bias)


_ROUNDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: RoundedConv1d,
    nn.Conv2d: RoundedConv2d,
    nn.Conv3d: RoundedConv3d,
    nn.Linear: RoundedLinear,
}


class QuantizationAwareTraining(Callback):
    """Round the weights and inputs of layers to 8 bits in every forward pass; gradients pass.

    The parameters are not rounded, nor are checkpoints. The ranges of the inputs are running
    averages, with `momentum`, of the smallest and the largest value of each update's whole batch
    on all processes. They always include zero. `regimen quantize` writes an integer network with
    these ranges.

    Rounding begins at `start_step`, a number of updates or a share of the run (floats up to 1).
    Validations during training are of the rounded network.

    Jacob et al., Quantization and Training of Neural Networks, 2018.
    """

    supports_sharding = False

    def __init__(self, start_step: float = 0, momentum: float = 0.9) -> None:
        steps_of("start_step", start_step, 1)
        require(0 <= momentum < 1, f"momentum={momentum}: choose at least 0 and less than 1")
        self._start_step = start_step
        self._momentum = momentum
        self._layers = list[str]()
        self._attached = list[tuple[nn.Module, Any]]()  # a layer, and the hook on its inputs
        self._has_ranges = False
        self.rounds = True  # whether inputs are rounded, once there are ranges

    def check(self, model: nn.Module) -> None:
        """Find the layers that are rounded. Raises ConfigError for a model without any."""
        layers = [name for name, part in model.named_modules() if type(part) in _ROUNDED]
        if not layers:
            kinds = ", ".join(kind.__name__ for kind in _ROUNDED)
            raise ConfigError(f"the model has no layer to quantize: {kinds}")
        # Row 0: the smallest value of each layer's inputs, negated, so that `maximum` updates both
        # rows; row 1: the largest.
        self._range = torch.zeros(2, len(layers))  # running averages
        self._seen = torch.zeros(2, len(layers))  # of this update
        self._layers = layers

    def setup(self, trainer: Trainer) -> None:
        """Find the layers, and the first step."""
        with problems_at(f"callbacks.{self.name}"):
            if not self._has_ranges:  # a further `fit` goes on with the ranges of the first
                self.check(trainer.model)
            self._start = steps_of("start_step", self._start_step, trainer.total_steps)
        strategy = trainer.strategy
        has_whole_model = not strategy.shards_parameters and not strategy.copies_model
        require(
            has_whole_model,
            f"callbacks.{self.name} needs one whole model on each process, unlike "
            f"strategy={strategy.name}: use strategy=ddp",
        )
        device = strategy.device
        self._range = self._range.to(device)
        self._seen = self._seen.to(device)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin to round."""
        self.attach(trainer.model)
        self.rounds = trainer.state.global_step >= self._start

    def attach(self, model: nn.Module) -> None:
        """Make a network round its layers' weights and inputs.

        Names and values of its parameters stay: only the classes of the layers change.
        """
        for index, name in enumerate(self._layers):
            layer = model.get_submodule(name)
            hook = layer.register_forward_pre_hook(partial(self._round_inputs, index))
            self._attached.append((layer, hook))
            layer.__class__ = _ROUNDED[type(layer)]

    def _round_inputs(
        self, index: int, layer: nn.Module, inputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        x, *others = inputs
        if torch.is_grad_enabled():
            with torch.no_grad():
                low, high = x.aminmax()
                ends = torch.stack([-low, high])
                seen = self._seen[:, index]  # a view
                seen.copy_(seen.maximum(ends))
        if not self._has_ranges or not self.rounds:
            return inputs
        negated_low, high = self._range[:, index]
        width = high + negated_low
        scale = (width / _ACTIVATION_MAX).clamp_min(_MIN_SCALE)
        zero_point = (negated_low / scale).round()
        zero_point = zero_point.clamp(0, _ACTIVATION_MAX).to(torch.int32)
        rounded = torch.fake_quantize_per_tensor_affine(
            x.float(), scale, zero_point, quant_min=0, quant_max=_ACTIVATION_MAX
        )
        return rounded.to(x.dtype), *others

    def on_update_end(self, trainer: Trainer) -> None:
        """Let the ranges follow the batch of the update, over all processes."""
        state = trainer.state
        if not state.skipped_in_a_row:
            weight = 1.0  # the first update sets the ranges
            if self._has_ranges:
                weight = 1 - self._momentum
            largest = self._largest_of_all(trainer.group)
            self._range.lerp_(largest, weight)
            self._has_ranges = True
            self.rounds = state.global_step >= self._start
        self._seen.zero_()

    def _largest_of_all(self, group: Group) -> Tensor:
        """Return the largest values that any process saw in this update; a collective."""
        seen = self._seen
        if group.world_size == 1:
            return seen
        # The group only sums: each process fills a row of its own.
        rows = torch.zeros(group.world_size, *seen.shape, device=seen.device)
        rows[group.rank] = seen
        return group.reduce(rows).amax(0)

    def teardown(self, trainer: Trainer) -> None:
        """Remove the rounding from the model."""
        for layer, hook in self._attached:
            layer.__class__ = type(layer).__bases__[-1]  # torch's own
            hook.remove()
        self._attached = []

    def state_dict(self) -> dict[str, Any]:
        """Return the ranges by the names of layers; `regimen quantize` reads them by this key."""
        ranges = {
            "layers": self._layers,
            "low": -self._range[0],
            "high": self._range[1],
            "known": self._has_ranges,
        }
        return {"fake_quantization": ranges}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the ranges."""
        ranges = state["fake_quantization"]
        self._range[0] = -ranges["low"]
        self._range[1] = ranges["high"]
        self._has_ranges = ranges["known"]
