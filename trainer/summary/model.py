"""A summary of a model: its modules, their outputs, parameters, FLOPs and activations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer.nested import first_tensor
from trainer.summary.probe import Call, Context, Probe, probe
from trainer.summary.text import count, natural_width, size, table, to_text

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = ("module", "type", "output", "parameters", "FLOPs")


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
    the loss is included. BatchNorm needs two samples or more. The model and the random number
    generators are left unchanged. `compute`: the pass may take the model's CPU (see `probe`).
    """
    first = first_tensor(example)
    samples = len(first) if first is not None and first.ndim else 1
    found = probe(model, example, call or _plain, autocast, compute)
    parameters = list(model.parameters())
    return Summary(
        rows=tuple(
            _row(name, module, found, samples)
            for name, module in model.named_modules()
            if _level(name) <= depth
        ),
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.nbytes for p in parameters),
        gradient_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
        buffer_bytes=sum(b.nbytes for b in model.buffers()),
        flops=_per_sample(found.total_flops, samples),
        activation_bytes=_per_sample(found.saved_bytes, samples),
        problem=found.problem,
    )


def render(summary: Summary, width: int = 100, colour: bool = False) -> str:
    """Return the summary as text: the table of modules and a line of totals."""
    return to_text(fitting_table(summary, width), totals(summary), width=width, colour=colour)


def fitting_table(summary: Summary, width: int) -> Table:
    """Return the modules as a table, without `output` and then `type` where it is too wide."""
    tables = [modules_table(summary, without) for without in ((), ("output",), ("output", "type"))]
    fitting = (drawn for drawn in tables if natural_width(drawn) <= width)
    return next(fitting, tables[-1])


def modules_table(summary: Summary, without: Sequence[str] = ()) -> Table:
    """Return the modules as a rich table, indented by level."""
    shown = [i for i, name in enumerate(_COLUMNS) if name not in without]
    rows = [[_cells(row)[i] for i in shown] for row in summary.rows]
    return table([_COLUMNS[i] for i in shown], rows, right=("parameters", "FLOPs"))


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


def _plain(model: nn.Module, example: Any) -> Any:
    return model(example)


def _row(name: str, module: nn.Module, found: Probe, samples: int) -> ModuleRow:
    parameters = list(module.parameters())
    return ModuleRow(
        name=name,
        kind=type(module).__name__,
        level=_level(name),
        output=_shape(found.shapes.get(name), samples),
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        flops=_per_sample(found.flops.get(name), samples),
    )


def _cells(row: ModuleRow) -> Sequence[str]:
    name = "  " * row.level + (row.name.rpartition(".")[2] or "(model)")
    frozen = " frozen" if row.parameters and not row.trainable else ""
    figures = f"{row.parameters:,}{frozen}" if row.parameters else "-"
    return name, row.kind, row.output or "-", figures, count(row.flops) if row.flops else "-"


def _shape(shape: tuple[int, ...] | None, samples: int) -> str:
    if shape is None:
        return ""
    sizes = ["N" if i == 0 and n == samples else str(n) for i, n in enumerate(shape)]
    return " x ".join(sizes) or "scalar"


def _level(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _per_sample(value: int | None, samples: int) -> int | None:
    return None if value is None else value // samples
