"""A model before it is trained: its modules, their outputs and FLOPs, and the memory it needs."""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from regimen.data.batch import map_tensors
from regimen.trainer.files.layout import aligned, count, size
from regimen.trainer.optimizers.state import take_step
from regimen.trainer.rng import seeded
from regimen.trainer.task import tensors_of

Call = Callable[[nn.Module, Any], Any]
Context = Callable[[], AbstractContextManager[Any]]


class ModuleRow(NamedTuple):
    """One module, including all modules inside it."""

    name: str  # empty for the model itself
    kind: str
    output: str  # shape of its output, N is the batch; empty if it was not called
    parameters: int
    trainable: int
    flops: int | None  # of the forward pass of one sample; a multiply-add counts as two


class Summary(NamedTuple):
    """The rows, of which the first is the model's, and what one sample takes."""

    rows: tuple[ModuleRow, ...]
    flops: int | None  # of the forward pass
    activation_bytes: int | None  # kept for the backward pass
    problem: str | None = None  # why the forward pass failed


class _Seen(NamedTuple):
    """What was seen in a forward pass."""

    shapes: dict[str, list[tuple[int, ...]]]  # of all outputs of a module, by its name
    flops: FlopCounterMode
    saved: int  # bytes


def summarize(
    model: nn.Module,
    example: Any,
    depth: int = 2,
    call: Call = nn.Module.__call__,
    autocast: Context = nullcontext,
    compute: bool = False,
    samples: int | None = None,
) -> Summary:
    """Describe the modules down to `depth`, after one forward pass on `example`, a batch.

    `call(model, example)` is the pass; with a task's `training_step` the loss is included.
    `samples`: of the batch, by default the length of its first tensor; BatchNorm needs two or more.
    The pass is on the meta device, or on the model's device if that fails; with `compute` a CPU is
    tried first: a run computes more than that anyway, while torch imports sympy for the meta
    device, which takes seconds. Parameters, buffers, attributes, random states and the training
    mode are left unchanged.
    """
    samples = samples or next((len(t) for t in tensors_of(example) if t.ndim), 1)
    seen, problem = _try(model, example, call, autocast, compute)
    flops = seen.flops.get_flop_counts() if seen else {}
    rows = []
    for name, module in model.named_modules():
        if name.count(".") + bool(name) > depth:
            continue
        own, shapes = list(module.parameters()), seen.shapes.get(name) if seen else None
        outputs = [
            " x ".join("N" if i == 0 and n == samples else str(n) for i, n in enumerate(shape))
            for shape in shapes or ()
        ]
        row = ModuleRow(
            name,
            type(module).__name__,
            ", ".join(output or "scalar" for output in outputs),
            sum(p.numel() for p in own),
            sum(p.numel() for p in own if p.requires_grad),
            None
            if shapes is None
            else sum(flops.get(f"_Step.model.{name}".rstrip("."), {}).values()) // samples,
        )
        rows.append(row)
    if seen is None:
        return Summary(tuple(rows), None, None, problem)
    return Summary(tuple(rows), seen.flops.get_total_flops() // samples, seen.saved // samples)


class _Step(nn.Module):
    """A model and its call as one module, whose tensors `functional_call` can replace."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model, self._call = model, call

    def forward(self, example: Any) -> Any:
        return self._call(self.model, example)


def _try(
    model: nn.Module, example: Any, call: Call, autocast: Context, compute: bool
) -> tuple[_Seen | None, str | None]:
    """Return what is seen in a pass, or why it failed."""
    if any(hasattr(p, "full_tensor") for p in model.parameters()):
        return None, "its parameters are sharded"  # their modules do not accept replacements
    own = next((p.device for p in model.parameters()), torch.device("cpu"))
    # torch has kernels on CPUs that it counts no FLOPs of: of recurrent modules, and up to 2.11 of
    # attention.
    counted = any("flash_attention_for_cpu" in str(operator) for operator in flop_registry)
    counted = counted and not any(isinstance(module, nn.RNNBase) for module in model.modules())
    places, problem = [torch.device("meta"), own], None
    for device in reversed(places) if compute and own.type == "cpu" and counted else places:
        try:
            return _observe(_Step(model, call), example, device, autocast), None
        except Exception as error:
            # A tensor created on the CPU, an operator without a meta kernel, ...: the own device's
            # error is the one to tell.
            if device == own:
                problem = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return None, problem


def _observe(step: _Step, example: Any, device: torch.device, autocast: Context) -> _Seen:
    shapes: dict[str, list[tuple[int, ...]]] = {}
    saved: dict[int, Tensor] = {}  # by storage; alive, or the address of one would be reused

    def save(tensor: Tensor) -> Tensor:
        saved[_storage(tensor)] = tensor
        return tensor

    def leave(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if found := [tuple(tensor.shape) for tensor in tensors_of(output)]:
            shapes[name] = found

    tensors: dict[str, Tensor] = {}
    for name, tensor in (*step.named_parameters(), *step.named_buffers()):
        on_meta = device.type == "meta"
        own = torch.empty_like(tensor, device=device) if on_meta else tensor.detach().clone()
        tensors[name] = own.requires_grad_(tensor.requires_grad)
    batch = map_tensors(lambda tensor: tensor.to(device), example)
    # What the pass assigns to attributes is put back.
    before = [(module, dict(vars(module))) for module in step.model.modules()]
    flops, saving = FlopCounterMode(display=False), torch.autograd.graph.saved_tensors_hooks
    modules = step.model.named_modules()
    handles = [module.register_forward_hook(partial(leave, name)) for name, module in modules]
    try:
        with seeded(device), flops, saving(save, lambda t: t), torch.enable_grad(), autocast():
            functional_call(step, tensors, (batch,))
    finally:
        for handle in handles:
            handle.remove()
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
    given = {_storage(tensor) for tensor in (*tensors.values(), *tensors_of(batch))}
    sizes = [t.untyped_storage().nbytes() for place, t in saved.items() if place not in given]
    return _Seen(shapes, flops, sum(sizes))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # all meta tensors have the data pointer 0


def render(summary: Summary, width: int = 100) -> str:
    """Return the summary as text: the table of modules and a line of totals."""
    cells = [["module", "type", "output", "parameters", "FLOPs"]]
    for row in summary.rows:
        level, last = row.name.count(".") + bool(row.name), row.name.rpartition(".")[2]
        frozen = " frozen" if row.parameters and not row.trainable else ""
        parameters = f"{row.parameters:,}{frozen}" if row.parameters else "-"
        flops = count(row.flops) if row.flops else "-"
        name = "  " * level + (last or "(model)")
        cells.append([name, row.kind, row.output or "-", parameters, flops])
    whole = summary.rows[0]
    frozen = f", {n:,} of them frozen" if (n := whole.parameters - whole.trainable) else ""
    taken = (
        f"a sample takes {count(summary.flops)}FLOPs forward "
        f"and {size(summary.activation_bytes)} of activations"
    )
    if summary.problem:
        taken = f"the forward pass failed: {summary.problem}"
    totals = f"{whole.parameters:,} parameters{frozen}; {taken}"
    table = aligned(cells, width, last=2, right=("parameters", "FLOPs"))
    return "\n".join([*table, "", totals])


def estimate(
    model: nn.Module,
    summary: Summary,
    optimizers: Iterable[Optimizer],
    micro_batch: int,
    shards: int = 1,
) -> dict[str, int | None]:
    """Return the bytes on one device by what takes them; None where they are unknown.

    `shards`: what parameters, gradients and optimizer state are divided into.
    """
    parameters, states = list(model.parameters()), [state_bytes(one) for one in optimizers]
    one, known = summary.activation_bytes, sum(state or 0 for state in states)
    return {
        "parameters": sum(p.nbytes for p in parameters) // shards,
        "buffers": sum(b.nbytes for b in model.buffers()),
        "gradients": sum(p.nbytes for p in parameters if p.requires_grad) // shards,
        "optimizer state": None if None in states else known // shards,
        "activations": None if one is None else one * micro_batch,
    }


def state_bytes(optimizer: Optimizer) -> int | None:
    """Return the bytes of the state that `optimizer` will hold after its first step.

    A copy of it over meta parameters takes that step, so that the result is exact for any
    optimizer. None for an optimizer that needs a closure or does not accept meta parameters.
    """
    there = [tensor for tensor in tensors_of(optimizer.state) if tensor.ndim]  # no count of steps
    instead: dict[int, Any] = {id(t): torch.empty_like(t, device="meta") for t in there}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        own = instead[id(parameter)] = torch.empty_like(parameter, device="meta").requires_grad_()
        own.grad = torch.empty_like(own)
    try:
        twin = copy.deepcopy(optimizer, instead)
        for group in twin.param_groups:
            group |= {name: False for name in ("fused", "foreach", "capturable") if name in group}
        take_step(twin)
    except Exception:  # any optimizer class, on tensors that it may not support
        return None
    values = [v for state in twin.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum(value.nbytes for value in values)
