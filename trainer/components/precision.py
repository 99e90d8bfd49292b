"""In which number format passes are computed, and compiled by torch.compile or not."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regimen.trainer import fast
from regimen.trainer.device import accumulate_dtype, autocasts, has_hardware_format, product_name
from regimen.trainer.errors import ModelError
from regimen.trainer.strategies.strategy import NULL_CONTEXT, instances
from regimen.trainer.task import in_format

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PARAMETERS = {"bf16_true": torch.bfloat16, "fp64": torch.float64}
_CPU_INFO = Path("/proc/cpuinfo")  # of Linux
# Flags of a CPU, and the format that they add without emulation.
_CPU_FLAGS = {"avx512_bf16": "bf16", "amx_bf16": "bf16", "bf16": "bf16", "avx512_fp16": "fp16"}
NAMES = ("fp32", "tf32", "bf16", "fp16", "bf16_true", "fp64")


class Precision:
    """Run forward passes in a format and scale losses where the format needs it.

    `fp32`, `tf32` (matrix products on the GPU's TensorFloat units), `bf16` and `fp16` (autocast),
    `bf16_true` and `fp64` (parameters and inputs in that format). Raises ModelError for a format
    that the device lacks.
    """

    def __init__(self, name: str = "fp32", device_type: str = "cpu") -> None:
        if name not in NAMES:
            raise ValueError(f"precision {name!r} is none of {', '.join(NAMES)}")
        self.name = name
        self.scales = name == "fp16"  # overflows are expected then, and handled by the scaler
        self.dtype = _PARAMETERS.get(name)  # of parameters and inputs; None: as they are
        self._autocast_dtype = _AUTOCAST.get(name)
        self._device_type = device_type
        if not self._is_supported():
            raise ModelError(
                "trainer.precision",
                f"{device_type} does not compute in {name}",
                "fp32 is everywhere",
            )
        self.scaler = torch.amp.GradScaler(device_type, enabled=self.scales)

    def _is_supported(self) -> bool:
        if self._autocast_dtype is not None:
            return autocasts(self._device_type, self._autocast_dtype)
        if self.name == "fp64":
            return accumulate_dtype(torch.device(self._device_type)) == torch.float64
        return True

    def convert(self, model: nn.Module) -> nn.Module:
        """Store the parameters and floating-point buffers in the format; in place.

        Raises ModelError for complex parameters, whose gradients cannot be scaled, with fp16.
        """
        if self.scales and any(p.is_complex() for p in model.parameters()):
            raise ModelError(
                "trainer.precision",
                "fp16 scales the loss, for which torch has no kernel for complex gradients",
                "use fp32, bf16 or fp64",
            )
        if self.dtype is None:
            return model
        return in_format(model, self.dtype)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        if self._autocast_dtype is None:
            return NULL_CONTEXT
        return torch.autocast(self._device_type, dtype=self._autocast_dtype)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, scaled; those of a non-finite loss are NaN.

        So all processes learn of a non-finite loss from the exchanged gradients, and the host does
        not have to read the loss.
        """
        # 1 - 0 * loss in one kernel: 1 for a finite loss, else NaN.
        gradient = torch.rsub(loss.detach(), 1, alpha=0)
        fast.run_backward(self.scaler.scale(loss), gradient)

    @property
    def scale(self) -> float:
        """The factor by which losses are scaled."""
        return float(self.scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty without one."""
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a scaler's state; if there is none, a run that scales begins with its first one."""
        if state:
            self.scaler.load_state_dict(dict(state))


def format_remark(key: str, name: str, device: torch.device) -> str | None:
    """Return that a device emulates the format that a key names, or lacks it; None otherwise."""
    units = name.removesuffix("_true")
    if device.type == "cpu":
        if units not in _AUTOCAST or not _CPU_INFO.exists() or units in cpu_formats():
            return None
        return f"{key}={name}: this CPU emulates it, fp32 is faster"
    if units not in ("bf16", "tf32") or has_hardware_format(device, units):
        return None
    if units == "tf32":
        return f"{key}={name}: {product_name(device)} has no TF32 units and computes in fp32"
    return (
        f"{key}={name}: {product_name(device)} emulates bfloat16, fp32 is faster; "
        "fp16 may be faster still"
    )


def cpu_formats() -> set[str]:
    """Return which of bf16 and fp16 the CPU is known to compute in without emulation."""
    if not _CPU_INFO.exists():
        return set()
    words = _CPU_INFO.read_text(errors="replace").split()
    return {name for flag, name in _CPU_FLAGS.items() if flag in words}


def compiled_regions(model: nn.Module, choice: bool | Mapping[str, Any]) -> list[nn.Module] | None:
    """Return the modules that are compiled one by one; None if the model is compiled as a whole.

    Raises ModelError for a class of which the model has no module.
    """
    classes = choice.get("regions") if isinstance(choice, Mapping) else None
    if classes is None:
        return None
    return instances(model, classes, "trainer.compile.regions")


def compiled_model(
    model: nn.Module, choice: bool | dict[str, Any], regions: Sequence[nn.Module] | None = None
) -> nn.Module:
    """Return the model as torch.compile makes it; of `regions` each is compiled by itself."""
    if choice is False:
        return model
    # By default torch switches to dynamic shapes at the second shape: a run resumed after that
    # would use other kernels, and not be exact.
    options: dict[str, Any] = {"dynamic": False}
    if isinstance(choice, dict):
        options |= choice
    options.pop("regions", None)
    if regions is None:
        return torch.compile(model, **options)  # type: ignore
    for module in regions:
        module.compile(**options)
    return model
