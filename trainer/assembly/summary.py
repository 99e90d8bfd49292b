"""A model before it is trained: its modules, their outputs and FLOPs, and the memory it needs."""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from regimen.data.batch import map_tensors
from regimen.trainer.fast import step_optimizer
from regimen.trainer.files.layout import count, format_table, size
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
    """One row for each module, and the cost of one sample; None where it is not known."""

    rows: tuple[ModuleRow, ...]  # the first is the model's
    flops: int | None  # of the forward pass
    activation_bytes: int | None  # saved for the backward pass
    problem: str | None = None  # why the forward pass failed
    uncounted: str | None = None  # why torch could not count what it costs


class _Pass(NamedTuple):
    """What was observed in a forward pass."""

    shapes: dict[str, list[tuple[int, ...]]]  # of all outputs of a module, by its name
    flops: FlopCounterMode
    saved: int  # bytes for the backward pass
    uncounted: str | None = None  # why nothing was counted; then both are unknown


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
    The pass is on the meta device, or on the model's device if that fails. With `compute` a CPU is
    tried first: a run computes more than that anyway, while torch imports sympy for the meta
    device, which takes seconds. Parameters, buffers, attributes, random states and the training
    mode are left unchanged.
    """
    samples = samples or next((len(t) for t in tensors_of(example) if t.ndim), 1)
    observed, problem = _try(model, example, call, autocast, compute)
    shapes = {} if observed is None else observed.shapes
    flop_counts: dict[str, dict[Any, int]] | None = None
    if observed is not None and observed.uncounted is None:
        flop_counts = observed.flops.get_flop_counts()
    rows = []
    for name, module in model.named_modules():
        if _level(name) <= depth:
            rows.append(_row(name, module, shapes.get(name), flop_counts, samples))
    if observed is None:
        return Summary(tuple(rows), None, None, problem)
    if observed.uncounted is not None:
        return Summary(tuple(rows), None, None, uncounted=observed.uncounted)
    flops = observed.flops.get_total_flops()
    return Summary(tuple(rows), flops // samples, observed.saved // samples)


def _level(name: str) -> int:
    """Return how deep a module is: 0 for the model itself, whose name is empty."""
    return name.count(".") + 1 if name else 0


def _row(
    name: str,
    module: nn.Module,
    shapes: list[tuple[int, ...]] | None,
    flop_counts: Mapping[str, Mapping[Any, int]] | None,
    samples: int,
) -> ModuleRow:
    """`shapes`: of the module's outputs; None if it was not called."""
    flops = None
    if shapes is not None and flop_counts is not None:
        key = f"_Step.model.{name}" if name else "_Step.model"
        flops = sum(flop_counts.get(key, {}).values()) // samples
    parameters = list(module.parameters())
    return ModuleRow(
        name,
        type(module).__name__,
        ", ".join(_shape_text(shape, samples) for shape in shapes or []),
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        flops,
    )


def _shape_text(shape: tuple[int, ...], samples: int) -> str:
    sizes = list(map(str, shape))
    if shape and shape[0] == samples:
        sizes[0] = "N"
    return " x ".join(sizes) or "scalar"


class _Step(nn.Module):
    """A model and its call as one module, whose tensors `functional_call` can replace."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, example: Any) -> Any:
        return self._call(self.model, example)


def _try(
    model: nn.Module, example: Any, call: Call, autocast: Context, compute: bool
) -> tuple[_Pass | None, str | None]:
    """Return what a forward pass shows, or why it failed."""
    if any(hasattr(p, "full_tensor") for p in model.parameters()):
        return None, "its parameters are sharded"  # their modules do not accept replacements
    own = next((p.device for p in model.parameters()), torch.device("cpu"))
    # For some kernels on CPUs torch counts no FLOPs: those of recurrent modules, and up to 2.11
    # those of attention.
    counts_attention = any("flash_attention_for_cpu" in str(name) for name in flop_registry)
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    devices = [torch.device("meta"), own]
    if compute and own.type == "cpu" and counts_attention and not is_recurrent:
        devices.reverse()
    problem = None
    for device in devices:
        try:
            return _observe(_Step(model, call), example, device, autocast), None
        except Exception as error:
            # On the meta device: a tensor created on the CPU, an operator without a meta kernel...
            # The error on the model's own device is the one to report.
            if device == own:
                problem = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    # What counts may be what failed: no hook of torch's works within torch.func.grad.
    with suppress(Exception):
        observed = _observe(_Step(model, call), example, own, autocast, counts=False)
        return observed._replace(uncounted=problem), None
    return None, problem


def _observe(
    step: _Step, example: Any, device: torch.device, autocast: Context, counts: bool = True
) -> _Pass:
    """Run the forward pass on copies of the model's tensors on `device`.

    With `counts` false only the shapes are observed.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}
    # By storage. The tensors are held: the address of a freed one would be used again.
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[_storage(tensor)] = tensor
        return tensor

    def note_shapes(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        sizes = [tuple(tensor.shape) for tensor in tensors_of(output)]
        if sizes:
            shapes[name] = sizes

    tensors: dict[str, Tensor] = {}
    for name, tensor in (*step.named_parameters(), *step.named_buffers()):
        if device.type == "meta":
            copied = torch.empty_like(tensor, device=device)
        else:
            copied = tensor.detach().clone()
        tensors[name] = copied.requires_grad_(tensor.requires_grad)
    batch = map_tensors(lambda tensor: tensor.to(device), example)
    # The pass may assign to attributes of modules: they are restored behind it.
    before = [(module, dict(vars(module))) for module in step.model.modules()]
    flops = FlopCounterMode(display=False)
    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    handles = []
    for name, module in step.model.named_modules():
        handles.append(module.register_forward_hook(partial(note_shapes, name)))
    try:
        with ExitStack() as contexts:
            contexts.enter_context(seeded(device))
            if counts:
                contexts.enter_context(flops)
                contexts.enter_context(saving)
            contexts.enter_context(torch.enable_grad())
            contexts.enter_context(autocast())
            functional_call(step, tensors, (batch,))
    finally:
        for handle in handles:
            handle.remove()
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
    # Parameters, buffers and inputs exist anyway: they take no further memory.
    existing = {_storage(tensor) for tensor in (*tensors.values(), *tensors_of(batch))}
    kept = 0  # bytes
    for key, tensor in saved.items():
        if key not in existing:
            kept += tensor.untyped_storage().nbytes()
    return _Pass(shapes, flops, kept)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # all meta tensors have the data pointer 0


def render(summary: Summary, width: int = 100) -> str:
    """Return the summary as text: the table of modules and a line of totals."""
    cells = [["module", "type", "output", "parameters", "FLOPs"]]
    for row in summary.rows:
        name = row.name.rpartition(".")[2] or "(model)"
        parameters = f"{row.parameters:,}" if row.parameters else "-"
        if row.parameters and not row.trainable:
            parameters += " frozen"
        flops = count(row.flops) if row.flops else "-"
        indented = "  " * _level(row.name) + name
        cells.append([indented, row.kind, row.output or "-", parameters, flops])
    table = format_table(cells, width, last=2, right=("parameters", "FLOPs"))

    whole = summary.rows[0]
    totals = f"{whole.parameters:,} parameters"
    frozen = whole.parameters - whole.trainable
    if frozen:
        totals += f", {frozen:,} of them frozen"
    if summary.problem:
        totals += f"; the forward pass failed: {summary.problem}"
    elif summary.uncounted:
        totals += f"; torch cannot count its FLOPs and activations: {summary.uncounted}"
    else:
        totals += (
            f"; a sample takes {count(summary.flops)}FLOPs forward "
            f"and {size(summary.activation_bytes)} of activations"
        )
    return "\n".join([*table, "", totals])


def estimate(
    model: nn.Module,
    summary: Summary,
    optimizers: Iterable[Optimizer],
    micro_batch: int,
    shards: int = 1,
) -> dict[str, int | None]:
    """Return the bytes on one device by what takes them; None where they are unknown.

    `shards`: the number of devices that parameters, gradients and optimizer state are divided over.
    """
    parameters = list(model.parameters())
    states = [state_bytes(optimizer) for optimizer in optimizers]
    activations = summary.activation_bytes
    return {
        "parameters": sum(p.nbytes for p in parameters) // shards,
        "buffers": sum(b.nbytes for b in model.buffers()),
        "gradients": sum(p.nbytes for p in parameters if p.requires_grad) // shards,
        "optimizer state": None if None in states else sum(s or 0 for s in states) // shards,
        "activations": None if activations is None else activations * micro_batch,
    }


def state_bytes(optimizer: Optimizer) -> int | None:
    """Return the bytes of the state that `optimizer` will hold after its first step.

    A copy of it over meta parameters takes that step, so that the result is exact for any
    optimizer. None for an optimizer that needs a closure or does not accept meta parameters.
    """
    # What `deepcopy` puts in the place of a tensor, by the tensor's identity. Scalars are copied:
    # they count steps.
    on_meta: dict[int, Any] = {}
    for tensor in tensors_of(optimizer.state):
        if tensor.ndim:
            on_meta[id(tensor)] = torch.empty_like(tensor, device="meta")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            replacement = torch.empty_like(parameter, device="meta").requires_grad_()
            replacement.grad = torch.empty_like(replacement)
            on_meta[id(parameter)] = replacement
    try:
        twin = copy.deepcopy(optimizer, on_meta)
        for group in twin.param_groups:
            for name in ("fused", "foreach", "capturable"):
                if name in group:
                    group[name] = False
        step_optimizer(twin)
    except Exception:  # any optimizer class, on tensors that it may not support
        return None
    total = 0
    for state in twin.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                total += value.nbytes
    return total
