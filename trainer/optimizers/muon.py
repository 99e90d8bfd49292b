"""torch's Muon optimizer for matrices and convolution kernels."""

import math
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regimen.trainer.optimizers.state import foreach_div_, foreach_mul_, foreach_norm


class Muon(torch.optim.Muon):
    """Train matrices as torch's Muon does, and a kernel (out, in, ...) as the matrix (out, -1).

    Takes the arguments of `torch.optim.Muon`, which accepts matrices only, and `normalized`: before
    each step a matrix (rows, columns) is scaled to the norm sqrt(rows), for layers whose scale has
    no effect, such as those before BatchNorm. The state has the shape of the parameter. Raises
    ValueError for vectors and scalars.

    A step can be left out by the device, as by torch's fused kernels: `found_inf` = 1.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None = None,
        normalized: bool = False,
    ) -> None:
        # Its constructor checks the options, and refuses what is no matrix.
        one = [nn.Parameter(torch.zeros(1, 1))]
        super().__init__(
            one, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn
        )
        torch.optim.Optimizer.__init__(self, params, self.defaults | {"normalized": normalized})
        shapes = [tuple(p.shape) for group in self.param_groups for p in group["params"]]
        if wrong := [shape for shape in shapes if len(shape) < 2]:
            raise ValueError(f"Muon trains matrices and kernels, not shape {wrong[0]}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, or, where the device holds a `found_inf` of 1, leave everything as it is."""
        before = []
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            left_out = found_inf > 0
            trained = [p for group in self.param_groups for p in group["params"]]
            for p in [p for p in trained if p.grad is not None]:
                self._lay_out(p)
                before += [(t, t.clone()) for t in (p, self.state[p]["momentum_buffer"])]
        self._normalize()
        loss = super().step(closure)  # type: ignore[no-untyped-call]
        for now, old in before:
            torch.where(left_out, old, now, out=now)
        return loss

    def _normalize(self) -> None:
        groups = [group["params"] for group in self.param_groups if group["normalized"]]
        if matrices := [p for group in groups for p in group if p.grad is not None]:
            foreach_div_(matrices, foreach_norm(matrices))
            foreach_mul_(matrices, [math.sqrt(len(p)) for p in matrices])

    def _init_group(
        self,
        group: MutableMapping[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        muon_momentum_bufs: list[Tensor],
    ) -> bool:
        for p in group["params"]:
            if p.grad is not None:
                self._lay_out(p)
        tensors: tuple[list[Tensor], ...] = ([], [], [])
        has_complex = super()._init_group(group, *tensors)
        for p, grad, momentum in zip(*tensors, strict=True):
            order, shape = _layout(p), (p.shape[0], -1)
            # These two are views: torch updates the parameter and its state through them.
            params_with_grad.append(p.permute(order).view(shape))
            muon_momentum_bufs.append(momentum.permute(order).view(shape))
            grads.append(grad.permute(order).reshape(shape))
        return has_complex

    def _lay_out(self, parameter: Tensor) -> None:
        """Keep the momentum in the memory format of the parameter, whatever the gradient's is."""
        state = self.state[parameter]
        momentum = state.get("momentum_buffer")
        if momentum is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        elif momentum.stride() != parameter.stride():  # of a run with another memory format
            state["momentum_buffer"] = torch.empty_like(parameter).copy_(momentum)


def _layout(parameter: Tensor) -> list[int]:
    """Return the dimensions ordered by stride, with dimension 0 first.

    In this order a `channels_last` kernel can be viewed as a matrix without a copy. The update does
    not depend on the order of the columns of a matrix.
    """
    strides = parameter.stride()
    return [0, *sorted(range(1, parameter.ndim), key=lambda d: -strides[d])]
