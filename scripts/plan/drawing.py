"""The plan of a run as text: data, model, optimizer, schedule, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scripts.plan.batch_split import BatchSplit
from trainer.files.layout import aligned
from trainer.optimizers.optimizers import GroupRow
from trainer.summary.memory import MemoryEstimate
from trainer.summary.model import Summary, fitting_table, totals
from trainer.summary.text import natural_width, size, table, to_text

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class DataRow:
    """One split of the data."""

    split: str
    kind: str
    samples: int | None  # None: a stream
    classes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The contents of the plan, in the order in which they are shown."""

    name: str
    picks: Mapping[str, str | None]  # config group -> its choice; None is not shown
    settings: Mapping[str, str]  # further settings: seed, precision, device, strategy, ...
    overrides: Sequence[str]
    data: Sequence[DataRow]
    model: Summary
    groups: Sequence[GroupRow]
    curves: Mapping[str, Sequence[float]]  # learning rates of each group, evenly over the run
    split: BatchSplit
    updates_per_epoch: int | None  # None: a stream of unknown length
    total_steps: int | None  # None: only a time limit
    horizon: str  # as overrides: `trainer.max_epochs=6`
    memory: MemoryEstimate
    callbacks: Mapping[str, str]  # name -> class
    run_dir: str
    notes: Sequence[str] = field(default_factory=tuple)


def render(plan: Plan, width: int = 100, colour: bool = False) -> str:
    """Return the plan as text, in sections; `colour` is for a terminal."""
    return to_text(*_sections(plan, width), width=width, colour=colour)


def _sections(plan: Plan, width: int) -> Iterator[RenderableType]:
    yield from _section(f"Plan of {plan.name}", *_config(plan))
    yield from _section("Data", _data_table(plan.data))
    yield from _section("Model", fitting_table(plan.model, width), totals(plan.model))
    yield from _section("Optimizer", _groups_table(plan.groups, width))
    curves = curve_lines(plan.curves, plan.total_steps, min(64, width - 16))
    yield from _section("Learning rate", *curves)
    yield from _section("Updates", *_updates(plan), *plan.split.lines())
    yield from _section("Memory on one device", _memory_table(plan.memory), *_memory_note(plan))
    yield from _section("Callbacks", *(f"{name}: {kind}" for name, kind in plan.callbacks.items()))
    yield from _section("Files", f"a run would write to {plan.run_dir}")
    if plan.notes:
        yield from _section("Notes", *plan.notes)


def _section(title: str, *parts: RenderableType) -> Iterator[RenderableType]:
    from rich.rule import Rule  # imported here because the import of rich takes 0.1 s
    from rich.text import Text

    yield Rule(Text(title, style="bold cyan"), align="left", style="dim")
    yield from parts
    yield ""


def _config(plan: Plan) -> Iterator[str]:
    yield _pairs({group: pick for group, pick in plan.picks.items() if pick is not None})
    yield _pairs(plan.settings)
    if plan.overrides:
        yield f"overrides: {' '.join(plan.overrides)}"


def _pairs(values: Mapping[str, str | None]) -> str:
    return "  ".join(f"{key}={value}" for key, value in values.items())


def _data_table(rows: Sequence[DataRow]) -> RenderableType:
    columns = ("split", "data set", "samples", "classes")
    cells = ((r.split, r.kind, _samples(r), _classes(r)) for r in rows)
    return table(columns, cells, right=("samples",))


def _samples(row: DataRow) -> str:
    return "a stream" if row.samples is None else f"{row.samples:,}"


def _classes(row: DataRow, show: int = 10) -> str:
    names = [str(name) for name in row.classes]
    if not names:
        return "-"
    more = ", ..." if len(names) > show else ""
    return f"{len(names)}: {', '.join(names[:show])}{more}"


def _groups_table(rows: Sequence[GroupRow], width: int) -> RenderableType:
    columns = ["group", "optimizer", "tensors", "parameters", "lr", "weight decay"]
    cells = [_group_cells(row) for row in rows]
    whole = table(columns, cells, right=columns[2:])
    if natural_width(whole) <= width:
        return whole
    return "\n".join(aligned([columns, *cells], width, last=2))


def _group_cells(row: GroupRow) -> Sequence[str]:
    sizes = f"{row.tensors:,}", f"{row.parameters:,}"
    return row.group, row.optimizer, *sizes, _number(row.lr), _number(row.weight_decay)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def curve_lines(
    curves: Mapping[str, Sequence[float]], length: int | None = None, width: int = 64
) -> Iterator[str]:
    """Draw each learning-rate curve over `length` updates, `width` characters wide.

    Groups whose curves differ only by a factor share a plot.
    """
    shapes: dict[tuple[float, ...], list[str]] = {}
    for name, values in curves.items():
        top = max(values, default=0.0)
        shape = tuple(round(v / top, 6) for v in values) if top > 0 else tuple(values)
        shapes.setdefault(shape, []).append(name)
    for names in shapes.values():
        yield from _drawing({name: curves[name] for name in names}, length, width)


def _drawing(
    curves: Mapping[str, Sequence[float]], length: int | None, width: int
) -> Iterator[str]:
    captions: dict[str, list[str]] = {}
    for name, values in curves.items():
        captions.setdefault(_caption(values), []).append(name)
    yield from (f"{', '.join(names)}: {caption}" for caption, names in captions.items())
    first = next(iter(curves.values()))
    if first and min(first) < max(first):
        yield from plot(first, length, width)


def _caption(values: Sequence[float]) -> str:
    if not values:
        return "no updates"
    if min(values) == max(values):
        return f"constant at {values[0]:.4g}"
    return f"{values[0]:.3g} at first, at most {max(values):.3g}, {values[-1]:.3g} at last"


def _updates(plan: Plan) -> Iterator[str]:
    parts = [plan.horizon]
    if plan.updates_per_epoch is not None:
        parts.append(f"{plan.updates_per_epoch:,} updates an epoch")
    parts.append(
        "no limit but its time" if plan.total_steps is None else f"{plan.total_steps:,} in all"
    )
    yield ", ".join(parts)


def _memory_table(memory: MemoryEstimate) -> RenderableType:
    parts = {
        "parameters": memory.parameters,
        "buffers": memory.buffers,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
        **({} if memory.data == 0 else {"data": memory.data}),
    }
    total = size(memory.total) if memory.complete else f"more than {size(memory.total)}"
    rows = [*((name, size(value)) for name, value in parts.items()), ("estimate", total)]
    return table(("part", "size"), rows, right=("size",))


def _memory_note(plan: Plan) -> Iterator[str]:
    others = ", its workspace and the data" if plan.memory.data == 0 else " and its workspace"
    yield (
        f"activations of {plan.split.largest} samples at a time; the framework{others} need "
        "additional memory"
    )
    if plan.memory.data is None:
        yield "data.cache=device: how much the decoded images take shows when they are decoded"


_BLOCKS = " ▁▂▃▄▅▆▇█"


def plot(
    values: Sequence[float], length: int | None = None, width: int = 64, height: int = 5
) -> list[str]:
    """Plot `values` as an area from zero to their maximum, over `length` updates.

    The values are evenly spaced; without a length there is one value for each update.
    """
    length = len(values) if length is None else length
    top = max(values)
    if top <= 0:
        return [f"0 over {length:,} updates"]
    columns = _sample(values, width)
    # In eighths of a line; values above zero get at least one.
    filled = [max(round(v / top * height * 8), v > 0) for v in columns]
    axis = f"{top:.3g}"
    lines = []
    for line in reversed(range(height)):
        blocks = "".join(_BLOCKS[min(max(f - 8 * line, 0), 8)] for f in filled)
        lines.append(f"{axis if line == height - 1 else '':>9} │{blocks}".rstrip())
    lines.append(f"{'0':>9} └{'─' * len(columns)}")
    end = f"{length:,} updates"
    lines.append(f"{'':>11}0{end:>{max(len(columns) - 1, len(end) + 1)}}")
    return lines


def _sample(values: Sequence[float], width: int) -> list[float]:
    """Return `width` evenly spaced values, including the first and the last."""
    if len(values) <= width:
        repeat = max(1, width // len(values))
        return [value for value in values for _ in range(repeat)]
    last = len(values) - 1
    return [values[round(column * last / (width - 1))] for column in range(width)]
