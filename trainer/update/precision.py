"""How passes are computed: in which number format, and what is recomputed to save memory."""

import fnmatch
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from regimen.conf.errors import truncated_list
from regimen.trainer.device import accumulate_dtype, autocasts, has_hardware_format, product_name
from regimen.trainer.errors import ModelError
from regimen.trainer.strategies.strategy import NULL_CONTEXT
from regimen.trainer.task import in_format

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PARAMETERS = {"bf16_true": torch.bfloat16, "fp64": torch.float64}
_KEY = "trainer.activation_checkpointing"
_CPU_INFO = Path("/proc/cpuinfo")  # of Linux
# Flags of a CPU, and the format that they add without emulation.
_CPU_FLAGS = {"avx512_bf16": "bf16", "amx_bf16": "bf16", "bf16": "bf16", "avx512_fp16": "fp16"}
NAMES = ("fp32", "tf32", "bf16", "fp16", "bf16_true", "fp64")


class Precision:
    """Run forward passes in a format and scale losses where the format needs it.

    `fp32`, `tf32` (matrix products on the GPU's TensorFloat units), `bf16` and `fp16` (autocast),
    `bf16_true` and `fp64` (parameters and inputs in that format). Raises ModelError for a format
    that the kind of device does not have.
    """

    def __init__(
        self, name: str = "fp32", device_type: str = "cpu", scaler: Mapping[str, Any] | None = None
    ) -> None:
        if name not in NAMES:
            raise ValueError(f"precision {name!r} is none of {', '.join(NAMES)}")
        self.name = name
        self.scales = name == "fp16"  # overflows are expected then, and handled by the scaler
        self.dtype = _PARAMETERS.get(name)  # of parameters and inputs; None: as they are
        self._autocast = _AUTOCAST.get(name)
        self._device_type = device_type
        if (self._autocast and not autocasts(device_type, self._autocast)) or (
            name == "fp64" and accumulate_dtype(torch.device(device_type)) != torch.float64
        ):
            message = f"{device_type} does not compute in {name}"
            raise ModelError("trainer.precision", message, "fp32 is everywhere")
        self.scaler = torch.amp.GradScaler(device_type, enabled=self.scales, **(scaler or {}))

    def convert(self, model: nn.Module) -> nn.Module:
        """Store the parameters and floating-point buffers in the format; in place.

        Raises ModelError for complex parameters whose gradients cannot be scaled.
        """
        if self.scales and any(p.is_complex() for p in model.parameters()):
            message = "fp16 scales the loss, for which torch has no kernel for complex gradients"
            raise ModelError("trainer.precision", message, "use fp32, bf16 or fp64")
        return model if self.dtype is None else in_format(model, self.dtype)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        if self._autocast is None:
            return NULL_CONTEXT
        return torch.autocast(self._device_type, dtype=self._autocast)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, scaled; those of a non-finite loss are NaN.

        So all processes learn of it from the gradients, and the host reads nothing else.
        """
        scaled = self.scaler.scale(loss)  # nothing without a scale
        if loss.device.type == "cpu" and math.isfinite(loss.item()):  # reading costs nothing there
            ones = torch.ones_like(scaled)  # not kept: a gradient may share its memory
        else:
            ones = torch.rsub(loss.detach(), 1, alpha=0)  # 1 - 0 * loss, in one kernel
        if type(scaled) is not Tensor:
            scaled.backward(ones)  # type: ignore[no-untyped-call]
        else:  # without the checks of arguments, which take 30 us
            Variable._execution_engine.run_backward(
                (scaled,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )

    @property
    def scale(self) -> float:
        """The factor by which losses are scaled."""
        return float(self.scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty without one."""
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a scaler's state; a run that scales starts afresh if there is none."""
        if state:
            self.scaler.load_state_dict(dict(state))


def format_remark(key: str, name: str, device: torch.device) -> str | None:
    """Return that a device emulates the format that a key names, or lacks it; None otherwise."""
    units = name.removesuffix("_true")
    if device.type == "cpu":
        if units not in _AUTOCAST or not _CPU_INFO.exists() or units in cpu_formats():
            return None
        return f"{key}={name}: this CPU emulates it, fp32 is faster"
    if units == "bf16" and not has_hardware_format(device, "bf16"):
        return (
            f"{key}={name}: {product_name(device)} emulates bfloat16, fp32 is faster; "
            "fp16 may be faster still"
        )
    if units == "tf32" and not has_hardware_format(device, "tf32"):
        return f"{key}={name}: {product_name(device)} has no TF32 units and computes in fp32"
    return None


def cpu_formats() -> set[str]:
    """Return which of bf16 and fp16 the CPU is known to compute in without emulation."""
    words = _CPU_INFO.read_text(errors="replace").split() if _CPU_INFO.exists() else []
    return {name for flag, name in _CPU_FLAGS.items() if flag in words}


def compiled_model(
    model: nn.Module, choice: bool | dict[str, Any], regions: Sequence[nn.Module] | None = None
) -> nn.Module:
    """Return the model as torch.compile makes it; of `regions` each is compiled by itself."""
    if choice is False:
        return model
    # By default torch switches to dynamic shapes at the second shape: a run resumed after that
    # would use other kernels, and not be exact.
    options = {"dynamic": False} | (choice if isinstance(choice, dict) else {})
    options.pop("regions", None)
    if regions is None:
        return torch.compile(model, **options)  # type: ignore
    for module in regions:
        module.compile(**options)
    return model


def checkpoint_modules(
    model: nn.Module, patterns: Sequence[str], compiled: bool = False
) -> list[str]:
    """Let the modules whose full names match a glob be recomputed in the backward pass.

    `compiled`: whether the model will be, by torch.compile.
    Returns their names. Of nested matches only the outermost is. A pattern without a match is an
    error. Names of modules and of the state dict do not change.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ModelError(
                _KEY, f"{pattern!r} matches no module", f"there are {truncated_list(names, 12)}"
            )
    chosen: list[str] = []
    for name in names:
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if not inside and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            chosen.append(name)
            module = model.get_submodule(name)
            module.forward = _recomputed(module, module.forward, compiled)
    return chosen


def checkpoint_segments(model: nn.Module, segments: int, compiled: bool = False) -> None:
    """Let the layers of an `nn.Sequential` be recomputed, in so many segments."""
    key = f"{_KEY}_segments"
    if not isinstance(model, nn.Sequential):
        message = f"needs an nn.Sequential, but the model is a {type(model).__name__}"
        raise ModelError(key, message, f"name modules in {_KEY} instead")
    if not 1 <= segments <= len(model):
        raise ModelError(key, f"{segments} segments, but the model has {len(model)} layers")
    layers, size = list(model), len(model) // segments  # as torch's checkpoint_sequential cuts
    bounds = [*(size * i for i in range(segments)), len(layers)]
    runs = [functools.partial(_run, layers[low:high]) for low, high in itertools.pairwise(bounds)]
    # The activations of the last of several segments are needed immediately.
    kept = len(runs) - 1 or 1
    parts: list[Callable[[Any], Any]]
    parts = [*(_recomputed(model, run, compiled) for run in runs[:kept]), *runs[kept:]]
    model.forward = functools.partial(_run, parts)  # type: ignore[method-assign]


def _run(layers: Sequence[Callable[[Any], Any]], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def _recomputed(module: nn.Module, plain: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _FrozenStatistics(module)

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    if compiled:
        # The compiler takes no contexts: it compiles what is around this call, and what is within.
        return torch.compiler.disable(forward, recursive=False)  # type: ignore
    return forward


class _FrozenStatistics(AbstractContextManager[None]):
    """Let a recomputation move copies of BatchNorm's statistics: the first pass has moved them.

    For second derivatives a pass is recomputed twice, so that this is entered again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._norms = [m for m in module.modules() if hasattr(m, "num_batches_tracked")]
        self._kept: list[list[dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        self._kept.append([norm._buffers for norm in self._norms])
        for norm in self._norms:
            norm._buffers = {n: None if b is None else b.clone() for n, b in norm._buffers.items()}

    def __exit__(self, *error: Any) -> None:
        for norm, buffers in zip(self._norms, self._kept.pop(), strict=True):
            norm._buffers = buffers
