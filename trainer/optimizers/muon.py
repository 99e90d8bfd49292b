"""torch's Muon optimizer for matrices and convolution kernels."""

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regimen.trainer.fast import foreach_div_, foreach_mul_, foreach_norm


class Muon(torch.optim.Muon):
    """Train matrices as torch's Muon does, and a kernel (out, in, ...) as the matrix (out, -1).

    Takes the arguments of `torch.optim.Muon`, which accepts matrices only, and `normalized`: before
    each step a matrix (rows, columns) is scaled to the norm sqrt(rows), for layers whose scale has
    no effect, such as those before BatchNorm. The state has the shape of the parameter. Raises
    ValueError for vectors and scalars.

    Like torch's fused kernels, it skips a step where the attribute `found_inf` is a tensor of 1.
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
        if ns_steps < 1 or not eps > 0:
            raise ValueError(
                f"ns_steps={ns_steps}, eps={eps}: expected at least 1, and more than 0"
            )
        # torch's constructor checks the other options, and refuses kernels: it is given a matrix.
        probe = [nn.Parameter(torch.zeros(1, 1))]
        super().__init__(
            probe,
            lr,
            weight_decay,
            momentum,
            nesterov,
            ns_coefficients,
            eps,
            ns_steps,
            adjust_lr_fn,
        )
        torch.optim.Optimizer.__init__(self, params, self.defaults | {"normalized": normalized})
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim < 2:
                    shape = tuple(p.shape)
                    raise ValueError(f"Muon trains matrices and kernels, not shape {shape}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, or, where the device holds a `found_inf` of 1, leave everything as it is."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            self._normalize()
            return super().step(closure)  # type: ignore[no-untyped-call]

        # The flag stays on the device, so that the host need not wait: the step is always computed,
        # and each tensor takes its old or its new value.
        saved = []
        for p in self._trained(self.param_groups):
            self._allocate_momentum(p)
            for tensor in (p, self.state[p]["momentum_buffer"]):
                saved.append((tensor, tensor.clone()))
        self._normalize()
        loss = super().step(closure)  # type: ignore[no-untyped-call]
        skip = found_inf > 0
        for tensor, old in saved:
            torch.where(skip, old, tensor, out=tensor)
        return loss

    def _trained(self, groups: Iterable[Mapping[str, Any]]) -> list[Tensor]:
        return [p for group in groups for p in group["params"] if p.grad is not None]

    def _normalize(self) -> None:
        matrices = self._trained(group for group in self.param_groups if group["normalized"])
        if matrices:
            foreach_div_(matrices, foreach_norm(matrices))
            foreach_mul_(matrices, [math.sqrt(len(p)) for p in matrices])

    def _init_group(
        self,
        group: MutableMapping[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        muon_momentum_bufs: list[Tensor],
    ) -> bool:
        for p in self._trained([group]):
            self._allocate_momentum(p)
        tensors: tuple[list[Tensor], ...] = ([], [], [])
        has_complex = super()._init_group(group, *tensors)
        for p, grad, momentum in zip(*tensors, strict=True):
            order = _dims_by_stride(p)
            shape = (p.shape[0], -1)
            # The first two are views: torch updates the parameter and its state through them.
            params_with_grad.append(p.permute(order).view(shape))
            muon_momentum_bufs.append(momentum.permute(order).view(shape))
            grads.append(grad.permute(order).reshape(shape))
        return has_complex

    def _allocate_momentum(self, parameter: Tensor) -> None:
        """Keep the momentum in the memory format of the parameter, whatever the gradient's is."""
        state = self.state[parameter]
        momentum = state.get("momentum_buffer")
        if momentum is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        elif momentum.stride() != parameter.stride():  # from another memory format
            state["momentum_buffer"] = torch.empty_like(parameter).copy_(momentum)


def _dims_by_stride(parameter: Tensor) -> list[int]:
    """Return the dimensions ordered by stride, with dimension 0 first.

    In this order a `channels_last` kernel can be viewed as a matrix without a copy. The update does
    not depend on the order of the columns of a matrix.
    """
    strides = parameter.stride()
    return [0, *sorted(range(1, parameter.ndim), key=lambda d: -strides[d])]
