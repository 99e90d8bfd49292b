"""A model before it is trained: its modules, their outputs and FLOPs, and the memory it needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from data.batch import map_tensors
from trainer.optimizers.steps import take_step
from trainer.rng import preserved
from trainer.summary.text import count, natural_width, size, table, to_text
from trainer.task import first_tensor, tensors_of

if TYPE_CHECKING:
    from rich.table import Table

Call = Callable[[nn.Module, Any], Any]
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module, including all modules inside it."""

    name: str  # empty for the model itself
    kind: str
    level: int  # 0 for the model itself
    output: str  # shape of its output, N is the batch; empty if it was not called
    parameters: int
    trainable: int
    flops: int | None  # of the forward pass of one sample; a multiply-add counts as two


@dataclass(frozen=True, slots=True)
class Summary:
    """The rows, and the totals in elements, FLOPs and bytes."""

    rows: tuple[ModuleRow, ...]
    parameters: int
    trainable: int
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    flops: int | None  # of the forward pass of one sample
    activation_bytes: int | None  # kept for the backward pass, for one sample
    problem: str | None = None  # why the forward pass failed


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device; None where they are unknown."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int | None
    activations: int | None  # of one micro-batch
    data: int | None = 0  # kept on the device (data.cache=device)

    @property
    def total(self) -> int:
        """The sum of all known parts in bytes."""
        known = (self.parameters, self.buffers, self.gradients, self.optimizer, self.activations)
        return sum(part or 0 for part in (*known, self.data))

    @property
    def complete(self) -> bool:
        """Whether every part is known."""
        return None not in (self.optimizer, self.activations, self.data)


def _size(shape: Sequence[int], samples: int) -> str:
    sizes = ["N" if i == 0 and n == samples else str(n) for i, n in enumerate(shape)]
    return " x ".join(sizes) or "scalar"


def summarize(
    model: nn.Module,
    example: Any,
    depth: int = 2,
    call: Call | None = None,
    autocast: Context = nullcontext,
    compute: bool = False,
) -> Summary:
    """Describe the modules down to `depth`, after one forward pass on `example`, a batch.

    `call(model, example)` is the pass (default: `model(example)`); with a task's `training_step`
    the loss is included. BatchNorm needs two samples or more. The pass is on the meta device, or on
    the model's device if that fails; with `compute` a CPU is tried first: a run computes more than
    that anyway, while torch imports sympy for the meta device, which takes seconds. Parameters,
    buffers, attributes, random states and the training mode are left unchanged.
    """
    first = first_tensor(example)
    samples = len(first) if first is not None and first.ndim else 1
    found, problem = _observed(model, example, call, autocast, compute)
    counted = found.flops.get_flop_counts() if found else {}
    rows = []
    for name, module in model.named_modules():
        level = name.count(".") + 1 if name else 0
        if level > depth:
            continue
        own, shapes = list(module.parameters()), found.shapes.get(name) if found else None
        flops = sum(counted.get(f"_Step.model.{name}".rstrip("."), {}).values())
        sizes = [_size(shape, samples) for shape in shapes or ()]
        rows.append(
            ModuleRow(
                name,
                type(module).__name__,
                level,
                ", ".join(sizes),
                sum(p.numel() for p in own),
                sum(p.numel() for p in own if p.requires_grad),
                None if shapes is None else flops // samples,
            )
        )
    parameters = list(model.parameters())
    return Summary(
        rows=tuple(rows),
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.nbytes for p in parameters),
        gradient_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
        buffer_bytes=sum(b.nbytes for b in model.buffers()),
        flops=found.flops.get_total_flops() // samples if found else None,
        activation_bytes=found.saved // samples if found else None,
        problem=problem,
    )


class _Step(nn.Module):
    """A model and its call as one module, whose tensors `functional_call` can replace."""

    def __init__(self, model: nn.Module, call: Call | None) -> None:
        super().__init__()
        self.model, self._call = model, call

    def forward(self, example: Any) -> Any:
        return self.model(example) if self._call is None else self._call(self.model, example)


class _Observation:
    """One forward pass: output shapes by module, FLOPs, bytes that autograd saves."""

    def __init__(self, step: _Step, example: Any, device: torch.device, autocast: Context) -> None:
        self.shapes: dict[str, list[tuple[int, ...]]] = {}  # of all its outputs
        self.flops = FlopCounterMode(display=False)
        self.saved = 0
        tensors = {name: _stand_in(t, device) for name, t in step.named_parameters()}
        tensors |= {name: _stand_in(t, device) for name, t in step.named_buffers()}
        self._alive = list(tensors.values())  # the address of a freed storage would be reused
        batch = map_tensors(lambda t: self._known(t.to(device)), example)
        self._seen = {_storage(tensor) for tensor in self._alive}
        saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        with (
            preserved(device),
            self._watching(step.model),
            self.flops,
            saving,
            torch.enable_grad(),
            autocast(),
        ):
            functional_call(step, tensors, (batch,))
        self._alive.clear()

    def _known(self, tensor: Tensor) -> Tensor:
        self._alive.append(tensor)
        return tensor

    def _save(self, tensor: Tensor) -> Tensor:
        if (key := _storage(tensor)) not in self._seen:
            self._seen.add(key)
            self.saved += tensor.untyped_storage().nbytes()
        return self._known(tensor)

    @contextmanager
    def _watching(self, model: nn.Module) -> Iterator[None]:
        """Record each module's output shape; put back what the pass assigns to attributes."""

        def watch(name: str, module: nn.Module) -> Any:
            def leave(module: nn.Module, inputs: Any, output: Any) -> None:
                shapes = [tuple(tensor.shape) for tensor in tensors_of(output)]
                if shapes:
                    self.shapes[name] = shapes

            return module.register_forward_hook(leave)

        before = [(module, dict(vars(module))) for module in model.modules()]
        handles = [watch(name, module) for name, module in model.named_modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, attributes in before:
                vars(module).clear()
                vars(module).update(attributes)


def _observed(
    model: nn.Module, example: Any, call: Call | None, autocast: Context, compute: bool
) -> tuple[_Observation | None, str | None]:
    """Return the pass, or why it failed: a summary without this part is still useful."""
    if any(hasattr(p, "full_tensor") for p in model.parameters()):
        return None, "its parameters are sharded"  # their modules do not accept replacements
    own = next((p.device for p in model.parameters()), torch.device("cpu"))
    # torch has kernels on CPUs that it counts no FLOPs of: of recurrent modules, and up to 2.11 of
    # attention.
    counted = any("flash_attention_for_cpu" in str(operator) for operator in flop_registry)
    counted = counted and not any(isinstance(module, nn.RNNBase) for module in model.modules())
    meta, problem = torch.device("meta"), None
    for device in (own, meta) if compute and own.type == "cpu" and counted else (meta, own):
        try:
            return _Observation(_Step(model, call), example, device, autocast), None
        except Exception as error:
            # A tensor created on the CPU, an operator without a meta kernel, ...: the own device's
            # error is the one to tell.
            if device == own:
                reason = str(error).strip().partition("\n")[0]
                problem = f"{type(error).__name__}: {reason}"
    return None, problem


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty_like(tensor, device=device).requires_grad_(tensor.requires_grad)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # all meta tensors have the data pointer 0


def render(summary: Summary, width: int = 100, colour: bool = False) -> str:
    """Return the summary as text: the table of modules and a line of totals."""
    return to_text(fitting_table(summary, width), totals(summary), width=width, colour=colour)


def fitting_table(summary: Summary, width: int) -> Table:
    """Return the modules as a table, without `output` and then `type` where it is too wide."""
    columns, cells = ["module", "type", "output", "parameters", "FLOPs"], []
    for row in summary.rows:
        name = "  " * row.level + (row.name.rpartition(".")[2] or "(model)")
        frozen = " frozen" if row.parameters and not row.trainable else ""
        figures = f"{row.parameters:,}{frozen}" if row.parameters else "-"
        flops = count(row.flops) if row.flops else "-"
        cells.append([name, row.kind, row.output or "-", figures, flops])
    for unwanted in (None, "output", "type"):
        if unwanted is not None:
            place = columns.index(unwanted)
            columns, cells = _without(columns, place), [_without(row, place) for row in cells]
        drawn = table(columns, cells, right=("parameters", "FLOPs"))
        if natural_width(drawn) <= width:
            break
    return drawn


def _without(items: Sequence[str], place: int) -> list[str]:
    return [*items[:place], *items[place + 1 :]]


def totals(summary: Summary) -> str:
    """Return one line of totals."""
    frozen = summary.parameters - summary.trainable
    text = f"{summary.parameters:,} parameters" + (f", {frozen:,} of them frozen" if frozen else "")
    if summary.problem:
        return f"{text}; the forward pass failed: {summary.problem}"
    return (
        f"{text}; a sample takes {count(summary.flops)}FLOPs forward "
        f"and {size(summary.activation_bytes)} of activations"
    )


def estimate(summary: Summary, optimizers: Iterable[Optimizer], micro_batch: int) -> MemoryEstimate:
    """Add up a model, its gradients, its optimizers' state and a micro-batch's activations."""
    states = [state_bytes(optimizer) for optimizer in optimizers]
    activations = summary.activation_bytes
    return MemoryEstimate(
        parameters=summary.parameter_bytes,
        buffers=summary.buffer_bytes,
        gradients=summary.gradient_bytes,
        optimizer=None if None in states else sum(state or 0 for state in states),
        activations=None if activations is None else activations * micro_batch,
    )


def state_bytes(optimizer: Optimizer) -> int | None:
    """Return the bytes of the state that `optimizer` will hold after its first step.

    A copy of it over meta parameters takes that step, so that the result is exact for any
    optimizer. None for an optimizer that needs a closure or does not accept meta parameters.
    """
    known = inspect.signature(type(optimizer)).parameters
    groups = []
    for group in optimizer.param_groups:
        parameters = [torch.empty_like(p, device="meta").requires_grad_() for p in group["params"]]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        groups.append(_unfused(group) | {"params": parameters})
    try:
        defaults = {k: v for k, v in optimizer.defaults.items() if k in known}
        twin = type(optimizer)(groups, **_unfused(defaults))
        take_step(twin)
    except Exception:  # any optimizer class, on tensors that it may not support
        return None
    values = [v for state in twin.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum(value.nbytes for value in values)


def _unfused(options: dict[str, Any]) -> dict[str, Any]:
    return options | {k: False for k in ("fused", "foreach", "capturable") if k in options}
