"""One observed forward pass: output shapes, FLOPs and tensors saved for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from data.batch import map_tensors
from trainer.nested import first_tensor
from trainer.rng import preserved
from trainer.summary.module_state import kept

Call = Callable[[nn.Module, Any], Any]
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(slots=True)
class Probe:
    """The results of a forward pass; `shapes` and `flops` are by module name."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    total_flops: int | None = None
    saved_bytes: int | None = None
    problem: str | None = None


def probe(
    model: nn.Module,
    example: Any,
    call: Call,
    autocast: Context = nullcontext,
    compute: bool = False,
) -> Probe:
    """Run `call(model, example)` on the meta device, or on the model's device if that fails.

    With `compute` a CPU is tried first: a run computes more than that anyway, while torch imports
    sympy for the meta device, which takes seconds. Parameters, buffers, other attributes of the
    modules, random states and the training mode are left unchanged.
    """
    if any(hasattr(p, "full_tensor") for p in model.parameters()):
        return Probe(
            problem="its parameters are sharded"
        )  # their modules do not accept replacement tensors
    step = _Step(model, call)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    counted = _counts_attention() and not any(map(_uncounted, model.modules()))
    if compute and device.type == "cpu" and counted:
        with suppress(Exception):  # to be told below
            return _try(step, example, device, autocast)
    with suppress(Exception):  # a tensor created on the CPU, an operator without a meta kernel, ...
        return _try(step, example, torch.device("meta"), autocast)
    try:
        return _try(step, example, device, autocast)
    except Exception as error:  # a summary without this part is still useful
        reason = str(error).strip().partition("\n")[0]
        return Probe(problem=f"{type(error).__name__}: {reason}")


class _Step(nn.Module):
    """A model and its call as one module, whose tensors functional_call can replace."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, example: Any) -> Any:
        return self._call(self.model, example)


def _try(step: _Step, example: Any, device: torch.device, autocast: Context) -> Probe:
    tensors = {name: _stand_in(t, device) for name, t in step.named_parameters()}
    tensors |= {name: _stand_in(t, device) for name, t in step.named_buffers()}
    batch = map_tensors(lambda t: t.to(device), example)
    saved = _Saved([*tensors.values(), *_tensors_of(batch)])
    found = Probe()
    with (
        preserved(device),
        kept(step.model),
        FlopCounterMode(display=False) as counter,
        _watching(step.model, counter, found),
        saved.counting(),
        torch.enable_grad(),
        autocast(),
    ):
        output = functional_call(step, tensors, (batch,))
    del output  # it kept the saved tensors alive until here
    found.total_flops, found.saved_bytes = counter.get_total_flops(), saved.bytes
    return found


def _counts_attention() -> bool:
    """Return whether torch counts the FLOPs of its attention on CPUs: later ones than 2.11 do."""
    return any("flash_attention_for_cpu" in str(operator) for operator in flop_registry)


def _uncounted(module: nn.Module) -> bool:
    """Return whether torch has a kernel for a module on CPUs that it counts no FLOPs of."""
    return isinstance(module, nn.RNNBase)


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a replacement of one of the model's tensors, which a forward pass may write to."""
    if device.type == "meta":
        return torch.empty_like(tensor, device=device).requires_grad_(tensor.requires_grad)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _tensors_of(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, batch)
    return found


@contextmanager
def _watching(model: nn.Module, counter: FlopCounterMode, found: Probe) -> Iterator[None]:
    """Record each module's output shape and FLOPs, by hooks that are removed at the end."""
    entered: list[int] = []

    def enter(*_: Any) -> None:
        entered.append(counter.get_total_flops())

    def leave(name: str, output: Any) -> None:
        flops = counter.get_total_flops() - entered.pop()
        found.flops[name] = found.flops.get(name, 0) + flops
        if (tensor := first_tensor(output)) is not None:
            found.shapes[name] = tuple(tensor.shape)

    def leaving(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: leave(name, output)

    handles = []
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leaving(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Saved:
    """Sum the bytes that autograd saves, each storage once, without those of `known` tensors."""

    def __init__(self, known: list[Tensor]) -> None:
        self.bytes = 0
        self._seen = {_storage(tensor) for tensor in known}
        self._alive = known  # the address of a freed storage would be reused

    def counting(self) -> AbstractContextManager[Any]:
        """Return the context in which saved tensors are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._add, lambda tensor: tensor)

    def _add(self, tensor: Tensor) -> Tensor:
        self._alive.append(tensor)
        if (key := _storage(tensor)) not in self._seen:
            self._seen.add(key)
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # all meta tensors have the data pointer 0
