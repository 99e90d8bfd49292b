"""Number formats of a run: autocast, loss scaling, the format of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from conf.errors import Problem
from trainer.errors import ModelError
from trainer.task import in_format

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PARAMETERS = {"bf16_true": torch.bfloat16, "fp64": torch.float64}
_AS_IT_IS = nullcontext()
# Flags of a CPU, and the format that they add without emulation.
_CPU_FLAGS = {"avx512_bf16": "bf16", "amx_bf16": "bf16", "bf16": "bf16", "avx512_fp16": "fp16"}
_CPU_INFO = Path("/proc/cpuinfo")
NAMES = ("fp32", "tf32", "bf16", "fp16", "bf16_true", "fp64")


class Precision:
    """Run forward passes in a format and scale losses where the format needs it.

    `fp32`, `tf32` (matrix products on the GPU's TensorFloat units), `bf16` and `fp16` (autocast),
    `bf16_true` and `fp64` (parameters and inputs in that format).
    """

    def __init__(
        self, name: str = "fp32", device_type: str = "cpu", scaler: Mapping[str, Any] | None = None
    ) -> None:
        if name not in NAMES:
            raise ValueError(f"precision {name!r} is none of {', '.join(NAMES)}")
        self.name = name
        self.dtype = _PARAMETERS.get(name)  # of parameters and inputs; None: as they are
        self._autocast = _AUTOCAST.get(name)
        self._device_type = device_type
        self.scaler = torch.amp.GradScaler(device_type, enabled=name == "fp16", **(scaler or {}))

    @property
    def scales(self) -> bool:
        """Whether losses are scaled: overflows are expected then, and handled by the scaler."""
        return self.name == "fp16"

    def convert(self, model: nn.Module) -> nn.Module:
        """Store the parameters and floating-point buffers in the format; in place.

        Raises ModelError for complex parameters whose gradients cannot be scaled.
        """
        if self.scales and any(p.is_complex() for p in model.parameters()):
            message = "fp16 scales the loss, for which torch has no kernel for complex gradients"
            raise ModelError(Problem("trainer.precision", message, "use fp32, bf16 or fp64"))
        return model if self.dtype is None else in_format(model, self.dtype)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        if self._autocast is None:
            return _AS_IT_IS
        return torch.autocast(self._device_type, dtype=self._autocast)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, scaled; those of a non-finite loss are NaN.

        So all processes learn of it from the gradients, and the host reads nothing else.
        """
        scaled: Tensor = self.scaler.scale(loss) if self.scales else loss
        if loss.device.type == "cpu" and math.isfinite(loss.item()):  # reading costs nothing there
            _backward(scaled)
        else:
            ones = torch.rsub(loss.detach(), 1, alpha=0)  # 1 - 0 * loss, in one kernel
            scaled.backward(ones)  # type: ignore[no-untyped-call]

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients by the scale, and check them for infinities."""
        if self.scales:
            for optimizer in optimizers:
                self.scaler.unscale_(optimizer)

    def update_scale(self) -> None:
        """Halve the scale after an overflow; raise it after many updates without one."""
        if self.scales:
            self.scaler.update()

    @property
    def scale(self) -> float:
        """The factor by which losses are scaled."""
        return float(self.scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty without one."""
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a scaler's state; a run that scales starts afresh if there is none."""
        if self.scales and state:
            self.scaler.load_state_dict(dict(state))


def cpu_formats(cpuinfo: Path = _CPU_INFO) -> set[str] | None:
    """Return which of bf16 and fp16 the CPU computes in without emulation; None if unknown."""
    if not cpuinfo.exists():
        return None
    words = set(cpuinfo.read_text(errors="replace").split())
    return {name for flag, name in _CPU_FLAGS.items() if flag in words}


def _backward(loss: Tensor) -> None:
    """Compute `loss.backward()` on a CPU without the checks of its arguments, which take 30 us."""
    if type(loss) is not Tensor or not loss.is_floating_point():
        loss.backward()  # type: ignore[no-untyped-call]
        return
    ones = torch.ones_like(loss)  # not kept: a gradient may share its memory
    Variable._execution_engine.run_backward(
        (loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
